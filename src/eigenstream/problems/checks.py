"""Checks of batches and options, with errors that name the argument and the cure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream.core import players, views
from eigenstream.core.types import Tree


def view_sizes(template: Tree) -> list[int]:
    """The dimensions of the views of a tuple; anything else is one view."""
    return [players.size(view) for view in template] if isinstance(template, tuple) else [players.size(template)]


def check_options(center: Any, ridge: float) -> None:
    if center not in (True, False, "running"):
        raise ValueError(f"center={center!r}: give True (each batch's mean), False (rows are centred) or 'running'")
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge={ridge!r}: give a number of at least 0, relative to the mean eigenvalue of B")


def check_k(k: int | None, most: int) -> None:
    """Refuse more components than the problem has."""
    if k is not None and k > most:
        raise ValueError(
            f"k={k} is too large: this problem has at most {most} components; give k (n_components) of at most {most}"
        )


def check_rows(x: Any, name: str) -> Any:
    """Check one leaf and convert it to a float array or a float CSR matrix."""
    if isinstance(x, jsparse.BCOO):
        x = scipy.sparse.coo_matrix((x.data, np.asarray(x.indices).T), shape=x.shape)
    if scipy.sparse.issparse(x):
        x = x.tocsr()
    elif not isinstance(x, jax.Array | np.ndarray):
        x = _from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)
    if x.dtype.kind not in "biufV" or x.dtype.names is not None:
        raise ValueError(f"{name} has dtype {x.dtype}: give real numbers (split complex ones into two columns)")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}: give rows by features, at least two dimensions (x[:, None])")
    return x.astype(_float_for(x.dtype)) if _float_for(x.dtype) != x.dtype else x


def _from_dlpack(x: Any) -> Any:
    """A tensor of another library, without a copy: a NumPy array if it is on the host, else a JAX array."""
    x = x.detach() if hasattr(x, "detach") else x
    on_host = int(x.__dlpack_device__()[0]) == 1
    try:
        return np.from_dlpack(x) if on_host else jnp.from_dlpack(x)
    except (BufferError, RuntimeError):
        # NumPy has no such dtype (bfloat16, for instance).
        return jnp.from_dlpack(x)


def _float_for(dtype: Any) -> Any:
    """float32 or float64, whichever holds the values of a real dtype."""
    if dtype.kind in "biu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    # NumPy gives bfloat16 and other JAX dtypes the kind "V".
    return np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)


def check_finite(batch: Tree) -> None:
    """Raise if host rows hold NaN or infinity. Device arrays are not read back: the step fails instead."""
    for path, x in _flattened(batch)[0]:
        values = x.data if scipy.sparse.issparse(x) else x
        # The sum is a cheap first test: it is finite only if all values are.
        if not isinstance(values, np.ndarray) or _sum_is_finite(values, None):
            continue
        if not np.isfinite(values).all():
            name = f"batch{jax.tree_util.keystr(path)}"
            where = "" if scipy.sparse.issparse(x) else f", first in its row {np.argwhere(~np.isfinite(x))[0][0]}"
            raise ValueError(f"{name} holds NaN or infinity{where}: drop or impute those rows before they are streamed")
        if not _sum_is_finite(values, np.float64):
            raise ValueError("the sums are not finite: the rows hold numbers too large to square")


def _sum_is_finite(values: np.ndarray, dtype: Any) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum(dtype=dtype)))


def _flattened(batch: Tree) -> tuple[list[Any], Any]:
    """Leaves with their paths, and the structure. Every object that is no list, tuple or dict is a leaf."""
    return jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: not isinstance(x, list | tuple | dict))


def check_views(batch: Tree) -> Tree:
    """Check every leaf, and that all have the same number of rows."""
    paths, structure = _flattened(batch)
    if not paths:
        raise ValueError("the batch holds no array: give rows by features")
    named = [(f"batch{jax.tree_util.keystr(path)}", x) for path, x in paths]
    checked = [check_rows(x, name) for name, x in named]
    lengths = {name: views.n_rows(x) for (name, _), x in zip(named, checked, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the views have unequal numbers of rows, {lengths}: row r of each must be the same sample")
    if not next(iter(lengths.values())):
        raise ValueError("the batch has no rows: leave empty batches out of the stream")
    return jax.tree.unflatten(structure, checked)

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
    """The dimension of every view: of the parts of a tuple, or of the whole."""
    return [players.size(view) for view in template] if isinstance(template, tuple) else [players.size(template)]


def static(cls: type) -> type:
    """Register a problem without arrays as a pytree that is all structure."""
    return jax.tree_util.register_static(cls)


def check_options(center: Any, ridge: float) -> None:
    if center not in (True, False, "running"):
        raise ValueError(f"center={center!r}: give True (each batch's mean), False (rows are centred) or 'running'")
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge={ridge!r}: give a number of at least 0, relative to the mean eigenvalue of B")


def check_rows(x: Any, name: str) -> Any:
    """One leaf of rows as a float array or a float CSR matrix, checked."""
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
    """Another library's tensor where it lies: as a NumPy array on the host, as a JAX array on a device."""
    x = x.detach() if hasattr(x, "detach") else x
    on_host = int(x.__dlpack_device__()[0]) == 1
    try:
        return np.from_dlpack(x) if on_host else jnp.from_dlpack(x)
    except (BufferError, RuntimeError):
        # Types that NumPy has no name for, bfloat16 among them.
        return jnp.from_dlpack(x)


def _float_for(dtype: Any) -> Any:
    """The float type that holds a real type's values: float32 or float64."""
    if dtype.kind in "biu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    # JAX's own small floats, bfloat16 among them, are of kind "V" to NumPy.
    return np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)


def check_finite(batch: Tree) -> None:
    """Refuse host rows with NaN or infinity. A device array is not read back: the step that meets one fails."""
    for path, x in _leaves_with_path(batch):
        values = x.data if scipy.sparse.issparse(x) else x
        # The sum is finite if all are, and costs less than asking each.
        if isinstance(values, np.ndarray) and not np.isfinite(values.sum()) and not np.isfinite(values).all():
            name = f"batch{jax.tree_util.keystr(path)}"
            where = "" if scipy.sparse.issparse(x) else f", first in its row {np.argwhere(~np.isfinite(x))[0][0]}"
            raise ValueError(f"{name} holds NaN or infinity{where}: drop or impute those rows before they are streamed")


def _leaves_with_path(batch: Tree) -> list[Any]:
    def is_leaf(x: Any) -> bool:
        return not isinstance(x, list | tuple | dict)

    return jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_leaf)[0]


def check_views(batch: Tree) -> Tree:
    """Every leaf checked, and all of the same number of rows."""
    paths = _leaves_with_path(batch)
    if not paths:
        raise ValueError("the batch holds no array: give rows by features")
    named = [(f"batch{jax.tree_util.keystr(path)}", x) for path, x in paths]
    checked = [check_rows(x, name) for name, x in named]
    lengths = {name: views.n_rows(x) for (name, _), x in zip(named, checked, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the views have unequal numbers of rows, {lengths}: row r of each must be the same sample")
    if not next(iter(lengths.values())):
        raise ValueError("the batch has no rows: leave empty batches out of the stream")
    structure = jax.tree.structure(batch, is_leaf=lambda x: not isinstance(x, list | tuple | dict))
    return jax.tree.unflatten(structure, checked)

"""Batches on the host: join, cut, subtract a pilot, move to a device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream.core import moments
from eigenstream.core.transfer import Picked, pick, put
from eigenstream.core.types import Tree
from eigenstream.core.views import Filled, Sparse, n_rows

#: JAX uses host memory without a copy if its address is a multiple of this.
ALIGNMENT = 64

_map = partial(jax.tree.map, is_leaf=scipy.sparse.issparse)


class Part(NamedTuple):
    """The rows of a batch that one of several processes reads: from row ``start`` of ``total`` on."""

    rows: Tree
    start: int
    total: int


def pilot(batch: Tree) -> Tree | None:
    """The means of features that lie ten standard deviations or more from 0, to subtract from every row; or None."""

    def one(leaf: Any) -> Any:
        if scipy.sparse.issparse(leaf):
            return np.zeros((1, leaf.shape[1]), leaf.dtype)
        point = moments.pilot(_matrix(leaf).astype(np.promote_types(leaf.dtype, np.float32), copy=False))
        return point.astype(leaf.dtype).reshape((1, *leaf.shape[1:]))

    points = _map(one, batch)
    return points if any(point.any() for point in jax.tree.leaves(points)) else None


def less_pilot(batch: Tree, point: Tree) -> Tree:
    """Rows minus a pilot; sparse rows have none."""
    return _map(lambda leaf, p: leaf if scipy.sparse.issparse(leaf) else leaf - p, batch, point)


def to_device(batch: Tree, for_good: bool = False) -> Tree:
    """Move rows to the device; large arrays are copied by several threads, which this call waits for.

    ``for_good``: nobody will write to the host rows again, so a CPU needs no copy.
    """

    def one(leaf: Any) -> Any:
        if not scipy.sparse.issparse(leaf):
            return put(leaf) if for_good and isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
        coo = leaf.tocoo()
        # Pad to a power of two, so that a stream of sparse batches compiles few programs.
        room = 1 << max(int(coo.nnz) - 1, 1).bit_length()
        data = np.zeros(room, coo.dtype)
        indices = np.full((room, 2), coo.shape, np.int32)
        data[: coo.nnz], indices[: coo.nnz, 0], indices[: coo.nnz, 1] = coo.data, coo.row, coo.col
        return Sparse(jsparse.BCOO((jnp.asarray(data), jnp.asarray(indices)), shape=coo.shape))

    return _map(one, batch)


def join(*batches: Tree) -> Tree:
    """Concatenate batches, on the device if they are there or on their way."""
    if isinstance(batches[0], Picked):
        return pick(*batches)

    def one(*leaves: Any) -> Any:
        if len(leaves) == 1:
            return leaves[0]
        if scipy.sparse.issparse(leaves[0]):
            return scipy.sparse.vstack(leaves, format="csr")
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)
        count = sum(map(len, leaves))
        return np.concatenate(leaves, out=_aligned((count, *leaves[0].shape[1:]), np.result_type(*leaves)))

    return _map(one, *batches)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX can use without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def owned(batch: Tree, given: Tree) -> Tree:
    """The host batch, copied where it shares memory with ``given``, which the caller may overwrite."""

    def one(leaf: Any, source: Any) -> Any:
        shared = scipy.sparse.issparse(leaf) or leaf is source or np.may_share_memory(leaf, source)
        return leaf.copy() if shared else leaf

    return _map(one, batch, given)


def filled(batch: Tree, parts: int, capacity: int) -> Tree:
    """Dense host rows as `Filled`: ``parts`` parts, as `eigenstream.core.views.split` cuts them, each padded."""
    b, each = n_rows(batch), capacity // parts
    ends = [i * b // parts for i in range(parts + 1)]

    def one(leaf: np.ndarray) -> Filled:
        out = np.zeros((capacity, *leaf.shape[1:]), leaf.dtype)
        for i, (lo, hi) in enumerate(itertools.pairwise(ends)):
            out[i * each : i * each + hi - lo] = leaf[lo:hi]
        return Filled(out, np.diff(ends).astype(np.int32))

    return jax.tree.map(one, batch)


def rows_between(batch: Tree, start: int, stop: int) -> Tree:
    return _map(operator.itemgetter(slice(start, stop)), batch)


def cut(batch: Tree, sizes: Iterable[int]) -> Iterator[Tree]:
    """Consecutive parts of a host batch, with these numbers of rows."""
    for lo, hi in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        yield rows_between(batch, lo, hi)


def pieces(batch: Tree, size: int) -> Iterator[Tree]:
    """Consecutive parts of a host batch, of at most ``size`` rows each."""
    return cut(batch, itertools.repeat(size, -(-n_rows(batch) // size)))


def in_powers_of_two(n: int, least: int) -> list[int]:
    """``n`` as a sum of powers of two of at least ``least``; the remainder is added to the last."""
    sizes = [1 << i for i in reversed(range(n.bit_length())) if n >> i & 1 and 1 << i >= least] or [0]
    sizes[-1] += n - sum(sizes)
    return sizes


def last(batch: Tree, count: int) -> Tree:
    """A copy of the last rows of a host batch, so that the batch can be freed."""
    return _map(lambda leaf: leaf[-count:].copy(), batch)


def dense_or_csr(batch: Tree) -> Any:
    """All views of a host batch as one ``(b, d)`` matrix, which is sparse if every view is."""
    parts = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    if all(scipy.sparse.issparse(p) for p in parts):
        return scipy.sparse.hstack(parts, format="csr")
    flat = [p.toarray() if scipy.sparse.issparse(p) else _matrix(p) for p in parts]
    return np.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]


#: More leaves than this are concatenated before they are multiplied.
MOST_PARTS = 4


def dense_parts(batch: Tree) -> Any:
    """All views of a host batch as dense matrices; as one matrix if they are many, sparse or of two dtypes."""
    leaves = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    alike = len({getattr(leaf, "dtype", None) for leaf in leaves}) == 1
    if len(leaves) > MOST_PARTS or not alike or any(scipy.sparse.issparse(leaf) for leaf in leaves):
        return dense_or_csr(batch)
    return [_matrix(leaf) for leaf in leaves]


def parts(batch: Tree) -> list[Any]:
    """The leaves of a host batch as matrices; sparse ones stay sparse."""
    leaves = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    return [leaf if scipy.sparse.issparse(leaf) else _matrix(leaf) for leaf in leaves]


def matrices(batch: Tree) -> list[Any]:
    """The leaves of a batch as dense matrices, each where it is."""
    leaves = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    return [x.toarray() if scipy.sparse.issparse(x) else x.reshape(x.shape[0], -1) for x in leaves]


def _matrix(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).reshape(leaf.shape[0], -1)

"""Batches on the host: joined, cut, brought near zero, and handed to a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream.core.types import Tree
from eigenstream.core.views import Filled, Sparse, n_rows

#: What JAX wants of the address of memory that it is to take over: a cache line.
ALIGNMENT = 64


class Part(NamedTuple):
    """The rows of a batch that one of several processes reads, from row ``start`` on of ``total``."""

    rows: Tree
    start: int
    total: int


def pilot(batch: Tree) -> Tree | None:
    """The means of features that lie ten deviations or more from zero, to be subtracted from every row; or None.

    Centred problems do not see the difference, but float32 does.
    """

    def one(leaf: Any) -> Any:
        if scipy.sparse.issparse(leaf):
            return np.zeros((1, leaf.shape[1]), leaf.dtype)
        if isinstance(leaf, jax.Array):
            # What is on a device stays there.
            mean, square = leaf.mean(0, keepdims=True), (leaf**2).mean(0, keepdims=True)
            return jnp.where(mean**2 > 100 * (square - mean**2), mean, 0)
        x = _matrix(leaf)
        mean = x.mean(0, dtype=np.float64)
        variance = np.einsum("ij,ij->j", x, x) / len(x) - mean**2
        return np.where(mean**2 > 100 * variance, mean, 0).astype(x.dtype).reshape((1, *leaf.shape[1:]))

    points = jax.tree.map(one, batch, is_leaf=scipy.sparse.issparse)
    return points if any(point.any() for point in jax.tree.leaves(points)) else None


def less_pilot(batch: Tree, point: Tree) -> Tree:
    """Host rows less a pilot; sparse rows have none."""
    return jax.tree.map(
        lambda leaf, p: leaf if scipy.sparse.issparse(leaf) else leaf - p, batch, point, is_leaf=scipy.sparse.issparse
    )


def to_device(batch: Tree, for_good: bool = False) -> Tree:
    """Host rows as the step takes them: SciPy's sparse rows become `Sparse`, all else stays.

    Rows given ``for_good``, which nobody will write to again, need no copy on a CPU.
    """

    def one(leaf: Any) -> Any:
        if not scipy.sparse.issparse(leaf):
            return jax.device_put(leaf, may_alias=True) if for_good else jnp.asarray(leaf)
        coo = leaf.tocoo()
        # Padded to a power of two, so that a stream of sparse batches compiles a few programs and not one a batch.
        room = 1 << max(int(coo.nnz) - 1, 1).bit_length()
        data = np.zeros(room, coo.dtype)
        indices = np.full((room, 2), coo.shape, np.int32)
        data[: coo.nnz], indices[: coo.nnz, 0], indices[: coo.nnz, 1] = coo.data, coo.row, coo.col
        matrix = jsparse.BCOO((jnp.asarray(data), jnp.asarray(indices)), shape=coo.shape)
        return Sparse(matrix)

    return jax.tree.map(one, batch, is_leaf=scipy.sparse.issparse)


def join(*batches: Tree) -> Tree:
    """Batches as one, on the host or, where they are there, on the device."""

    def one(*leaves: Any) -> Any:
        if len(leaves) == 1:
            return leaves[0]
        if scipy.sparse.issparse(leaves[0]):
            return scipy.sparse.vstack(leaves, format="csr")
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)
        count = sum(map(len, leaves))
        return np.concatenate(leaves, out=_aligned((count, *leaves[0].shape[1:]), np.result_type(*leaves)))

    return jax.tree.map(one, *batches, is_leaf=scipy.sparse.issparse)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at an address that JAX can take as it is."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def owned(batch: Tree, given: Tree) -> Tree:
    """A host batch whose memory is not that of the one given, which may be used again by who gave it."""

    def one(leaf: Any, source: Any) -> Any:
        shared = scipy.sparse.issparse(leaf) or leaf is source or np.may_share_memory(leaf, source)
        return leaf.copy() if shared else leaf

    return jax.tree.map(one, batch, given, is_leaf=scipy.sparse.issparse)


def filled(batch: Tree, parts: int, capacity: int) -> Tree:
    """Dense host rows as `Filled`: cut as `eigenstream.rows.split` cuts them, each part filled up to its share."""
    b, each = n_rows(batch), capacity // parts
    ends = [i * b // parts for i in range(parts + 1)]

    def one(leaf: np.ndarray) -> Filled:
        out = np.zeros((capacity, *leaf.shape[1:]), leaf.dtype)
        for i, (lo, hi) in enumerate(itertools.pairwise(ends)):
            out[i * each : i * each + hi - lo] = leaf[lo:hi]
        return Filled(out, np.diff(ends).astype(np.int32))

    return jax.tree.map(one, batch)


def cut(batch: Tree, sizes: Iterable[int]) -> Iterator[Tree]:
    """Consecutive parts of a host batch, of so many rows each."""
    for lo, hi in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        yield jax.tree.map(lambda leaf, lo=lo, hi=hi: leaf[lo:hi], batch, is_leaf=scipy.sparse.issparse)


def pieces(batch: Tree, size: int) -> Iterator[Tree]:
    """A host batch cut into consecutive ones of at most ``size`` rows."""
    return cut(batch, itertools.repeat(size, -(-n_rows(batch) // size)))


def in_powers_of_two(n: int, least: int) -> list[int]:
    """Sizes of parts of ``n`` rows, powers of two of at least ``least``; the last takes what is left over."""
    sizes = [1 << i for i in reversed(range(n.bit_length())) if n >> i & 1 and 1 << i >= least] or [0]
    sizes[-1] += n - sum(sizes)
    return sizes


def last(batch: Tree, count: int) -> Tree:
    """A copy of the last rows of a host batch, which keeps nothing else of it alive."""
    return jax.tree.map(lambda leaf: leaf[-count:].copy(), batch, is_leaf=scipy.sparse.issparse)


def dense_or_csr(batch: Tree) -> Any:
    """The views of a host batch side by side as one ``(b, d)`` matrix; sparse if every view is."""
    parts = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    if all(scipy.sparse.issparse(p) for p in parts):
        return scipy.sparse.hstack(parts, format="csr")
    flat = [p.toarray() if scipy.sparse.issparse(p) else np.asarray(p).reshape(p.shape[0], -1) for p in parts]
    return np.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]


#: Views of more leaves than this are laid side by side before they are multiplied.
MOST_PARTS = 4


def dense_parts(batch: Tree) -> Any:
    """The views of a host batch as a list of dense ``(b, d)`` matrices, or as one matrix where that is better."""
    leaves = jax.tree.leaves(batch, is_leaf=scipy.sparse.issparse)
    alike = len({getattr(leaf, "dtype", None) for leaf in leaves}) == 1
    if len(leaves) > MOST_PARTS or not alike or any(scipy.sparse.issparse(leaf) for leaf in leaves):
        return dense_or_csr(batch)
    return [_matrix(leaf) for leaf in leaves]


def _matrix(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).reshape(leaf.shape[0], -1)

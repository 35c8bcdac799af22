"""Rows of data and the two primitives that every data problem is written in.

``project(x, V) -> (b, k)`` gives the scores of ``b`` rows on ``k`` players; ``lift(x, scores)`` sends scores back to
the players' space, averaged over the rows, so that ``lift(x, project(x, V))`` is the second moment ``E[x xᵀ]`` applied
to ``V``. A view ``x`` is a pytree whose leaves are one of

- a dense array ``(b, ...)``,
- `Sparse`: sparse rows less a low-rank part, which is how means are taken off sparse rows that stay sparse,
- `Centred`: rows of either kind that are to be centred by their own batch,
- `Covariance`: a second moment that was already summed, in the place of the rows it came from. Problems evaluated on it
  give their exact matrices, so that no formula is written once for streams and once more for sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream import trees

Tree = Any

#: What JAX wants of the address of memory that it is to take over: a cache line.
ALIGNMENT = 64


class Sparse(NamedTuple):
    """The rows ``matrix - weights @ means``: sparse minus low rank."""

    matrix: jsparse.BCOO
    weights: Any = None
    means: Any = None


class Centred(NamedTuple):
    """Rows, dense or sparse, whose scores are taken about the batch's mean and scaled by ``b / (b - 1)``.

    Centring is idempotent, ``XᵀHᵀHX = XᵀHX``, so centring the scores is enough and the rows need no copy. Rows whose
    mean is much larger than their deviations would lose digits this way: see `pilot`.
    """

    rows: Any


class Covariance(NamedTuple):
    """Columns of a summed second moment that belong to one leaf, standing in for the leaf's rows."""

    columns: np.ndarray
    start: int
    shape: tuple[int, ...]


class Mean(NamedTuple):
    """A running mean of a view and the number of rows behind it."""

    mean: Tree
    rows: jax.Array


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Sparse | Centred | Covariance | jsparse.BCOO)


def leaves(x: Tree) -> list[Any]:
    return jax.tree.leaves(x, is_leaf=_is_leaf)


def map_leaves(f: Any, x: Tree, *more: Tree) -> Tree:
    return jax.tree.map(f, x, *more, is_leaf=_is_leaf)


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)


def _sum(parts: list[Any]) -> Any:
    return sum(parts[1:], start=parts[0])


def _values(leaf: Any) -> Any:
    """The array, dense or sparse, that holds a leaf's rows."""
    leaf = leaf.rows if isinstance(leaf, Centred) else leaf
    return leaf.matrix if isinstance(leaf, Sparse) else leaf


def n_rows(x: Tree) -> int:
    return _values(leaves(x)[0]).shape[0]


def template(x: Tree) -> Tree:
    """Shape and dtype of one player for the rows ``x``."""

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = _values(leaf)
        return jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype))

    return map_leaves(describe, x)


def project(x: Tree, V: Tree) -> Any:
    """Scores ``⟨x_r, v_i⟩``, shape (b, k), summed over the leaves of a view."""
    return _sum(leaves(map_leaves(_project, x, V)))


def _project(leaf: Any, v: Any) -> Any:
    v = _matrix(v)
    if isinstance(leaf, Centred):
        scores = _project(leaf.rows, v)
        b = scores.shape[0]
        return (scores - scores.mean(0)) * (b / (b - 1))
    if isinstance(leaf, Covariance):
        return leaf.columns @ v.T
    if isinstance(leaf, Sparse):
        scores = leaf.matrix @ v.T
        return scores if leaf.means is None else scores - leaf.weights @ (leaf.means @ v.T)
    return _matrix(leaf) @ v.T


def lift(x: Tree, scores: Any) -> Tree:
    """``E_r[scores[r, i] x_r]`` for every player ``i``, shaped like the players."""
    return map_leaves(lambda leaf: _lift(leaf, scores), x)


def _lift(leaf: Any, scores: Any) -> Any:
    if isinstance(leaf, Centred):
        return _lift(leaf.rows, scores)
    if isinstance(leaf, Covariance):
        stop = leaf.start + int(np.prod(leaf.shape))
        return scores[leaf.start : stop].T.reshape((-1, *leaf.shape))
    mean_scores = scores / scores.shape[0]
    if isinstance(leaf, Sparse):
        out = (leaf.matrix.T @ mean_scores).T
        return out if leaf.means is None else out - (leaf.weights.T @ mean_scores).T @ leaf.means
    return (mean_scores.T @ _matrix(leaf)).reshape((-1, *leaf.shape[1:]))


def lift_both(x: Tree, first: Any, second: Any) -> tuple[Tree, Tree]:
    """Two lifts that read the rows once."""
    k = first.shape[1]
    if isinstance(first, np.ndarray):
        return lift(x, first), lift(x, second)
    both = lift(x, jnp.concatenate([first, second], axis=1))
    return jax.tree.map(lambda leaf: leaf[:k], both), jax.tree.map(lambda leaf: leaf[k:], both)


def squared_norms(x: Tree) -> Any:
    """``|x_r|²`` of every row, summed over the leaves."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Sparse):
            return (_matrix(leaf) ** 2).sum(1)
        ones = jnp.ones(leaf.matrix.shape[1], leaf.matrix.dtype)
        squares = jsparse.BCOO((leaf.matrix.data**2, leaf.matrix.indices), shape=leaf.matrix.shape) @ ones
        if leaf.means is None:
            return squares
        cross = ((leaf.matrix @ leaf.means.T) * leaf.weights).sum(1)
        return squares - 2 * cross + ((leaf.weights @ (leaf.means @ leaf.means.T)) * leaf.weights).sum(1)

    return _sum([one(leaf) for leaf in leaves(x)])


def trace(x: Tree) -> Any:
    """The trace of the second moment, ``E|x|²``."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Covariance):
            return np.trace(leaf.columns[leaf.start : leaf.start + int(np.prod(leaf.shape))])
        if not isinstance(leaf, Centred):
            return squared_norms(leaf).mean()
        b = n_rows(leaf)
        mean = column_sums(leaf.rows, jnp.full((b, 1), 1 / b, _values(leaf).dtype))
        return (squared_norms(leaf.rows).mean() - (mean**2).sum()) * (b / (b - 1))

    return _sum([one(leaf) for leaf in leaves(x)])


def dimension(x: Tree) -> int:
    """The number of features of a view."""
    sizes = [c.shape if isinstance(c, Covariance) else template(c).shape for c in leaves(x)]
    return sum(int(np.prod(shape)) for shape in sizes)


def ridged(x: Tree, v: Tree, Bv: Tree, ridge: float) -> Tree:
    """``B v`` of one view, plus ``ridge`` times the mean eigenvalue of its second moment."""
    return trees.add(Bv, trees.scale(ridge * trace(x) / dimension(x), v)) if ridge else Bv


def scale_rows(x: Tree, factor: Any) -> Tree:
    """Multiply row ``r`` by ``factor[r]``."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Sparse):
            data = leaf.matrix.data * factor.at[leaf.matrix.indices[:, 0]].get(mode="fill", fill_value=0)
            matrix = jsparse.BCOO((data, leaf.matrix.indices), shape=leaf.matrix.shape)
            return Sparse(matrix, None if leaf.weights is None else factor[:, None] * leaf.weights, leaf.means)
        return factor.reshape((-1,) + (1,) * (leaf.ndim - 1)) * leaf

    return map_leaves(one, x)


def dense(x: Tree) -> Tree:
    """Sparse rows written out; all else as it is."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Sparse):
            return leaf
        full = leaf.matrix.todense()
        return full if leaf.means is None else full - leaf.weights @ _matrix(leaf.means)

    return map_leaves(one, x)


def column_sums(x: Any, weights: jax.Array) -> Any:
    """``weightsᵀ x`` for a ``(b, g)`` array of weights, as a ``(g, ...)`` leaf."""
    if isinstance(x, Sparse):
        return (x.matrix.T @ weights).T
    # In full precision: a mean is subtracted later. As a product because XLA sums down columns slowly on a CPU.
    return jnp.matmul(weights.T, _matrix(x), precision="highest").reshape((-1, *x.shape[1:]))


def less(x: Tree, weights: jax.Array, means: Tree) -> Tree:
    """The rows ``x - weights @ means``; sparse rows stay sparse."""

    def one(leaf: Any, m: Any) -> Any:
        if isinstance(leaf, Sparse):
            return Sparse(leaf.matrix, weights, m)
        return leaf - jnp.matmul(weights, _matrix(m), precision="highest").reshape(leaf.shape)

    return map_leaves(one, x, means)


def centre_by_batch(x: Tree) -> Tree:
    """Rows whose second moment is the unbiased covariance about the batch's own mean."""
    return map_leaves(Centred, x)


def pilot(batch: Tree) -> Tree | None:
    """The means of features that lie ten deviations or more from zero, to be subtracted from every row; or None.

    Centred problems do not see the difference, but float32 does.
    """

    def one(leaf: Any) -> Any:
        if scipy.sparse.issparse(leaf):
            return np.zeros((1, leaf.shape[1]), leaf.dtype)
        x = _matrix(np.asarray(leaf))
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


def start_mean(x: Tree) -> Mean:
    return Mean(jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), template(x)), jnp.zeros((), jnp.int32))


def update_mean(running: Mean, x: Tree) -> Mean:
    b = n_rows(x)
    count = running.rows + b

    def one(leaf: Any, m: Any) -> Any:
        ones = jnp.ones((b, 1), m.dtype)
        return m + (column_sums(leaf, ones) - b * m) / count.astype(m.dtype)

    return Mean(map_leaves(one, x, running.mean), count)


def centre_by_mean(x: Tree, running: Mean) -> Tree:
    dtype = template(leaves(x)[0]).dtype
    return less(x, jnp.ones((n_rows(x), 1), dtype), running.mean)


def split(batch: Tree, shares: tuple[int, ...]) -> list[Tree]:
    """Cut a batch into consecutive parts of sizes proportional to ``shares``, no row lost."""
    b = n_rows(batch)
    ends = np.cumsum((0, *shares)) * b // sum(shares)

    def cut(leaf: Any, lo: int, hi: int) -> Any:
        if not isinstance(leaf, Sparse):
            return leaf[lo:hi]
        return Sparse(leaf.matrix[lo:hi], None if leaf.weights is None else leaf.weights[lo:hi], leaf.means)

    return [
        map_leaves(lambda leaf, lo=lo, hi=hi: cut(leaf, lo, hi), batch)
        for lo, hi in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def stacked(batch: Tree, m: int) -> Tree | None:
    """The batch as ``m`` equal parts along a new first axis, without a copy; None where it cannot be cut so."""
    if n_rows(batch) % m or any(isinstance(leaf, Sparse) for leaf in leaves(batch)):
        return None
    return jax.tree.map(lambda leaf: leaf.reshape((m, leaf.shape[0] // m, *leaf.shape[1:])), batch)


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
    return [_matrix(np.asarray(leaf)) for leaf in leaves]


def covariance_view(C: np.ndarray, template: Tree) -> Tree:
    """A summed second moment of all features as a view shaped like ``template``."""
    items, structure = jax.tree.flatten(template)
    starts = np.cumsum([0] + [int(np.prod(s.shape)) for s in items]).tolist()
    return jax.tree.unflatten(
        structure,
        [Covariance(C[:, a:b], a, tuple(s.shape)) for a, b, s in zip(starts[:-1], starts[1:], items, strict=True)],
    )


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


def pieces(batch: Tree, size: int) -> Iterator[Tree]:
    """A host batch cut into consecutive ones of at most ``size`` rows."""
    for lo in range(0, n_rows(batch), size):
        yield jax.tree.map(lambda leaf, lo=lo: leaf[lo : lo + size], batch, is_leaf=scipy.sparse.issparse)


def last(batch: Tree, count: int) -> Tree:
    """A copy of the last rows of a host batch, which keeps nothing else of it alive."""
    return jax.tree.map(lambda leaf: leaf[-count:].copy(), batch, is_leaf=scipy.sparse.issparse)

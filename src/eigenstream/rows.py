"""Rows of data and the two primitives that every data problem is written in.

``project(x, V) -> (b, k)`` gives the scores of ``b`` rows on ``k`` players; ``lift(x, scores)`` sends scores back to
the players' space, averaged over the rows, so that ``lift(x, project(x, V))`` is the second moment ``E[x xᵀ]`` applied
to ``V``. A view ``x`` is a pytree whose leaves are one of

- a dense array ``(b, ...)``,
- `Sparse`: sparse rows less a low-rank part, which is how sparse rows are centred without becoming dense,
- `Covariance`: a second moment that was already summed, in the place of the rows it came from. Problems evaluated on it
  give their exact matrices, so that no formula is written once for streams and once more for sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream import trees

Tree = Any


class Sparse(NamedTuple):
    """The rows ``matrix - weights @ means``: sparse minus low rank."""

    matrix: jsparse.BCOO
    weights: Any = None
    means: Any = None


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
    return isinstance(x, Sparse | Covariance | jsparse.BCOO)


def leaves(x: Tree) -> list[Any]:
    return jax.tree.leaves(x, is_leaf=_is_leaf)


def map_leaves(f: Any, x: Tree, *more: Tree) -> Tree:
    return jax.tree.map(f, x, *more, is_leaf=_is_leaf)


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)


def _sum(parts: list[Any]) -> Any:
    return sum(parts[1:], start=parts[0])


def n_rows(x: Tree) -> int:
    first = leaves(x)[0]
    return (first.matrix if isinstance(first, Sparse) else first).shape[0]


def template(x: Tree) -> Tree:
    """Shape and dtype of one player for the rows ``x``."""

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = leaf.matrix if isinstance(leaf, Sparse) else leaf
        return jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype))

    return map_leaves(describe, x)


def project(x: Tree, V: Tree) -> Any:
    """Scores ``⟨x_r, v_i⟩``, shape (b, k), summed over the leaves of a view."""

    def one(leaf: Any, v: Any) -> Any:
        v = _matrix(v)
        if isinstance(leaf, Covariance):
            return leaf.columns @ v.T
        if isinstance(leaf, Sparse):
            scores = leaf.matrix @ v.T
            return scores if leaf.means is None else scores - leaf.weights @ (leaf.means @ v.T)
        return _matrix(leaf) @ v.T

    return _sum(leaves(map_leaves(one, x, V)))


def lift(x: Tree, scores: Any) -> Tree:
    """``E_r[scores[r, i] x_r]`` for every player ``i``, shaped like the players."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Covariance):
            stop = leaf.start + int(np.prod(leaf.shape))
            return scores[leaf.start : stop].T.reshape((-1, *leaf.shape))
        mean_scores = scores / scores.shape[0]
        if isinstance(leaf, Sparse):
            out = (leaf.matrix.T @ mean_scores).T
            return out if leaf.means is None else out - (leaf.weights.T @ mean_scores).T @ leaf.means
        return (mean_scores.T @ _matrix(leaf)).reshape((-1, *leaf.shape[1:]))

    return map_leaves(one, x)


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
    first = leaves(x)[0]
    if isinstance(first, Covariance):
        return sum(np.trace(c.columns[c.start : c.start + int(np.prod(c.shape))]) for c in leaves(x))
    return squared_norms(x).mean()


def dimension(x: Tree) -> int:
    """The number of features of a view."""
    sizes = [c.shape if isinstance(c, Covariance) else template(c).shape for c in leaves(x)]
    return sum(int(np.prod(shape)) for shape in sizes)


def metric(x: Tree, v: Tree, scores: Any, ridge: float) -> Tree:
    """``B v`` of one view: its second moment, plus ``ridge`` times that moment's mean eigenvalue."""
    Bv = lift(x, scores)
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


def column_sums(x: Any, weights: jax.Array) -> Any:
    """``weightsᵀ x`` for a ``(b, g)`` array of weights, as a ``(g, ...)`` leaf."""
    if isinstance(x, Sparse):
        return (x.matrix.T @ weights).T
    return (weights.T @ _matrix(x)).reshape((-1, *x.shape[1:]))


def less(x: Tree, weights: jax.Array, means: Tree) -> Tree:
    """The rows ``x - weights @ means``; sparse rows stay sparse."""

    def one(leaf: Any, m: Any) -> Any:
        if isinstance(leaf, Sparse):
            return Sparse(leaf.matrix, weights, m)
        return leaf - (weights @ _matrix(m)).reshape(leaf.shape)

    return map_leaves(one, x, means)


def centre_by_batch(x: Tree) -> Tree:
    """Rows less their own mean, scaled so that their second moment is the unbiased covariance."""
    b = n_rows(x)
    ones = jnp.ones((b, 1))

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Sparse):
            return Sparse(leaf.matrix, ones.astype(leaf.matrix.dtype), column_sums(leaf, ones) / b)
        # Subtracting one of the rows first is exact or nearly so, and leaves a mean of the size of the deviations.
        shifted = leaf - leaf[:1]
        return shifted - shifted.mean(0)

    return scale_rows(map_leaves(one, x), jnp.full((b,), (b / (b - 1)) ** 0.5, template(leaves(x)[0]).dtype))


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


def to_device(batch: Tree) -> Tree:
    """Host rows as the step takes them: SciPy's sparse rows become `Sparse`, all else stays."""

    def one(leaf: Any) -> Any:
        if not scipy.sparse.issparse(leaf):
            return leaf
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


def covariance_view(C: np.ndarray, template: Tree) -> Tree:
    """A summed second moment of all features as a view shaped like ``template``."""
    items, structure = jax.tree.flatten(template)
    starts = np.cumsum([0] + [int(np.prod(s.shape)) for s in items]).tolist()
    return jax.tree.unflatten(
        structure,
        [Covariance(C[:, a:b], a, tuple(s.shape)) for a, b, s in zip(starts[:-1], starts[1:], items, strict=True)],
    )


def join(first: Tree, second: Tree) -> Tree:
    """Two host batches as one."""

    def one(a: Any, b: Any) -> Any:
        if scipy.sparse.issparse(a):
            return scipy.sparse.vstack([a, b], format="csr")
        return np.concatenate([a, b])

    return jax.tree.map(one, first, second, is_leaf=scipy.sparse.issparse)

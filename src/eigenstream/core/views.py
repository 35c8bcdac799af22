"""Rows of data and the two primitives that every data problem is written in.

``project(x, V) -> (k, b)`` gives the scores of ``k`` players on ``b`` rows; ``lift(x, scores)`` sends scores back to
the players' space, averaged over the rows, so that ``lift(x, project(x, V))`` is the second moment ``E[x xᵀ]`` applied
to ``V``. A view ``x`` is a pytree whose leaves are one of

- a dense array ``(b, ...)``,
- `Sparse`: sparse rows less a low-rank part, which is how means are taken off sparse rows that stay sparse,
- `Centred`: rows of either kind that are to be centred by their own batch,
- `Covariance`: a second moment that was already summed, in the place of the rows it came from. Problems evaluated on it
  give their exact matrices, so that no formula is written once for streams and once more for sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jsparse

from eigenstream.core import players
from eigenstream.core.precision import matmul
from eigenstream.core.types import Tree


class Sparse(NamedTuple):
    """The rows ``matrix - weights @ means``: sparse minus low rank."""

    matrix: jsparse.BCOO
    weights: Any = None
    means: Any = None


class Filled(NamedTuple):
    """Dense rows in parts of one size, each filled up with rows of zeros: as if it had the first ``counts`` only.

    Batches of many sizes, filled up to one, are one program. Zeros add nothing to a sum; what divides by the number of
    rows, or takes a mean off them, asks for `count` and `present`.
    """

    rows: Any
    counts: Any


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
    return isinstance(x, Sparse | Filled | Centred | Covariance | jsparse.BCOO)


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
    leaf = leaf.rows if isinstance(leaf, Filled) else leaf
    return leaf.matrix if isinstance(leaf, Sparse) else leaf


def n_rows(x: Tree) -> int:
    """The number of rows, those of zeros included that others are filled up with."""
    return _values(leaves(x)[0]).shape[0]


def count(x: Tree) -> Any:
    """The number of rows that count."""
    leaf = leaves(x)[0]
    leaf = leaf.rows if isinstance(leaf, Centred) else leaf
    # As a number of the rows' own kind: whole ones would be divided in another.
    return leaf.counts.sum().astype(template(leaf).dtype) if isinstance(leaf, Filled) else n_rows(x)


def present(x: Tree) -> jax.Array:
    """1 for every row that counts, 0 for the others."""
    leaf = leaves(x)[0]
    leaf, dtype = leaf.rows if isinstance(leaf, Centred) else leaf, template(leaf).dtype
    if not isinstance(leaf, Filled):
        return jnp.ones(n_rows(x), dtype)
    index = jnp.arange(n_rows(x) // len(leaf.counts))
    return (index < leaf.counts[:, None]).reshape(-1).astype(dtype)


def template(x: Tree) -> Tree:
    """Shape and dtype of one player for the rows ``x``."""

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = _values(leaf)
        # Players of rows in 16 bits have 32.
        dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(leaf.dtype), jnp.float32)
        return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)

    return map_leaves(describe, x)


def project(x: Tree, V: Tree) -> Any:
    """Scores ``⟨v_i, x_r⟩``, shape (k, b), summed over the leaves of a view."""
    return _sum(leaves(map_leaves(_project, x, V)))


def _project(leaf: Any, v: Any) -> Any:
    v = _matrix(v)
    if isinstance(leaf, Centred):
        scores, b = _project(leaf.rows, v), count(leaf)
        centred = scores - scores.sum(1, keepdims=True) / b
        centred = centred * present(leaf) if isinstance(leaf.rows, Filled) else centred
        return centred * (b / (b - 1))
    if isinstance(leaf, Filled):
        return _project(leaf.rows, v)
    if isinstance(leaf, Covariance):
        return v @ leaf.columns.T
    if isinstance(leaf, Sparse):
        scores = (leaf.matrix @ v.T).T
        return scores if leaf.means is None else scores - (v @ leaf.means.T) @ leaf.weights.T
    x = _matrix(leaf)
    if isinstance(v, np.ndarray):
        return matmul(v, x.T)
    # A GPU is quicker with a row of scores for every player, a CPU with one for every row of data, turned afterwards.
    return jax.lax.platform_dependent(
        v,
        x,
        cpu=lambda v, x: jax.lax.optimization_barrier(matmul(x, v.T)).T,
        default=lambda v, x: matmul(v, x.T),
    )


def lift(x: Tree, scores: Any) -> Tree:
    """``E_r[scores[i, r] x_r]`` for every player ``i``, shaped like the players."""
    return map_leaves(lambda leaf: _lift(leaf, scores), x)


def _lift(leaf: Any, scores: Any) -> Any:
    if isinstance(leaf, Centred):
        return _lift(leaf.rows, scores)
    if isinstance(leaf, Filled):
        b = scores.shape[1]
        return _lift(leaf.rows, scores * (b / count(leaf)))
    if isinstance(leaf, Covariance):
        stop = leaf.start + int(np.prod(leaf.shape))
        return scores[:, leaf.start : stop].reshape((-1, *leaf.shape))
    mean_scores = scores / scores.shape[1]
    if isinstance(leaf, Sparse):
        out = (leaf.matrix.T @ mean_scores.T).T
        return out if leaf.means is None else out - (mean_scores @ leaf.weights) @ leaf.means
    return matmul(mean_scores, _matrix(leaf)).reshape((-1, *leaf.shape[1:]))


def lift_both(x: Tree, first: Any, second: Any) -> tuple[Tree, Tree]:
    """Two lifts that read the rows once."""
    k = len(first)
    if isinstance(first, np.ndarray):
        return lift(x, first), lift(x, second)
    both = lift(x, jnp.concatenate([first, second]))
    return jax.tree.map(lambda leaf: leaf[:k], both), jax.tree.map(lambda leaf: leaf[k:], both)


def inner(x: Tree, scores: Any, lifted: Any) -> tuple[Any, Any] | None:
    """Two factors whose product is ``⟨v_i, lift(x, lifted)_j⟩``: scores of these rows, and others centred as they are.

    ``⟨v, Xᵀt⟩ = ⟨Xv, t⟩``, which takes a sum over rows where the other side takes one over features. None for sums in
    the place of rows.
    """
    leaf = leaves(x)[0]
    if isinstance(leaf, Covariance):
        return None
    b = count(x)
    # Scores about the batch's mean have been scaled, both of them, and their product is to be scaled once.
    return scores, lifted * ((b - 1) / b**2 if isinstance(leaf, Centred) else 1 / b)


def squared_norms(x: Tree) -> Any:
    """``|x_r|²`` of every row, summed over the leaves."""

    def one(leaf: Any) -> Any:
        leaf = leaf.rows if isinstance(leaf, Filled) else leaf
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
        b = count(leaf)
        if not isinstance(leaf, Centred):
            return squared_norms(leaf).sum() / b
        mean = column_sums(leaf.rows, jnp.ones((n_rows(leaf), 1), template(leaf).dtype)) / b
        return (squared_norms(leaf.rows).sum() / b - (mean**2).sum()) * (b / (b - 1))

    return _sum([one(leaf) for leaf in leaves(x)])


def dimension(x: Tree) -> int:
    """The number of features of a view."""
    sizes = [c.shape if isinstance(c, Covariance) else template(c).shape for c in leaves(x)]
    return sum(int(np.prod(shape)) for shape in sizes)


def ridged(x: Tree, v: Tree, Bv: Tree, ridge: float) -> Tree:
    """Add the ridge to one view's ``B v``, the product with its second moment."""
    return players.ridged(v, Bv, ridge, trace(x) / dimension(x)) if ridge else Bv


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
    x = x.rows if isinstance(x, Filled) else x
    # In full precision: a mean is subtracted later. As a product because XLA sums down columns slowly on a CPU.
    return jnp.matmul(weights.T, _matrix(x), precision="highest").reshape((-1, *x.shape[1:]))


def less(x: Tree, weights: jax.Array, means: Tree) -> Tree:
    """The rows ``x - weights @ means``; sparse rows stay sparse."""

    def one(leaf: Any, m: Any) -> Any:
        if isinstance(leaf, Sparse):
            return Sparse(leaf.matrix, weights, m)
        if isinstance(leaf, Filled):
            return leaf._replace(rows=one(leaf.rows, m))
        return leaf - jnp.matmul(weights, _matrix(m), precision="highest").reshape(leaf.shape)

    return map_leaves(one, x, means)


def centre_by_batch(x: Tree) -> Tree:
    """Rows whose second moment is the unbiased covariance about the batch's own mean."""
    return map_leaves(Centred, x)


def start_mean(x: Tree) -> Mean:
    return Mean(jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), template(x)), jnp.zeros((), jnp.int32))


def update_mean(running: Mean, x: Tree) -> Mean:
    b = count(x)
    total = running.rows + jnp.asarray(b, running.rows.dtype)

    def one(leaf: Any, m: Any) -> Any:
        ones = jnp.ones((n_rows(x), 1), m.dtype)
        return m + (column_sums(leaf, ones) - b * m) / total.astype(m.dtype)

    return Mean(map_leaves(one, x, running.mean), total)


def centre_by_mean(x: Tree, running: Mean) -> Tree:
    return less(x, present(x)[:, None], running.mean)


def split(batch: Tree, shares: tuple[int, ...]) -> list[Tree]:
    """Cut a batch into consecutive parts of sizes proportional to ``shares``, no row lost."""
    b = n_rows(batch)
    ends = np.cumsum((0, *shares)) * b // sum(shares)

    def cut(leaf: Any, lo: int, hi: int) -> Any:
        if isinstance(leaf, Filled):
            # Parts of parts: there are as many, or a multiple.
            each = len(leaf.counts) // len(shares)
            at = lo * len(shares) // b
            return Filled(leaf.rows[lo:hi], leaf.counts[at * each : (at + 1) * each])
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
    # What rows are filled up with is counted for each part.
    return jax.tree.map(lambda leaf: leaf.reshape((m, leaf.shape[0] // m, *leaf.shape[1:])), batch)


def covariance_view(C: np.ndarray, template: Tree) -> Tree:
    """A summed second moment of all features as a view shaped like ``template``."""
    items, structure = jax.tree.flatten(template)
    starts = np.cumsum([0] + [int(np.prod(s.shape)) for s in items]).tolist()
    return jax.tree.unflatten(
        structure,
        [Covariance(C[:, a:b], a, tuple(s.shape)) for a, b, s in zip(starts[:-1], starts[1:], items, strict=True)],
    )

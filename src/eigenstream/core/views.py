"""Rows of data and the two primitives of every data problem.

``project(x, V) -> (k, b)`` gives the scores of ``k`` players on ``b`` rows. ``lift(x, scores)`` maps scores back to the
players' space, averaged over the rows, so that ``lift(x, project(x, V))`` is ``E[x xᵀ] V``. A view ``x`` is a pytree.
Each leaf is one of

- a dense array ``(b, ...)``,
- `Sparse`: sparse rows minus a low-rank part, so that centred rows stay sparse,
- `Filled`: dense rows padded with zero rows,
- `Centred`: rows of any kind above, to be centred by the batch mean,
- `Covariance`: a second moment in place of rows. On it, the same formulas give the exact matrices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
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
    """Dense rows in parts of equal size; part ``i`` holds ``counts[i]`` rows, padded with zero rows.

    Batches of many sizes, padded to one, run in one program. Zero rows add nothing to a sum; a division by the number
    of rows uses `count`, and subtracting a mean uses `present`.
    """

    rows: Any
    counts: Any


class Centred(NamedTuple):
    """Rows whose scores are centred by the batch mean and scaled by ``b / (b - 1)``.

    Centring is idempotent, ``XᵀHᵀHX = XᵀHX``, so centring the scores is enough and the rows are not copied. A mean much
    larger than the deviations would lose digits: see `eigenstream.core.host_batches.pilot`.
    """

    rows: Any


@partial(jax.tree_util.register_dataclass, data_fields=["panel"], meta_fields=["start", "shape"])
@dataclass(frozen=True)
class Covariance:
    """The rows of a symmetric second moment that belong to one leaf, from ``start`` on, in place of its rows."""

    #: An array, maybe with rows of zeros at its end. Before `read`, a function ``rows(a, b)`` that gives rows a to b of
    #: the second moment of all features, and ``rows(a, b, columns=(c, d))`` the columns c to d of these.
    panel: Any
    start: int
    shape: tuple[int, ...]

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + math.prod(self.shape))


class Mean(NamedTuple):
    """A running mean of a view and the number of rows behind it."""

    mean: Tree
    rows: jax.Array


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Sparse | Filled | Centred | Covariance | jsparse.BCOO)


leaves = partial(jax.tree.leaves, is_leaf=_is_leaf)
map_leaves = partial(jax.tree.map, is_leaf=_is_leaf)


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)


def _uncentred(leaf: Any) -> Any:
    return leaf.rows if isinstance(leaf, Centred) else leaf


def _unpadded(leaf: Any) -> Any:
    return leaf.rows if isinstance(leaf, Filled) else leaf


def _values(leaf: Any) -> Any:
    """The dense or sparse array that holds a leaf's rows."""
    leaf = _unpadded(_uncentred(leaf))
    return leaf.matrix if isinstance(leaf, Sparse) else leaf


def n_rows(x: Tree) -> int:
    """The number of rows, padding included."""
    return _values(leaves(x)[0]).shape[0]


def count(x: Tree) -> Any:
    """The number of rows without padding."""
    leaf = _uncentred(leaves(x)[0])
    # Cast the count to the rows' dtype, or the division promotes the result.
    return leaf.counts.sum().astype(template(leaf).dtype) if isinstance(leaf, Filled) else n_rows(x)


def present(x: Tree) -> jax.Array:
    """1 for every row of data, 0 for padding."""
    leaf = _uncentred(leaves(x)[0])
    dtype = template(leaf).dtype
    if not isinstance(leaf, Filled):
        return jnp.ones(n_rows(x), dtype)
    index = jnp.arange(n_rows(x) // len(leaf.counts))
    return (index < leaf.counts[:, None]).reshape(-1).astype(dtype)


def template(x: Tree) -> Tree:
    """Shape and dtype of one player for the rows ``x``."""

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = _values(leaf)
        # Players of 16-bit rows are float32.
        dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(leaf.dtype), jnp.float32)
        return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)

    return map_leaves(describe, x)


def project(x: Tree, V: Tree) -> Any:
    """Scores ``⟨v_i, x_r⟩``, shape (k, b), summed over the leaves of a view."""
    return reduce(operator.add, leaves(map_leaves(_project, x, V)))


def _project(leaf: Any, v: Any) -> Any:
    v = _matrix(v)
    if isinstance(leaf, Centred):
        scores, b = _project(leaf.rows, v), count(leaf)
        centred = scores - scores.sum(1, keepdims=True) / b
        centred = centred * present(leaf) if isinstance(leaf.rows, Filled) else centred
        return centred * (b / (b - 1))
    if isinstance(leaf, Covariance):
        more = len(leaf.panel) - v.shape[1]
        # Padding vectors moves less than cutting the rows of a sharded matrix.
        return (jnp.pad(v, ((0, 0), (0, more))) if more else v) @ leaf.panel
    if isinstance(leaf, Sparse):
        scores = (leaf.matrix @ v.T).T
        return scores if leaf.means is None else scores - (v @ leaf.means.T) @ leaf.weights.T
    x = _matrix(_unpadded(leaf))
    if isinstance(v, np.ndarray):
        return matmul(v, x.T)
    # A GPU is faster with (k, b) scores, a CPU with (b, k) scores that are transposed afterwards.
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
        return _lift(leaf.rows, scores * (scores.shape[1] / count(leaf)))
    if isinstance(leaf, Covariance):
        return scores[:, leaf.span].reshape((-1, *leaf.shape))
    mean_scores = scores / scores.shape[1]
    if isinstance(leaf, Sparse):
        out = (leaf.matrix.T @ mean_scores.T).T
        return out if leaf.means is None else out - (mean_scores @ leaf.weights) @ leaf.means
    return matmul(mean_scores, _matrix(leaf)).reshape((-1, *leaf.shape[1:]))


def lift_both(x: Tree, first: Any, second: Any) -> tuple[Tree, Tree]:
    """Two lifts in one product, which reads the rows once."""
    if isinstance(first, np.ndarray):
        return lift(x, first), lift(x, second)
    k, both = len(first), lift(x, jnp.concatenate([first, second]))
    return players.take(both, 0, k), players.take(both, k, 2 * k)


def inner(x: Tree, scores: Any, lifted: Any) -> tuple[Any, Any] | None:
    """Factors ``s, t`` with ``(s tᵀ)_ij = ⟨v_i, lift(x, lifted)_j⟩``; None for a `Covariance`.

    By ``⟨v, Xᵀt⟩ = ⟨Xv, t⟩``, a sum over rows replaces a sum over features. Both scores must be centred alike.
    """
    leaf = leaves(x)[0]
    if isinstance(leaf, Covariance):
        return None
    b = count(x)
    # `Centred` multiplies scores by b / (b - 1). An unbiased covariance of two scores has that factor once, not twice.
    return scores, lifted * ((b - 1) / b**2 if isinstance(leaf, Centred) else 1 / b)


def squared_norms(x: Tree) -> Any:
    """``|x_r|²`` of every row, summed over the leaves."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Sparse):
            return (_matrix(_unpadded(leaf)) ** 2).sum(1)
        ones = jnp.ones(leaf.matrix.shape[1], leaf.matrix.dtype)
        squares = jsparse.BCOO((leaf.matrix.data**2, leaf.matrix.indices), shape=leaf.matrix.shape) @ ones
        if leaf.means is None:
            return squares
        cross = ((leaf.matrix @ leaf.means.T) * leaf.weights).sum(1)
        return squares - 2 * cross + ((leaf.weights @ (leaf.means @ leaf.means.T)) * leaf.weights).sum(1)

    return reduce(operator.add, map(one, leaves(x)))


def trace(x: Tree) -> Any:
    """The trace of the second moment, ``E|x|²``."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Covariance):
            return leaf.panel[:, leaf.span].trace()
        b = count(leaf)
        if not isinstance(leaf, Centred):
            return squared_norms(leaf).sum() / b
        mean = column_sums(leaf.rows, jnp.ones((n_rows(leaf), 1), template(leaf).dtype)) / b
        return (squared_norms(leaf.rows).sum() / b - (mean**2).sum()) * (b / (b - 1))

    return reduce(operator.add, map(one, leaves(x)))


def ridged(x: Tree, v: Tree, Bv: Tree, ridge: float) -> Tree:
    """Add the ridge to ``B v``, where ``B`` is the second moment of one view."""
    return players.ridged(v, Bv, ridge, trace(x) / players.size(players.take(v, 0, 1))) if ridge else Bv


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
    """Convert sparse rows to dense ones."""

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
    x = _unpadded(x)
    # Full precision, because a mean is subtracted later. A product, because XLA sums columns slowly on a CPU.
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


def start_mean(x: Tree) -> Mean:
    return Mean(players.blank(1, template(x)), jnp.zeros((), jnp.int32))


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
    """Cut a batch into consecutive parts of sizes proportional to ``shares``; no row is lost."""
    b = n_rows(batch)
    ends = (np.cumsum((0, *shares)) * b // sum(shares)).tolist()

    def cut(leaf: Any, lo: int, hi: int) -> Any:
        if isinstance(leaf, Filled):
            # The number of padded parts is a multiple of the number of shares.
            each = len(leaf.counts) // len(shares)
            at = lo * len(shares) // b
            return Filled(leaf.rows[lo:hi], leaf.counts[at * each : (at + 1) * each])
        if not isinstance(leaf, Sparse):
            return leaf[lo:hi]
        return Sparse(leaf.matrix[lo:hi], None if leaf.weights is None else leaf.weights[lo:hi], leaf.means)

    return [map_leaves(partial(cut, lo=lo, hi=hi), batch) for lo, hi in pairwise(ends)]


def stacked(batch: Tree, m: int) -> Tree | None:
    """The batch as ``m`` equal parts along a new first axis, without a copy; None if that is impossible."""
    if n_rows(batch) % m or any(isinstance(leaf, Sparse) for leaf in leaves(batch)):
        return None
    # This also splits the counts of `Filled` rows.
    return jax.tree.map(lambda leaf: leaf.reshape((m, leaf.shape[0] // m, *leaf.shape[1:])), batch)


def covariance_view(rows: Callable[..., Any], template: Tree) -> Tree:
    """The second moment of all features as a view shaped like ``template``, still to be `read`; ``rows``: see there."""
    items, structure = jax.tree.flatten(template)
    starts = np.cumsum([0] + [math.prod(s.shape) for s in items]).tolist()
    return jax.tree.unflatten(
        structure, [Covariance(rows, a, tuple(s.shape)) for a, s in zip(starts, items, strict=False)]
    )


def read(x: Tree) -> Tree:
    """Form the panels of all `Covariance` leaves."""

    def one(leaf: Any) -> Any:
        return replace(leaf, panel=leaf.panel(*_span(leaf))) if isinstance(leaf, Covariance) else leaf

    return map_leaves(one, x)


def to_be_put(x: Tree) -> Tree:
    """`Covariance` leaves to be read whose panels will be put on JAX's default device; other arrays are put at once."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Covariance):
            return jnp.asarray(leaf)
        return replace(leaf, panel=lambda *rows, **how: jnp.asarray(leaf.panel(*rows, **how)))

    return map_leaves(one, x)


def second_moment(x: Tree, ridge: float) -> Any:
    """The matrix of a view of `Covariance` leaves, with the ridge added to its diagonal."""
    C = cross_moment(x, x)
    if not ridge:
        return C
    return (_ridged if isinstance(C, np.ndarray) else _ridged_on_device)(C, ridge)


def _ridged(C: Any, ridge: float) -> Any:
    xp = np if isinstance(C, np.ndarray) else jnp
    return players.ridged(xp.eye(*C.shape), C, ridge, C.trace() / C.shape[1])


_ridged_on_device = jax.jit(_ridged, static_argnums=1)


def cross_moment(x: Tree, y: Tree) -> Any:
    """The second moments of the features of one view with those of another, both of `Covariance` leaves to be read."""
    return leaves(x)[0].panel(*_span(x), columns=_span(y))


def _span(x: Tree) -> tuple[int, int]:
    """The first and last features of the leaves of a view, which follow one another."""
    return leaves(x)[0].span.start, leaves(x)[-1].span.stop

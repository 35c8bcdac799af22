"""The preconditioner ``P ≈ B`` of the game, one for each diagonal block of ``B``.

`Diagonal` is ``B`` itself, `Whole` the second moments of all rows so far, and `Sample` those of some rows, where all
take too much memory. The last two work on standardised columns, so units do not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem

#: A sample of rows is renewed, a block at a time, whenever the rows have grown by this factor.
GROWTH = 1.35
#: Directions outside a sample of r rows count as at most r / OUTSIDE while the products are noisy.
OUTSIDE = 8
#: To each column's variance ``(d q / FEW T)²`` of itself is added, with the kurtosis ``q`` of the column: T rows say
#: little about small eigenvalues, and less about a column that few of them touch.
FEW = 12
#: Random vectors that measure the leverages of rows.
PROBES = 16
#: The least variance of a standardised direction: float32 resolves no less.
LEAST = 1e-5


class Diagonal(NamedTuple):
    """``P`` is ``B`` itself, a diagonal matrix: graphs, the identity."""

    #: Shaped like one player.
    values: Tree
    rows: jax.Array
    #: 1 if the diagonal is estimated from rows, 0 if it is given.
    estimated: jax.Array

    def exact(self, V: Tree) -> Tree:
        """``B V`` by the current estimate of ``B``."""
        return jax.tree.map(lambda v, p: v * p, V, self.values)

    def solver(self) -> Any:
        # The mean of half a row is added to every coordinate: no row may have touched some of them yet.
        d = players.size(self.values)
        mean = sum(p.sum() for p in jax.tree.leaves(self.values)) / d
        unseen = self.estimated * mean * d / (2 * jnp.maximum(self.rows, 1))
        return lambda G: jax.tree.map(lambda g, p: g / (p + unseen), G, self.values)

    def observe(self, values: Tree, count: Any, horizon: float) -> Diagonal:
        """Update the running mean of the diagonal, over at most ``horizon`` rows, by ``count`` new rows."""
        total = jnp.minimum(self.rows, horizon) + count
        return self._replace(values=_towards(self.values, values, count / total), rows=total)


class Whole(NamedTuple):
    """``P``: the second moments of one block of ``B``."""

    moments: jax.Array
    #: Mean fourth powers of the columns.
    fourth: jax.Array
    rows: jax.Array
    #: The problem's ridge, relative to the mean eigenvalue of ``B``.
    ridge: jax.Array
    #: Vectors with covariance ``P⁻¹``: the mean of ``⟨x, z⟩²`` is the leverage of ``x``.
    probes: Tree
    #: Sums of the leverages of rows and of their squares, since the probes were drawn.
    leverages: jax.Array

    @classmethod
    def empty(cls, template: Tree, ridge: float) -> Whole:
        d, dtype = players.size(template), jax.tree.leaves(template)[0].dtype
        zero, probes = jnp.zeros((), dtype), players.blank(PROBES, template)
        return cls(jnp.zeros((d, d), dtype), jnp.zeros(d, dtype), zero, zero + ridge, probes, jnp.zeros(2, dtype))

    def observe(self, x: Tree, horizon: float) -> Whole:
        n = views.n_rows(x)
        total = jnp.minimum(self.rows, horizon) + n
        h = (views.project(x, self.probes) ** 2).mean(0)
        # The leverages with the rows themselves in P (Sherman and Morrison).
        h = h / (1 + h / total)
        X = players.flat(views.dense(x)).astype(self.moments.dtype)
        with jax.default_matmul_precision("highest"):
            moments = _towards(self.moments, X.T @ X / n, n / total)
        fourth = _towards(self.fourth, (X**4).mean(0), n / total)
        leverages = self.leverages + jnp.stack([h.sum(), (h**2).sum()])
        return self._replace(moments=moments, fourth=fourth, rows=total, leverages=leverages)

    def deviations(self) -> Tree:
        """Those of the columns, shaped like one row."""
        row = jax.tree.map(lambda v: v[0], self.probes)
        return jax.tree.map(lambda v: v[0], players.from_matrix(_deviations(jnp.diag(self.moments))[:, None], row))

    def factor(self, exactly: bool) -> tuple[Any, jax.Array, Whole]:
        """``P⁻¹`` as a function, ``κ``, and the block with new probes."""
        d, variances = len(self.moments), jnp.diag(self.moments)
        more = self.ridge * variances.sum() / d
        if not exactly:
            kurtosis = self.fourth / jnp.where(variances > 0, variances, 1) ** 2
            more = more + (d * kurtosis / (FEW * self.rows)) ** 2 * variances
        scale = 1 / _deviations(variances + more)
        C = scale[:, None] * (self.moments + jnp.diag(jnp.broadcast_to(more, d))) * scale
        L = jnp.linalg.cholesky(C + LEAST * jnp.eye(d, dtype=C.dtype))

        def solve(G: Tree) -> Tree:
            flat = jax.scipy.linalg.cho_solve((L, True), (players.flat(G) * scale).T).T * scale
            return players.from_matrix(flat.T, jax.tree.map(lambda g: g[0], G))

        first, second = self.leverages
        # The squares of estimates from PROBES normal numbers are too large by 1 + 2 / PROBES.
        kappa = second / jnp.where(first > 0, first, 1) / (1 + 2 / PROBES)
        kappa = jnp.where(first > 0, kappa, jnp.minimum(self.rows, d))
        normal = jax.random.normal(jax.random.key(self.rows.astype(jnp.int32)), (d, PROBES), C.dtype)
        z = jax.scipy.linalg.solve_triangular(L.T, normal, lower=False) * scale[:, None]
        probes = players.from_matrix(z, jax.tree.map(lambda v: v[0], self.probes))
        return solve, kappa, self._replace(probes=probes, leverages=0 * self.leverages)


class Sample(NamedTuple):
    """``P = D (Zᵀ Z / r + δ I) D``, with ``r`` standardised rows ``Z`` of the stream."""

    #: Standardised rows, zeros until it is full, and their inner products.
    Z: Tree
    inner: jax.Array
    #: Rows in the sample, where the next ones go, and the rows of the stream when it was renewed.
    held: jax.Array
    place: jax.Array
    renewed: jax.Array
    #: Means of the columns' squares and fourth powers, shaped like one row, and the rows behind them.
    squares: Tree
    fourth: Tree
    rows: jax.Array
    ridge: jax.Array

    @classmethod
    def empty(cls, template: Tree, r: int, ridge: float) -> Sample:
        dtype = jax.tree.leaves(template)[0].dtype
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        squares, fourth = (jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), template) for _ in range(2))
        inner, Z = jnp.zeros((r, r), dtype), players.blank(r, template)
        return cls(Z, inner, count, count, zero, squares, fourth, zero, zero + ridge)

    def _scale(self) -> tuple[Tree, jax.Array]:
        """``D⁻¹``, and the share of the ridge in a column of unit variance."""
        d = players.size(self.squares)
        added = self.ridge * sum(q.sum() for q in jax.tree.leaves(self.squares)) / d
        # A column with longer tails than a Gaussian's counts as larger, or one row could decide a move.
        calm = jax.tree.map(lambda s, f: jnp.maximum(s, f / jnp.where(s > 0, 3 * s, 1)), self.squares, self.fourth)
        scale = jax.tree.map(lambda s: 1 / _deviations(s + added), calm)
        return scale, sum((added * s**2).sum() for s in jax.tree.leaves(scale)) / d

    def observe(self, x: Tree, horizon: float) -> Sample:
        r, n = len(self.inner), views.n_rows(x)
        x = views.dense(x)
        total = jnp.minimum(self.rows, horizon) + n
        squares, fourth = (
            jax.tree.map(lambda old, leaf, p=p: _towards(old, (leaf**p).mean(0), n / total), old, x)
            for p, old in ((2, self.squares), (4, self.fourth))
        )
        renewed = jnp.minimum(self.renewed, horizon / GROWTH)
        new = self._replace(squares=squares, fourth=fourth, rows=total, renewed=renewed)
        due = (self.held < r) | (total >= GROWTH * renewed)
        some = jax.tree.map(lambda leaf: leaf[:r], x)
        return jax.lax.cond(due, Sample._renewed, lambda s, x: s, new, some)

    def deviations(self) -> Tree:
        """Those of the columns, shaped like one row."""
        return jax.tree.map(_deviations, self.squares)

    def _renewed(self, x: Tree) -> Sample:
        """Put rows in the place of the oldest."""
        r, n = len(self.inner), views.n_rows(x)
        new = jax.tree.map(jnp.multiply, x, self._scale()[0])
        place = jnp.minimum(self.place, r - n)
        put = jax.lax.dynamic_update_slice_in_dim
        Z = jax.tree.map(lambda z, q: put(z, q.astype(z.dtype), place, 0), self.Z, new)
        with jax.default_matmul_precision("highest"):
            along = players.gram(Z, new)
        inner = put(put(self.inner, along, place, 1), along.T, place, 0)
        held, after = jnp.maximum(self.held, place + n), jnp.where(place + n < r, place + n, 0)
        return self._replace(Z=Z, inner=inner, held=held, place=after, renewed=self.rows)

    def factor(self, exactly: bool) -> tuple[Any, jax.Array, Sample]:
        """``P⁻¹`` as a function, ``κ``, and the block itself."""
        d, r = players.size(self.squares), len(self.inner)
        scale, ridge = self._scale()
        held = self.held.astype(self.rows.dtype)
        there = jnp.arange(r) < held
        least = LEAST * jnp.trace(self.inner) / held

        def inverse(more: jax.Array) -> jax.Array:
            K = self.inner + jnp.diag(jnp.where(there, more, 1))
            return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(K), True), jnp.eye(r, dtype=K.dtype))

        # The mean square of a row outside the span of the others.
        outside = jnp.where(there, 1 / jnp.diag(inverse(least)), 0).sum() / held
        counted = d - held if exactly else jnp.minimum(d - held, held / OUTSIDE)
        floor = jnp.maximum(outside / jnp.maximum(counted, 1) + ridge, least)
        F = inverse(held * floor)
        # The leverages of the rows, each without its own part in P (Sherman and Morrison).
        own = jnp.where(there, jnp.clip(1 - held * floor * jnp.diag(F), 0, 1), 0)
        h = held * own / jnp.maximum(1 - own, 1 / self.rows)
        kappa = (h**2).sum() / jnp.maximum(h.sum(), jnp.finfo(h.dtype).tiny)

        def solve(G: Tree) -> Tree:
            G = jax.tree.map(jnp.multiply, G, scale)
            along = players.gram(G, self.Z) @ F
            G = players.scale(1 / floor, players.subtract(G, players.combine(along, self.Z)))
            return jax.tree.map(jnp.multiply, G, scale)

        return solve, kappa, self


class BlockPreconditioner:
    """``P⁻¹`` of whole players, one block of ``B`` at a time; ``exactly``: the products have no sampling noise."""

    def __init__(self, problem: Problem, metric: Any, exactly: bool = False):
        self._problem = problem
        self._whole = metric.solver() if isinstance(metric, Diagonal) else None
        factors = () if self._whole else [block.factor(exactly) for block in metric]
        self._blocks = [solve for solve, _, _ in factors]
        #: The preconditioner for further rows.
        self.metric = metric if self._whole else tuple(block for _, _, block in factors)
        #: ``κ = E[h²] / E[h]``, summed over the blocks: a row changes ``B v`` by ``h`` in the norm of ``P⁻¹``.
        self.kappa = 0.0 if self._whole else sum(kappa for _, kappa, _ in factors)

    def solve(self, G: Tree) -> Tree:
        if self._whole is not None:
            return self._whole(G)
        blocks = zip(self._blocks, self._problem.blocks(G), strict=True)
        return self._problem.joined(tuple(solve(g) for solve, g in blocks))


def _towards(old: Tree, new: Tree, weight: Any) -> Tree:
    return jax.tree.map(lambda p, q: p + weight * (q - p), old, new)


def _deviations(squares: jax.Array) -> jax.Array:
    """Standard deviations; 1 for columns that were 0 in all rows."""
    return jnp.sqrt(jnp.where(squares > 0, squares, 1))

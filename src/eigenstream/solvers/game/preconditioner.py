"""The preconditioner ``P ≈ B`` of the game, one for each diagonal block of ``B``.

`Diagonal` is ``B`` itself, `Whole` the second moments of all rows so far, and `Sketch` their leading directions where
the second moments take too much memory. The last two work on columns of unit variance, so units do not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem

#: A sketch is updated whenever the rows have grown by this factor.
GROWTH = 1.35
#: Rows queued for an update are rank / NEW, at least QUEUE; each may add a direction.
NEW, QUEUE = 4, 256
#: Directions outside a sketch of rank r count as at most r / OUTSIDE while the products are noisy.
OUTSIDE = 2
#: ``Whole`` adds ``SHRINK (d / rows)²`` to the diagonal of correlations: few rows say little about small eigenvalues.
SHRINK = 0.25
#: A column of larger kurtosis, which few rows touch, counts as larger, or one such row could decide a move.
CALM = 10.0
#: Rows of a block from which the variances of the columns are measured, at most.
MEASURED = 512
#: A row of a sample keeps at least this share of what it is not part of.
CLEAR = 0.05
#: The least variance of a standardised direction: float32 resolves no less.
LEAST = 1e-6


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

    def solver(self, exactly: bool) -> Any:
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
    """``P``: the second moments of one block of ``B``, shrunk towards their diagonal while rows are few."""

    moments: jax.Array
    kurtosis: jax.Array
    rows: jax.Array
    #: The problem's ridge, relative to the mean eigenvalue of ``B``.
    ridge: jax.Array
    #: The last rows.
    queue: Tree
    waiting: jax.Array

    @classmethod
    def empty(cls, template: Tree, ridge: float) -> Whole:
        d, dtype = players.size(template), jax.tree.leaves(template)[0].dtype
        zero, queue = jnp.zeros((), dtype), players.blank(QUEUE, template)
        return cls(jnp.zeros((d, d), dtype), jnp.zeros(d, dtype), zero, jnp.asarray(ridge, dtype), queue, zero)

    def observe(self, x: Tree, horizon: float) -> Whole:
        x = views.dense(x)
        X = players.flat(x).astype(self.moments.dtype)
        total = jnp.minimum(self.rows, horizon) + len(X)
        with jax.default_matmul_precision("highest"):
            new = X.T @ X / len(X)
        moments = _towards(self.moments, new, len(X) / total)
        kurtosis = _towards(self.kurtosis, _kurtosis(X, jnp.diag(moments)), len(X) / total)
        queue, waiting = _queued(self.queue, self.waiting, x)
        return self._replace(moments=moments, kurtosis=kurtosis, rows=total, queue=queue, waiting=waiting)

    def leverages(self, solve: Any) -> jax.Array:
        """``⟨x, P⁻¹ x⟩`` of the queued rows, without their own part in ``P`` (Sherman and Morrison)."""
        own = players.dot(self.queue, solve(self.queue))
        return own / jnp.maximum(1 - own / jnp.maximum(self.rows, 1), CLEAR)

    def solver(self, exactly: bool) -> Any:
        d, variances = len(self.moments), jnp.diag(self.moments)
        more = self.ridge * variances.sum() / d + jnp.zeros(d, variances.dtype)
        if not exactly:
            share = _calm(self.kurtosis) - 1 + SHRINK * (d / jnp.maximum(self.rows, 1)) ** 2
            more = more + share * variances
        scale = 1 / _deviations(variances + more)
        C = scale[:, None] * (self.moments + jnp.diag(more)) * scale
        L = jnp.linalg.cholesky(C + LEAST * jnp.eye(d, dtype=scale.dtype))

        def solve(G: Tree) -> Tree:
            flat = jax.scipy.linalg.cho_solve((L, True), (players.flat(G) * scale).T).T * scale
            return players.from_matrix(flat.T, jax.tree.map(lambda g: g[0], G))

        return solve


class Sketch(NamedTuple):
    """``P = D (Uᵀ diag(s - δ) U + δ I) D``: the leading directions of standardised rows, by an incremental SVD."""

    #: Orthonormal rows ``(r, ...)``, zeros if the rows span fewer directions, and the variances along them.
    U: Tree
    s: jax.Array
    #: Mean squared norm outside ``U`` of standardised rows before ``U`` learned from them.
    outside: jax.Array
    #: Mean squares of the columns, shaped like one row, and the rows behind them.
    squares: Tree
    kurtosis: Tree
    rows: jax.Array
    #: The rows at the last update.
    sketched: jax.Array
    ridge: jax.Array
    #: Rows queued for the next update; the newest replace the last ones if the queue is full.
    queue: Tree
    waiting: jax.Array

    @classmethod
    def empty(cls, template: Tree, r: int, ridge: float) -> Sketch:
        dtype = jax.tree.leaves(template)[0].dtype
        zero = jnp.zeros((), dtype)
        squares = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), template)
        U, queue = players.blank(r, template), players.blank(queued(r), template)
        kurtosis = jax.tree.map(jnp.copy, squares)
        return cls(U, jnp.zeros(r, dtype), zero, squares, kurtosis, zero, zero, jnp.asarray(ridge, dtype), queue, zero)

    def _scale(self) -> tuple[Tree, jax.Array]:
        """``D⁻¹``, and the share of the ridge in a column of unit variance."""
        d = players.size(self.squares)
        added = self.ridge * sum(q.sum() for q in jax.tree.leaves(self.squares)) / d
        scale = jax.tree.map(lambda q, k: 1 / _deviations(q * _calm(k) + added), self.squares, self.kurtosis)
        return scale, sum((added * s**2).sum() for s in jax.tree.leaves(scale)) / d

    def solver(self, exactly: bool) -> Any:
        d, r = players.size(self.squares), len(self.s)
        counted = d - r if exactly else min(d - r, max(r // OUTSIDE, 1))
        scale, ridge = self._scale()
        # Before the first update P is the diagonal.
        floor = jnp.where(self.sketched > 0, jnp.maximum(self.outside / counted, LEAST), 1)
        inside, floor = jnp.maximum(self.s, floor) + ridge, floor + ridge

        def solve(G: Tree) -> Tree:
            G = jax.tree.map(jnp.multiply, G, scale)
            along = players.gram(G, self.U) * (1 / inside - 1 / floor)
            G = players.add(players.scale(1 / floor, G), players.combine(along, self.U))
            return jax.tree.map(jnp.multiply, G, scale)

        return solve

    def observe(self, x: Tree, horizon: float) -> Sketch:
        """Update the variances of the columns and queue the rows, as many as there is room for."""
        n = views.n_rows(x)
        x = views.dense(views.split(x, (min(n, MEASURED), n - min(n, MEASURED)))[0])
        total = jnp.minimum(self.rows, horizon) + n
        weight = n / total
        squares = _towards(self.squares, jax.tree.map(lambda leaf: (leaf**2).mean(0), x), weight)
        kurtosis = _towards(self.kurtosis, jax.tree.map(_kurtosis, x, squares), weight)
        queue, waiting = _queued(self.queue, self.waiting, x)
        return self._replace(squares=squares, kurtosis=kurtosis, rows=total, queue=queue, waiting=waiting)

    def leverages(self, solve: Any) -> jax.Array:
        """``⟨x, P⁻¹ x⟩`` of the queued rows, which ``P`` has not learned."""
        return players.dot(self.queue, solve(self.queue))

    def is_due(self) -> jax.Array:
        return (self.waiting > 0) & (self.rows >= GROWTH * self.sketched)

    def update(self) -> Sketch:
        """Learn the queued rows: the incremental SVD of Brand (2002)."""
        with jax.default_matmul_precision("highest"):
            return self._updated()

    def _updated(self) -> Sketch:
        capacity, r = jax.tree.leaves(self.queue)[0].shape[0], len(self.s)
        n = jnp.maximum(self.waiting, 1)
        # Rows that the queue had no room for count as those that it holds.
        weight = 1 - self.sketched / jnp.maximum(self.rows, 1)
        X = players.scale((jnp.arange(capacity) < self.waiting).astype(self.s.dtype), self.queue)
        X = jax.tree.map(jnp.multiply, X, self._scale()[0])
        scores = players.gram(X, self.U)
        squares = players.dot(X, X)
        fresh = jnp.maximum(squares.sum() - (scores**2).sum(), 0) / n
        # Before the first update all rows are outside U.
        outside = jnp.where(self.sketched > 0, self.outside + jnp.maximum(weight, 0.5) * (fresh - self.outside), fresh)

        rest = players.subtract(X, players.combine(scores, self.U))
        new = max(capacity // 2, 1) if capacity > r else capacity
        e, Q = jnp.linalg.eigh(players.gram(rest, rest))
        e, Q = e[-new:], Q[:, -new:]
        # Directions within the span of U have rounding errors for eigenvalues: drop them.
        keep = e > jnp.maximum(1e-6 * e[-1], 1e-9 * squares.sum())
        root = jnp.sqrt(jnp.where(keep, e, 1))
        Z = players.combine(jnp.where(keep, Q / root, 0).T, rest)
        # Orthogonalise twice (Parlett: twice is enough).
        Z = players.subtract(Z, players.combine(players.gram(Z, self.U), self.U))
        coordinates = jnp.concatenate([scores, jnp.where(keep, Q * root, 0)], axis=1)
        inner = weight / n * coordinates.T @ coordinates
        inner = inner + jnp.diag(jnp.concatenate([(1 - weight) * self.s, jnp.zeros_like(e)]))
        sigma, R = jnp.linalg.eigh(inner)
        R = R[:, ::-1][:, :r]
        U = players.add(players.combine(R[:r].T, self.U), players.combine(R[r:].T, Z))
        return self._replace(
            U=players.orthonormal(U),
            s=jnp.maximum(sigma[::-1][:r], 0),
            outside=outside,
            sketched=self.rows,
            waiting=players.zeros_in_place(self.waiting, self.waiting),
        )


class BlockPreconditioner:
    """``P⁻¹`` of whole players, one block of ``B`` at a time; ``exactly``: the products have no sampling noise."""

    def __init__(self, problem: Problem, metric: Any, exactly: bool = False):
        self._problem = problem
        self._whole = metric.solver(exactly) if isinstance(metric, Diagonal) else None
        self._blocks = () if self._whole else [block.solver(exactly) for block in metric]

    def solve(self, G: Tree) -> Tree:
        if self._whole is not None:
            return self._whole(G)
        blocks = zip(self._blocks, self._problem.blocks(G), strict=True)
        return self._problem.joined(tuple(solve(g) for solve, g in blocks))

    def kappa(self, metric: Any) -> jax.Array:
        """``κ = E[h²] / E[h]``, summed over the blocks: a row changes ``B v`` by ``h`` in the norm of ``P⁻¹``."""

        def of(block: Any, solve: Any) -> jax.Array:
            h = block.leverages(solve)
            h = jnp.where(jnp.arange(len(h)) < block.waiting, h, 0)
            return (h**2).sum() / jnp.maximum(h.sum(), jnp.finfo(h.dtype).tiny)

        return jnp.stack([of(*each) for each in zip(metric, self._blocks, strict=True)]).sum()


def queued(rank: int) -> int:
    """Rows that a sketch of this rank queues for an update."""
    return max(rank // NEW, QUEUE)


def _queued(queue: Tree, waiting: jax.Array, x: Tree) -> tuple[Tree, jax.Array]:
    """Queue rows; the newest replace the last ones if the queue is full."""
    capacity = jax.tree.leaves(queue)[0].shape[0]
    n = min(views.n_rows(x), capacity)
    start = jnp.minimum(waiting, capacity - n).astype(jnp.int32)

    def put(kept: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(kept, new[:n].astype(kept.dtype), start, 0)

    return jax.tree.map(put, queue, x), jnp.minimum(waiting + n, capacity)


def _towards(old: Tree, new: Tree, weight: Any) -> Tree:
    return jax.tree.map(lambda p, q: p + weight * (q - p), old, new)


def _kurtosis(x: jax.Array, squares: jax.Array) -> jax.Array:
    return ((x**2 / jnp.where(squares > 0, squares, 1)) ** 2).mean(0)


def _calm(kurtosis: jax.Array) -> jax.Array:
    return jnp.maximum(kurtosis / CALM, 1)


def _deviations(squares: jax.Array) -> jax.Array:
    """Standard deviations; 1 for columns that were 0 in all rows."""
    return jnp.sqrt(jnp.where(squares > 0, squares, 1))

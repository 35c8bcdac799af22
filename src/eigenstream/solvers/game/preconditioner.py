"""The preconditioner ``P ≈ B`` of the game: the diagonal of ``B`` if ``B`` is diagonal, or a low-rank sketch.

Both give ``P V`` and ``P⁻¹ G``. A sketch also measures ``κ``, the noise of one row. A row ``x`` changes ``B v`` by
``h = ⟨x, P⁻¹ x⟩`` in the norm of ``P⁻¹``, and ``κ = E[h²] / E[h]``: the effective dimension if all rows have the same
leverage, more if a few have most of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem

#: The floor δ is the smallest that keeps ``E[h²] / E[h]²`` within this factor of its minimum.
CALM = 1.5
#: The floor falls at most to this share of itself in one update; it may rise by any factor.
FALL = 0.35
#: Weight of the newest block of rows in running means, after the first few.
FRESH = 0.5
#: The least floor relative to the mean eigenvalue: float32 resolves no less.
LEAST = 1e-6
#: Rows queued for an update: BUFFER, or half the rank; of a sketch of full rank, WELL times the dimension.
BUFFER, WELL = 256, 2
#: An update adds at most rank / NEW new directions: the leading ones of its rows.
NEW = 4
#: The variance outside the sketch is spread over at most rank / OUTSIDE dimensions.
OUTSIDE = 2
#: The number of floors tried, from the least stable one to the mean eigenvalue.
TRIED = 25


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

    def apply(self, V: Tree) -> Tree:
        return jax.tree.map(lambda v, p: v * (p + self._unseen()), V, self.values)

    def solve(self, G: Tree) -> Tree:
        return jax.tree.map(lambda g, p: g / (p + self._unseen()), G, self.values)

    def _unseen(self) -> jax.Array:
        """The mean of half a row, added to every coordinate: no row may have touched some of them yet."""
        d = players.size(self.values)
        mean = sum(p.sum() for p in jax.tree.leaves(self.values)) / d
        return self.estimated * mean * d / (2 * jnp.maximum(self.rows, 1))

    def observe(self, values: Tree, count: Any, horizon: float) -> Diagonal:
        """Update the running mean of the diagonal, over at most ``horizon`` rows, by ``count`` new rows."""
        total = jnp.minimum(self.rows, horizon) + count
        values = jax.tree.map(lambda p, q: p + count / total * (q - p), self.values, values)
        return self._replace(values=values, rows=total)


class Sketch(NamedTuple):
    """``P = Uᵀ diag(s - δ) U + δ I`` of one diagonal block of ``B``, from an incremental SVD of its rows.

    The variances ``s`` along ``U`` are measured on rows before the SVD includes them, so fitting does not bias them.
    ``δ`` is the least value that is stable and keeps the leverages of such rows of about one size.
    """

    #: Orthonormal rows ``(r, ...)``; zeros if the rows span fewer directions.
    U: Tree
    #: Variances along ``U`` of the rows in the SVD.
    seen: jax.Array
    #: Variances along ``U`` of rows before the SVD included them.
    held: jax.Array
    #: Mean squared norm of such rows outside ``U``, and in all.
    outside: jax.Array
    energy: jax.Array
    floor: jax.Array
    kappa: jax.Array
    #: Mean squares of the coordinates, shaped like one row.
    squares: Tree
    rows: jax.Array
    updates: jax.Array
    #: The problem's ridge, relative to the mean eigenvalue of ``B``.
    ridge: jax.Array
    #: Rows queued for the next update; the newest replace the last ones if the buffer is full. A sketch of full rank
    #: also sums second moments.
    buffer: Tree
    moments: Any
    waiting: jax.Array

    @classmethod
    def empty(cls, template: Tree, r: int, ridge: float) -> Sketch:
        dtype, d = jax.tree.leaves(template)[0].dtype, players.size(template)
        zero = jnp.zeros((), dtype)
        spectrum = jnp.zeros(r, dtype)
        # Before the first rows P is the identity.
        one = jnp.ones((), dtype)
        # A sketch of full rank starts from unit vectors.
        U = players.blank(r, template) if r < d else players.units(template)
        buffer = players.blank(max(r // 2, BUFFER) if r < d else BUFFER, template)
        moments = None if r < d else jnp.zeros((d, d), dtype)
        squares = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), template)
        return cls(U, spectrum, spectrum, zero, one, one, one, squares, zero, zero, ridge * one, buffer, moments, zero)

    @property
    def added(self) -> jax.Array:
        """The ridge in the units of the data."""
        return self.ridge * self.energy / players.size(players.take(self.U, 0, 1))

    @property
    def variances(self) -> jax.Array:
        return jnp.maximum(_smoothed(self.held), self.floor)

    def rounding(self, V: Tree) -> jax.Array:
        """The rounding error of ``⟨v, B v⟩``."""
        d, eps = players.size(players.take(self.U, 0, 1)), jnp.finfo(self.seen.dtype).eps
        return d**0.5 * eps * players.dot(V, jax.tree.map(lambda v, s: v * s, V, self.squares))

    def apply(self, V: Tree) -> Tree:
        along = players.gram(V, self.U) * (self.variances - self.floor)
        return players.add(players.scale(self.floor + self.added, V), players.combine(along, self.U))

    def solve(self, G: Tree) -> Tree:
        outside = self.floor + self.added
        along = players.gram(G, self.U) * (1 / (self.variances + self.added) - 1 / outside)
        return players.add(players.scale(1 / outside, G), players.combine(along, self.U))

    def keep(self, x: Tree) -> Sketch:
        """Queue the rows of a batch, as many as the buffer holds."""
        capacity = jax.tree.leaves(self.buffer)[0].shape[0]
        b = min(views.n_rows(x), capacity)
        start = jnp.minimum(self.waiting, capacity - b).astype(jnp.int32)

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), start, 0)

        first = views.dense(views.split(x, (b, views.n_rows(x) - b))[0])
        kept = self._replace(buffer=jax.tree.map(put, self.buffer, first))
        if self.moments is None:
            return kept._replace(waiting=jnp.minimum(self.waiting + b, capacity))
        return jax.lax.cond(self.waiting < WELL * len(self.seen), lambda s: s._with_moments(x), lambda s: s, kept)

    def _with_moments(self, x: Tree) -> Sketch:
        X = players.flat(views.dense(x)).astype(self.seen.dtype)
        with jax.default_matmul_precision("highest"):
            return self._replace(moments=self.moments + X.T @ X, waiting=self.waiting + len(X))

    def anew(self, restart: Any) -> Sketch:
        """Forget all rows so far if ``restart``, from the next update on."""
        past = self.rows, self.updates, self.waiting, self.moments
        rows, updates, waiting, moments = jax.tree.map(lambda x: jnp.where(restart, 0, x), past)
        return self._replace(rows=rows, updates=updates, waiting=waiting, moments=moments)

    def update(self, horizon: float) -> Sketch:
        """Measure the queued rows, then include them in the SVD of the last ``horizon`` rows."""
        with jax.default_matmul_precision("highest"):
            return self._updated(horizon)

    def _updated(self, horizon: float) -> Sketch:
        n, before = jnp.maximum(self.waiting, 1), jnp.minimum(self.rows, horizon)
        index = jnp.arange(jax.tree.leaves(self.buffer)[0].shape[0])
        X = players.scale((index < self.waiting).astype(self.seen.dtype), self.buffer)
        scores = players.gram(X, self.U)
        squares = scores**2
        rest = jnp.maximum(players.dot(X, X) - squares.sum(1), 0)
        weight = n / (before + n)
        if self.moments is None:
            measured = self._measured(squares, rest, squares.sum(0) / n)
            U, seen = _learned(X, scores, self.U, self.seen, n, weight)
        else:
            U = players.flat(self.U)
            along = U @ (self.moments / n) @ U.T
            measured = self._measured(squares, rest, jnp.diag(along))
            U, seen = _rotated(self.U, (1 - weight) * jnp.diag(self.seen) + weight * along)
            measured = measured._replace(moments=players.zeros_in_place(self.moments, self.waiting))
        new = jax.tree.map(lambda x: (x**2).sum(0) / jnp.clip(self.waiting, 1, len(x)), X)
        squares = jax.tree.map(lambda old, new: old + weight * (new - old), self.squares, new)
        waiting = players.zeros_in_place(self.waiting, self.waiting)
        return measured._replace(U=U, seen=seen, squares=squares, rows=before + n, waiting=waiting)

    def _measured(self, squares: jax.Array, rest: jax.Array, along: jax.Array) -> Sketch:
        """Update variances, floor and ``κ`` by new rows: squares along ``U``, squared norms outside, variances."""
        n = jnp.clip(self.waiting, 1, len(rest))
        d, r = players.size(players.take(self.U, 0, 1)), len(self.seen)
        # Fewer rows than usual weigh less.
        enough = jnp.minimum(1, n / jnp.clip(self.rows, 1, BUFFER))
        fresh = jnp.where(self.updates == 0, 1, enough * jnp.maximum(1 / (self.updates + 1), FRESH))
        # Before the first SVD all rows are outside U, so that measurement is replaced by the next.
        weight = jnp.where(self.updates <= 1, 1, enough * jnp.maximum(1 / jnp.maximum(self.updates, 1), FRESH))
        total = along.sum() + rest.sum() / n
        energy = self.energy + fresh * (total - self.energy)
        held = self.held + weight * (along - self.held)
        outside = self.outside + weight * (rest.sum() / n - self.outside)
        mean = energy / d

        smooth = _smoothed(held)
        tail = smooth[-max(r // 16, 1) :].mean() if d > r else jnp.zeros((), held.dtype)
        beyond = outside / max(min(d - r, r // OUTSIDE), 1) if d > r else 0.0
        stable = jnp.maximum(jnp.maximum(beyond, tail), LEAST * mean)
        floors = stable * jnp.maximum(mean / stable, 2) ** jnp.linspace(0, 1, TRIED, dtype=held.dtype)

        def leverages(floor: jax.Array) -> tuple[jax.Array, jax.Array]:
            added = self.ridge * mean
            h = squares @ (1 / (jnp.maximum(smooth, floor) + added)) + rest / (floor + added)
            return h.sum() / n, (h**2).sum() / n

        first, second = jax.vmap(leverages)(floors)
        spread = second / jnp.maximum(first**2, jnp.finfo(held.dtype).tiny)
        choice = jnp.argmax(spread <= CALM * spread.min())
        began = self.updates > 0
        floor = jnp.where(began, jnp.maximum(floors[choice], FALL * jnp.where(began, self.floor, mean)), mean)
        first, second = leverages(floor)
        kappa = second / jnp.maximum(first, jnp.finfo(held.dtype).tiny)
        kappa = jnp.where(began, jnp.where(self.updates == 1, kappa, self.kappa + weight * (kappa - self.kappa)), d)
        return self._replace(
            held=held,
            outside=outside,
            energy=energy,
            floor=floor,
            kappa=kappa,
            updates=self.updates + 1,
        )


class BlockPreconditioner(NamedTuple):
    """The preconditioner of whole players, one block of ``B`` at a time."""

    problem: Problem
    metric: Any

    def apply(self, V: Tree) -> Tree:
        return self._each(lambda m, v: m.apply(v), V)

    def solve(self, G: Tree) -> Tree:
        return self._each(lambda m, g: m.solve(g), G)

    def rounding(self, V: Tree) -> jax.Array:
        """The rounding error of each player's ``⟨v, B v⟩``; 0 if ``B`` is diagonal."""
        if isinstance(self.metric, Diagonal):
            return jnp.zeros_like(players.dot(V, V))
        blocks = zip(self.metric, self.problem.blocks(V), strict=True)
        return sum(sketch.rounding(v) for sketch, v in blocks)

    def _each(self, f: Any, V: Tree) -> Tree:
        if isinstance(self.metric, Diagonal):
            return f(self.metric, V)
        return self.problem.joined(tuple(map(f, self.metric, self.problem.blocks(V))))


def _smoothed(values: jax.Array) -> jax.Array:
    """Running means of nine neighbours, made monotone."""
    if len(values) <= 20:
        return values
    padded = jnp.concatenate([values[:4][::-1], values, values[-4:][::-1]])
    return jax.lax.cummin(jnp.convolve(padded, jnp.full(9, 1 / 9, values.dtype), mode="valid"))


def _learned(X: Tree, scores: jax.Array, U: Tree, seen: jax.Array, n: Any, weight: Any) -> tuple[Tree, jax.Array]:
    """Update the leading directions and variances by new rows: the incremental SVD of Brand (2002)."""
    r = len(seen)
    rest = players.subtract(X, players.combine(scores, U))
    e, Q = jnp.linalg.eigh(players.gram(rest, rest))
    new = max(r // NEW, 1)
    e, Q = e[-new:], Q[:, -new:]
    # Directions within the span of U have rounding errors for eigenvalues: drop them.
    keep = e > jnp.maximum(1e-6 * e[-1], 1e-9 * players.dot(X, X).sum())
    root = jnp.sqrt(jnp.where(keep, e, 1))
    Z = players.combine(jnp.where(keep, Q / root, 0).T, rest)
    # Orthogonalise twice (Parlett: twice is enough).
    Z = players.subtract(Z, players.combine(players.gram(Z, U), U))
    coordinates = jnp.concatenate([scores, jnp.where(keep, Q * root, 0)], axis=1)
    inner = weight / n * coordinates.T @ coordinates
    inner = inner + jnp.diag(jnp.concatenate([(1 - weight) * seen, jnp.zeros_like(e)]))
    sigma, R = jnp.linalg.eigh(inner)
    R = R[:, ::-1][:, :r]
    U = players.add(players.combine(R[:r].T, U), players.combine(R[r:].T, Z))
    return players.orthonormal(U), jnp.maximum(sigma[::-1][:r], 0)


def _rotated(U: Tree, second: jax.Array) -> tuple[Tree, jax.Array]:
    """Eigenvectors and eigenvalues of the second moments along ``U``."""
    sigma, R = jnp.linalg.eigh(second)
    return players.orthonormal(players.combine(R[:, ::-1].T, U)), jnp.maximum(sigma[::-1], 0)

"""Products of moving players with all rows so far: a Kalman filter whose covariance is a small matrix.

``M`` estimates ``A V`` with noise ``N``, in units of ``κ``, the noise of one row. The rows gathered give ``A_t V`` with
noise ``R``. The best correction is ``M + (N + R)⁻¹N (A_t V - M)``. For players that did not move this is the mean over
all rows. Products with the search directions are those of the rows gathered alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.solvers.game.preconditioner import CUTOFF, Factored
from eigenstream.solvers.game.state import GameState, Gathered

#: What a noisy number is divided by is at least this share of its expected size.
LEAST = 0.1


class Corrected(NamedTuple):
    """Products of the whole span after the correction, and their noise."""

    MA: Tree
    MB: Tree
    #: For each part of the players.
    N: jax.Array
    #: The noise of one row in each player's residual, in the products, and in the players' own products with ``B``.
    noise: jax.Array
    kappa: jax.Array
    own: jax.Array
    #: Rows behind the products.
    rows: jax.Array


def combine(problem: Problem, C: Any, M: Tree, swapped: bool = False) -> Tree:
    """Combine each part of the players by its own coefficients, the rows of ``C[p]``.

    ``swapped``: ``M`` are products with ``A``, which maps one part to the other.
    """
    order = reversed(C) if swapped else C
    return problem.whole(tuple(players.combine(c, part) for c, part in zip(order, problem.parts(M), strict=True)))


def correct(problem: Problem, state: GameState, P: Factored, half_life: float | None) -> Corrected:
    """Correct the tracked products by those of the rows gathered; products of all rows need no correction."""
    K, n = len(state.lam), state.gathered.rows
    S, (A, B) = state.S, (players.scale(1 / n, sums) for sums in state.gathered[1:])
    B = state.metric.times(S) if B is None else B
    if state.exact:
        none = jnp.zeros((len(state.N), players.count(S), players.count(S)), n.dtype)
        return Corrected(A, B, none, state.noise, state.kappa, state.own, n)
    S, A, B = (players.take(M, 0, 2 * K) for M in (S, A, B))
    forget = 1.0 if half_life is None else 2 ** jnp.minimum(n / half_life, 60)
    before, N = state.rows_known / forget, forget * state.N
    R = jnp.stack([_of_rows(*pair, K) / n for pair in zip(problem.parts(S), problem.parts(B), strict=True)])
    first = state.moves == 0
    noise, kappa, own = _noise(problem, state, P, A, B, traces(N + R[:, :K, :K]))
    # One gain for both views: with two, correlations could exceed 1.
    share = gain(N.sum(0), R[:, :K, :K].sum(0), first)
    MA = corrected(share, state.MA, A)
    MB = B if problem.diagonal_only else corrected(share, state.MB, B)
    N = jnp.stack([noise_after(share, jnp.where(first, 0, one), r) for one, r in zip(N, R, strict=True)])
    return Corrected(MA, MB, N, noise, kappa, own, jnp.where(first, 0, before) + n)


def traces(N: jax.Array) -> jax.Array:
    """The noise of each player, summed over its parts."""
    return jnp.einsum("pii->i", N)


def _of_rows(S: Tree, B: Tree, K: int) -> jax.Array:
    """``S B Sᵀ`` by the rows gathered, for one part of the span."""
    own, across = jnp.split(players.gram(players.take(S, 0, K), B), 2, axis=1)
    # Search directions are P-orthonormal. Few rows say little about ⟨w, B w⟩, and P about the most that it may be.
    most = jnp.diag((players.dot(*(players.take(M, K, 2 * K) for M in (S, B))) > 0).astype(own.dtype))
    return jnp.block([[(own + own.T) / 2, across], [across.T, most]])


def _noise(
    problem: Problem, state: GameState, P: Factored, A: Tree, B: Tree, expected: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The noise of one row in each player's residual, and in ``B w`` and ``B v``, by the errors of tracked products."""
    K, solve = len(state.lam), P.solves[0]
    known = state.moves > 0
    expected = jnp.where(expected > 0, expected, jnp.inf)
    surprise = players.subtract(players.take(A, 0, K), state.MA)
    if not problem.diagonal_only:
        more = players.subtract(players.take(B, 0, K), state.MB)
        surprise = players.subtract(surprise, players.scale(state.lam, more))
    # The last rows of a stream may be few.
    share = jnp.minimum(1, state.gathered.rows / state.rows_to_next_move)
    weight = jnp.where(known, jnp.where(state.moves == 1, 1, share), 0)
    noise = state.noise + weight * (players.dot(surprise, solve(surprise)) / expected - state.noise)
    if not problem.diagonal_only:
        kappa = state.kappa + jnp.where(known, share, 1) * (P.kappa - state.kappa)
        seen = (players.dot(more, solve(more)) / expected).mean()
        return noise, kappa, state.own + weight * (jnp.minimum(seen, kappa) - state.own)
    # B is known, so all noise is in A. Before the first measurement take κ = the number of rows.
    least = jnp.maximum(jnp.abs(state.lam), LEAST * state.size)
    relative = (noise / jnp.maximum(least, jnp.finfo(noise.dtype).tiny) ** 2).mean()
    return noise, jnp.where(known, relative, state.gathered.rows), state.own


def gain(N: jax.Array, R: jax.Array, first: Any) -> jax.Array:
    """``(N + R)⁻¹ N``, or the identity at a start."""
    total = N + R
    tiny = jnp.finfo(N.dtype).tiny
    jitter = jnp.diag(CUTOFF * jnp.diag(total) + jnp.where(jnp.diag(total) > 0, 0, 1) + tiny)
    one = jnp.eye(len(N), dtype=N.dtype)
    return jnp.where(first, one, jnp.linalg.solve(total + jitter, N))


def corrected(gain: jax.Array, known: Tree, new: Tree) -> Tree:
    """The tracked products plus ``gain`` times their errors on the new rows, then the new products of ``W``."""
    L = len(gain)
    surprise = players.subtract(players.take(new, 0, L), known)
    return players.stack(players.add(known, players.combine(gain.T, surprise)), players.take(new, L, 2 * L))


def noise_after(gain: jax.Array, N: jax.Array, R: jax.Array) -> jax.Array:
    """The noise of the corrected and the new products together."""
    L = len(gain)
    rest = jnp.eye(L, dtype=N.dtype) - gain
    corner = gain.T @ R[:L, L:]
    known = rest.T @ N @ rest + gain.T @ R[:L, :L] @ gain
    return jnp.block([[known, corner], [corner.T, R[L:, L:]]])


def scores(state: GameState, new: Gathered, start: int, stop: int) -> tuple[jax.Array, jax.Array]:
    """``⟨s, A s⟩`` and ``⟨s, B s⟩`` of vectors ``start`` to ``stop`` of ``S``, summed over the rows behind ``new``."""
    S, A = (players.take(M, start, stop) for M in (state.S, new.A))
    B = players.scale(new.rows, state.metric.times(S)) if new.B is None else players.take(new.B, start, stop)
    return players.dot(S, A), players.dot(S, B)

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
from eigenstream.solvers.game.preconditioner import CUTOFF, Factored, Sums
from eigenstream.solvers.game.state import GameState, Gathered

#: Noise is measured relative to an eigenvalue of at least this share of the largest.
OWN = 0.1


class Corrected(NamedTuple):
    """Products of the whole span after the correction, and their noise."""

    MA: Tree
    MB: Tree
    N: jax.Array
    #: The noise of one row in each player's residual, and in the products.
    noise: jax.Array
    kappa: jax.Array
    #: The noise of one row in the players' own products with ``B``.
    own: jax.Array
    #: Rows behind the products.
    rows: jax.Array


def correct(problem: Problem, state: GameState, P: Factored, half_life: float | None) -> Corrected:
    """Correct the tracked products by those of the rows gathered; of all rows these need no correction."""
    K, n = len(state.lam), state.gathered.rows
    if isinstance(state.metric, Sums):
        A, B = state.metric.products(problem, state.S)
        N = jnp.zeros_like(players.gram(state.S, B))
        return Corrected(A, B, N, 0 * state.noise, 0 * n, 0 * n, state.metric.rows)
    A, B = (players.scale(1 / n, sums) for sums in state.gathered[1:])
    B = state.metric.exact(state.S) if B is None else B
    if state.exact:
        return Corrected(A, B, jnp.zeros((3 * K, 3 * K), n.dtype), state.noise, state.kappa, state.own, n)
    forget = 1.0 if half_life is None else 2 ** jnp.minimum(n / half_life, 60)
    before, N = state.rows_known / forget, forget * state.N
    known, new = (players.take(state.S, *ends) for ends in ((0, K), (K, 2 * K)))
    own, across = jnp.split(players.gram(known, B), 2, axis=1)
    # Search directions are P-orthonormal. Few rows say little about ⟨w, B w⟩, and P about the most that it may be.
    most = jnp.diag((players.dot(new, players.take(B, K, 2 * K)) > 0).astype(n.dtype))
    R = jnp.block([[(own + own.T) / 2, across], [across.T, most]]) / n
    first = state.moves == 0
    noise, kappa, own = _noise(problem, state, P, A, B, jnp.diag(N + R[:K, :K]))
    share = gain(N, R[:K, :K], first)
    MA = corrected(share, state.MA, A)
    MB = B if problem.diagonal_only else corrected(share, state.MB, B)
    N = noise_after(share, jnp.where(first, 0, N), R)
    return Corrected(MA, MB, N, noise, kappa, own, jnp.where(first, 0, before) + n)


def _noise(
    problem: Problem, state: GameState, P: Factored, A: Tree, B: Tree, expected: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The noise of one row in each player's residual, and in ``B w`` and ``B v``, by the errors of tracked products."""
    K = len(state.lam)
    known = state.moves > 0
    expected = jnp.where(expected > 0, expected, jnp.inf)

    surprise = players.subtract(players.take(A, 0, K), players.take(state.MA, 0, K))
    if not problem.diagonal_only:
        more = players.subtract(players.take(B, 0, K), players.take(state.MB, 0, K))
        surprise = players.subtract(surprise, players.scale(state.lam, more))
    # The last rows of a stream may be few.
    share = jnp.minimum(1, state.gathered.rows / state.rows_to_next_move)
    weight = jnp.where(known, jnp.where(state.moves == 1, 1, share), 0)
    noise = state.noise + weight * (players.dot(surprise, P.solve(surprise)) / expected - state.noise)
    if not problem.diagonal_only:
        kappa = state.kappa + jnp.where(known, share, 1) * (P.kappa - state.kappa)
        seen = (players.dot(more, P.solve(more)) / expected).mean()
        return noise, kappa, state.own + weight * (jnp.minimum(seen, kappa) - state.own)
    # B is known, so all noise is in A. Before the first measurement take κ = the number of rows.
    least = jnp.maximum(jnp.abs(state.lam), OWN * state.size)
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
    return players.stack(players.add(known, players.combine(gain.T, surprise)), jax.tree.map(lambda x: x[L:], new))


def noise_after(gain: jax.Array, N: jax.Array, R: jax.Array) -> jax.Array:
    """The noise of the corrected and the new products together."""
    L = len(gain)
    rest = jnp.eye(L, dtype=N.dtype) - gain
    corner = gain.T @ R[:L, L:]
    known = rest.T @ N @ rest + gain.T @ R[:L, :L] @ gain
    return jnp.block([[known, corner], [corner.T, R[L:, L:]]])


def symmetric(S: Tree, M: Tree, L: int) -> jax.Array:
    """The Gram matrix of ``S`` and its products ``M``; between tracked and new vectors by the tracked product."""
    own = players.gram(players.take(S, 0, L), players.take(M, 0, L))
    new = jax.tree.map(lambda x: x[L:], S)
    across, rest = jnp.split(players.gram(new, M), [L], axis=1)
    G = jnp.block([[own, across.T], [across, rest]])
    return (G + G.T) / 2


def scores(state: GameState, new: Gathered) -> tuple[jax.Array, jax.Array]:
    """``⟨v, A v⟩`` and ``⟨v, B v⟩`` of the leading players, on the rows behind ``new``."""
    V = players.take(state.S, 0, state.k)
    BV = players.scale(new.rows, state.metric.exact(V)) if new.B is None else players.take(new.B, 0, state.k)
    return players.dot(V, players.take(new.A, 0, state.k)), players.dot(V, BV)

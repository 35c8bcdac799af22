"""Tracked products of moving players with all rows so far: a Kalman filter whose covariance is a small matrix.

``M`` estimates ``A S`` with noise ``N``, in units of ``κ``, the noise of one row. The rows gathered give ``A_t S`` with
noise ``R``. The best correction is ``M + (N + R)⁻¹N (A_t S - M)``. For players that did not move this is the mean over
all rows; for a new direction it is mostly the new rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.solvers.game.preconditioner import BlockPreconditioner
from eigenstream.solvers.game.state import GameState, Gathered

#: Eigenvalues of a Gram matrix below this share of the largest are rounding.
CUTOFF = 1e-5
#: Restart when the variance of the rows along the players changes by more than this factor.
CHANGED = 3.0
#: Noise is measured relative to an eigenvalue of at least this share of the largest; OWN_SIGNED if some are negative.
OWN, OWN_SIGNED = 0.1, 0.3
#: Weight of the newest measurement of the noise.
FRESH = 0.3
#: A row changes ``B v`` by ``κ ⟨v, B v⟩`` on average. The rows gathered only estimate that, so this share of the noise
#: is computed from ``κ ⟨v, P v⟩``.
GUARD = 0.3


class Corrected(NamedTuple):
    """Products of the whole span after the correction, and their noise."""

    MA: Tree
    MB: Tree
    PS: Tree
    N: jax.Array
    #: Noise of the rows gathered alone.
    R: jax.Array
    #: ``⟨s, B s⟩`` of each vector of the span: one row adds noise ``κ`` times that.
    energy: jax.Array
    noise: jax.Array
    kappa: jax.Array
    #: Rows behind the products.
    rows: jax.Array
    #: Whether the rows gathered start anew, after a change of distribution.
    restart: jax.Array


def correct(
    problem: Problem, state: GameState, P: BlockPreconditioner, half_life: float | None, whole: jax.Array
) -> Corrected:
    """Correct the tracked products by those of the rows gathered."""
    L, S = len(state.N), state.S
    n = state.gathered.rows
    A, B = (players.scale(1 / n, sums) for sums in state.gathered[1:])
    PS = P.apply(S)
    energy = players.gram(S, PS)
    if B is not None:
        energy = GUARD * energy + (1 - GUARD) * players.gram(S, B)
        energy = (energy + energy.T) / 2
    R = energy / n
    forget = 1.0 if half_life is None else 2 ** jnp.minimum(n / half_life, 60)
    before = state.rows_known / forget
    N, counted = forget * state.N, jnp.where(whole | state.plays_all, 0, R)
    restart = _changed(state, B) & ~whole
    anew = (state.moves == 0) | restart | whole
    noise, kappa = _noise(problem, state, P, A, B, N, R[:L, :L], anew)
    share = gain(N, counted[:L, :L], anew)
    if state.plays_all:
        # All directions have seen the same rows.
        share = jnp.where(anew, 1, n / (before + n)) * jnp.eye(L, dtype=N.dtype)
    MA = corrected(share, state.MA, A)
    MB = state.metric.exact(S) if problem.diagonal_only else corrected(share, state.MB, B)
    N = noise_after(share, jnp.where(anew, 0, N), counted)
    total = jnp.where(anew, 0, before) + n
    return Corrected(MA, MB, PS, N, R, jnp.diag(energy), noise, kappa, total, restart)


def _changed(state: GameState, B: Tree) -> jax.Array:
    """Whether the variance of the rows along the players changed by more than CHANGED.

    With K = d the products are a plain mean over all rows, as in an exact solution, so there is no restart.
    """
    if B is None or state.plays_all:
        return jnp.array(False)
    K = len(state.lam)
    V = players.take(state.S, 0, K)
    now, before = (players.dot(V, players.take(M, 0, K)).sum() for M in (B, state.MB))
    # The variance over fewer than 2K rows is too uncertain to tell.
    return (state.moves > 0) & (state.gathered.rows >= 2 * K) & ~((now > before / CHANGED) & (now < before * CHANGED))


def _noise(
    problem: Problem, state: GameState, P: BlockPreconditioner, A: Tree, B: Tree, N: Any, fresh: Any, anew: Any
) -> tuple[jax.Array, jax.Array]:
    """The noise of one row in each player's residual, measured on the new rows, and ``κ``."""
    K = len(state.lam)
    if problem.noiseless:
        return state.noise, state.kappa
    surprise = players.subtract(players.take(A, 0, K), players.take(state.MA, 0, K))
    expected = jnp.diag(N + fresh)[:K]
    expected = jnp.where(expected > 0, expected, jnp.inf)
    if B is not None:
        more = players.subtract(players.take(B, 0, K), players.take(state.MB, 0, K))
        surprise = players.subtract(surprise, players.scale(state.lam, more))
    measured = players.dot(surprise, P.solve(surprise)) / expected
    first = (state.noise == 0).all()
    noise = jnp.where(anew, state.noise, state.noise + jnp.where(first, 1, FRESH) * (measured - state.noise))
    if B is not None:
        return noise, sum(sketch.kappa for sketch in P.metric)
    # B is known, so all noise is in A. Before the first measurement take κ = the number of rows.
    own = jnp.maximum(jnp.abs(state.lam), (OWN if problem.promises_positive else OWN_SIGNED) * state.size)
    relative = (noise / jnp.maximum(own, jnp.finfo(noise.dtype).tiny) ** 2).mean()
    return noise, jnp.where((noise == 0).all(), state.gathered.rows, relative)


def gain(N: jax.Array, R: jax.Array, anew: Any) -> jax.Array:
    """``(N + R)⁻¹ N``, or the identity at a start."""
    total = N + R
    tiny = jnp.finfo(N.dtype).tiny
    jitter = jnp.diag(CUTOFF * jnp.diag(total) + jnp.where(jnp.diag(total) > 0, 0, 1) + tiny)
    one = jnp.eye(len(N), dtype=N.dtype)
    return jnp.where(anew, one, jnp.linalg.solve(total + jitter, N))


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


def symmetric(G: jax.Array, L: int) -> jax.Array:
    """Symmetrise a Gram matrix of products; between tracked and new vectors take the tracked product."""
    G = G.at[:L, L:].set(G[L:, :L].T)
    return (G + G.T) / 2


def scores(state: GameState, new: Gathered) -> tuple[jax.Array, jax.Array]:
    """``⟨v, A v⟩`` and ``⟨v, B v⟩`` of the leading players, on the rows behind ``new``."""
    k = state.k
    V = players.take(state.S, 0, k)
    BV = players.scale(new.rows, state.metric.exact(V)) if new.B is None else players.take(new.B, 0, k)
    return players.dot(V, players.take(new.A, 0, k)), players.dot(V, BV)

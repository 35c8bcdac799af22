"""One move of the game: correct the tracked products, solve the small eigenproblem, find new search directions.

The players move to the best vectors in the span of ``S = [V, E, W]``: the players, the directions they came from and
the search directions. ``docs/accelerated.md`` derives each line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players
from eigenstream.core.ritz import largest_quotient, orthogonal, small_eigh, whitening
from eigenstream.problems.base import Problem, Products
from eigenstream.solvers.game.filter import CUTOFF, Corrected, correct, symmetric
from eigenstream.solvers.game.preconditioner import BlockPreconditioner, Diagonal
from eigenstream.solvers.game.state import GameState
from eigenstream.solvers.paper import direction
from eigenstream.solvers.schedules import memory_rows

#: Players move every ``√(κ T / PACE)`` rows while residuals exceed their noise; less often where they do not, down to
#: the share ``UNCLEAR`` of that frequency squared.
PACE, UNCLEAR = 4.0, 0.2
#: Eigenvalues within the span are lowered by this many standard deviations of their noise.
DOUBT = 0.5
#: At least this share of ``⟨v, B v⟩`` is taken to be signal.
CLEAR = 0.1
#: Weight that held-out scores from before a move keep after it.
KEPT = 0.7


class Ritz(NamedTuple):
    """Ritz vectors in coordinates of the span."""

    #: Columns: the players, and the directions they came from.
    C: jax.Array
    came: jax.Array
    #: The largest Rayleigh quotient in magnitude.
    size: jax.Array
    #: By how much the move raised the sum of the leading Ritz values, relative to it.
    gained: jax.Array
    #: Directions in which ``B`` is not zero to rounding.
    rank: jax.Array


def move_players(problem: Problem, state: GameState, half_life: float | None, whole: Any = False) -> GameState:
    """Move all players once; keep the old players where the new ones are not finite.

    ``whole`` says that the rows gathered are all there are: their products have no noise and replace all before.
    """
    with jax.default_matmul_precision("highest"):
        new = _moved(problem.for_game(state.plays_all), state, half_life, jnp.asarray(whole) | problem.noiseless)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((new.S, new.MA, new.MB, new.N))]).all()
    # Whether the move is accepted or not, the gathered sums start again from zero.
    stay = state._replace(refused=state.refused + 1, failed=state.moves == 0)
    moved = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, stay)
    # Given matrices overwrite their sums at each step, so these need no reset.
    return moved if problem.noiseless else moved._replace(gathered=state.gathered.emptied())


def _moved(problem: Problem, state: GameState, half_life: float | None, whole: jax.Array) -> GameState:
    K, k, L = len(state.lam), state.k, len(state.N)
    P = BlockPreconditioner(problem, state.metric)
    known = correct(problem, state, P, half_life, whole)

    found = rayleigh_ritz(problem, state, known)
    J = jnp.concatenate([found.C, found.came], axis=1)
    S, MA, MB, PS = (players.combine(J.T, M) for M in (state.S, known.MA, known.MB, known.PS))
    noisy = J.T @ known.N @ J
    V, AV, BV = (players.take(M, 0, K) for M in (S, MA, MB))

    # The paper's direction, with the noise added to B as a ridge.
    tiny = jnp.finfo(noisy.dtype).tiny
    Bv = players.add(BV, players.scale(known.kappa * jnp.diag(noisy)[:K], players.take(PS, 0, K)))
    norms = jnp.maximum(players.dot(V, Bv), tiny)
    # For a player outside the span of the sketch ⟨v, P v⟩ is too large: take the smaller of both estimates of ⟨v, B v⟩.
    bare = players.dot(V, BV)
    lengths = jnp.minimum(norms, jnp.maximum(bare + known.kappa * jnp.diag(noisy)[:K], tiny))
    bare = jnp.maximum(bare, CLEAR * lengths)
    rewards = players.dot(V, AV)
    lam = jnp.where(jnp.arange(K) < found.rank, rewards / jnp.where(rewards > 0, lengths, bare), 0)
    shift = 0.0 if problem.promises_positive else 2 * jnp.maximum(0, -lam.min())
    pair = Products(AV, Bv), Products(AV, Bv)
    g = players.scale(1 / norms, direction(V, [pair], Bv, norms, shift))
    W = P.solve(g)
    steep = jnp.sqrt(jnp.maximum(players.dot(g, W), 0))
    W = players.scale(jnp.where(steep > 0, 1 / jnp.where(steep > 0, steep, 1), 0), W)
    # B-orthogonalise W against the tracked span, or the Gram matrix is singular in float32.
    W = players.subtract(W, players.combine(players.gram(W, MB), S))
    W = players.combine(whitening(players.gram(W, P.apply(W)), CUTOFF)[0].T, W)

    # Rows to wait for before the next move.
    N = jnp.where(whole & (not problem.noiseless), J.T @ known.R @ J, noisy)
    floors = jnp.sqrt(jnp.maximum(known.noise[:k] * jnp.diag(N)[:k], 0))
    clear = (steep[:k] ** 2).sum() / jnp.maximum((floors**2).sum(), tiny)
    wait = jnp.sqrt(known.kappa * known.rows / (PACE * jnp.clip(clear, UNCLEAR, 1)))
    if state.plays_all:
        # With K = d a move only re-solves the running mean, so a few moves suffice.
        wait = jnp.minimum(known.rows, memory_rows(half_life) / 4)
    metric = state.metric
    if not isinstance(metric, Diagonal):
        metric = tuple(sketch.anew(known.restart) for sketch in metric)
    return state._replace(
        S=S if L == K else players.stack(S, W),
        MA=MA,
        MB=None if problem.diagonal_only else MB,
        N=(N + N.T) / 2,
        metric=metric,
        lam=lam,
        size=found.size,
        kappa=known.kappa,
        noise=known.noise,
        preconditioned_residuals=steep[:k] / found.size,
        floors=floors / found.size,
        rows_known=known.rows,
        rows_since_sketch=jnp.where(whole, 0, state.rows_since_sketch + state.gathered.rows),
        rows_to_next_move=jnp.where(known.restart, 2 * K, jnp.maximum(2 * K, wait)),
        heldout=state.heldout.fade(jnp.where(whole | ~state.first_pass, 1, KEPT)),
        # No gain is recorded for the first move: there is nothing to compare with.
        gains=jnp.append(state.gains[1:], jnp.where((state.moves == 0) | known.restart, jnp.nan, found.gained)),
        moves=state.moves + 1,
        rank=found.rank,
        failed=jnp.array(False),
        restarts=state.restarts + known.restart,
    )


def rayleigh_ritz(problem: Problem, state: GameState, known: Corrected) -> Ritz:
    """Rayleigh-Ritz in the span of ``S``; the noise level is added to ``B`` and subtracted from ``A``."""
    K, k, L = len(state.lam), state.k, len(state.N)
    GA, GB = (symmetric(players.gram(state.S, M), L) for M in (known.MA, known.MB))
    lengths = jnp.maximum(known.energy, jnp.finfo(GB.dtype).tiny)
    noise = known.kappa * known.N
    if state.plays_all:
        # ⟨v, B v⟩ is below rounding error, so the Rayleigh quotient is 0/0: drop it.
        some = jnp.diag(GB) > BlockPreconditioner(problem, state.metric).rounding(state.S)
        GA, GB = (jnp.where(some & some[:, None], G, 0) for G in (GA, GB))
    size = largest_quotient(GA, GB + noise, CUTOFF)
    # Noise in B would raise negative eigenvalues: shift them above 0 first.
    lift = 0.0 if problem.promises_positive else largest_quotient(GA, GB, CUTOFF)
    GA, GB = GA + lift * GB, GB + noise
    doubt = DOUBT * state.size * jnp.sqrt(K * jnp.maximum(jnp.diag(known.N), 0) / lengths) * jnp.diag(GB)
    GA = GA - jnp.diag(doubt)
    # With K = d keep a complete basis, null directions of B included.
    ritz, C = small_eigh(GA, GB, CUTOFF, complete=state.plays_all)
    alone, _ = small_eigh(GA[:K, :K], GB[:K, :K], CUTOFF)
    C = C[:, :K]
    came = orthogonal(C.at[:K].set(0), C, GB, CUTOFF)[:, : L - K]
    total = jnp.abs(ritz[:k]).sum()
    gained = (ritz[:k].sum() - alone[:k].sum()) / jnp.where(total > 0, total, 1)
    return Ritz(C, came, size, gained, (ritz > -jnp.inf).sum(dtype=state.rank.dtype))

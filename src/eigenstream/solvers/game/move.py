"""One move of the game: correct the tracked products, solve the small eigenproblem, find new search directions.

The players move to the best vectors in the span of ``S``: the players, the search directions and, in a pass over all
rows, the directions they came from. ``docs/accelerated.md`` derives each line.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np

from eigenstream.core import players
from eigenstream.core.precision import for_moves
from eigenstream.core.ritz import largest_quotient, orthogonal, small_eigh
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.solvers.game.filter import Corrected, correct, symmetric
from eigenstream.solvers.game.preconditioner import CUTOFF, Sketch
from eigenstream.solvers.game.state import GameState
from eigenstream.solvers.paper import direction

#: Eigenvalues within the span are lowered by this many standard deviations of their noise.
DOUBT = 0.5
#: Players wait for this share of all rows so far: moves on fewer lose more by noise than they gain,
LATE = 0.2
#: One of this many search directions is an eigenvector of the sketch.
TRIED = 8
#: Eigenvectors of the sketch take over if they score this many times higher than the players: closer scores are noise.
MARGIN = 1.01


class Ritz(NamedTuple):
    """Ritz vectors in coordinates of the span."""

    #: Columns: the players, and in a pass over all rows the directions they came from.
    C: jax.Array
    #: The largest Rayleigh quotient in magnitude.
    size: jax.Array
    #: By how much the move raised the sum of the leading Ritz values, relative to it.
    gained: jax.Array
    #: Directions in which ``B`` is not zero to rounding.
    rank: jax.Array


def move_players(problem: Problem, state: GameState, half_life: float | None) -> GameState:
    """Move all players once; keep the old players where the new ones are not finite."""
    with for_moves(state.exact):
        new = _moved(problem.for_game(), state, half_life)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((new.S, new.MA, new.MB, new.N))]).all()
    # Whether the move is accepted or not, the gathered sums start again from zero.
    stay = state._replace(refused=state.refused + 1, failed=state.moves == 0, gains=unknown(state.gains))
    if isinstance(state.metric, Sketch):
        stay = stay._replace(metric=state.metric.emptied())
    moved = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, stay)
    # Given matrices overwrite their sums at each step, so these need no reset.
    return moved if problem.noiseless else moved._replace(gathered=state.gathered.emptied())


def unknown(gains: jax.Array) -> jax.Array:
    """The gains with one more move, whose gain is not known."""
    return jnp.append(gains[1:], jnp.nan)


def _moved(problem: Problem, state: GameState, half_life: float | None) -> GameState:
    K, k = len(state.lam), state.k
    P = state.metric.factor(problem, state.exact, K)
    known = correct(problem, state, P, half_life)
    found = rayleigh_ritz(problem, state, known)
    S, MA, MB = (players.combine(found.C.T, M) for M in (state.S, known.MA, known.MB))
    N = found.C.T @ known.N @ found.C
    N = (N + N.T)[:K, :K] / 2
    V, AV, BV = (players.take(M, 0, K) for M in (S, MA, MB))

    # The paper's direction. The noise of ⟨v, B v⟩ is added to it.
    tiny = jnp.finfo(N.dtype).tiny
    rewards = players.dot(V, AV)
    norms = jnp.maximum(players.dot(V, BV) + known.kappa * jnp.diag(N), tiny)
    noisy = jnp.maximum(players.dot(V, BV) + known.own * jnp.diag(N), tiny)
    lam = jnp.where(jnp.arange(K) < found.rank, rewards / noisy, 0)
    shift = 0.0 if problem.promises_positive else 2 * jnp.maximum(0, -lam.min())
    pair = Products(AV, BV), Products(AV, BV)
    g = players.scale(1 / norms, direction(V, [pair], BV, norms, shift))
    W, steep = conjugate(P.solve(g), g)
    # B-orthogonalise W against the players, or the Gram matrix is singular in float32.
    W = players.subtract(W, players.combine(players.gram(W, MB), S))

    gained, tried = found.gained, jnp.array(False)
    if P.sketched is not None:
        # The sketch's own eigenvectors take over once some of them score higher on the rows gathered.
        E, PE, inner = P.sketched
        some = sample(k, K)
        scored, rival = score(state, 2 * K - len(some) + np.arange(len(some))), score(state, some)
        # A factor of rounded inner products may not be finite: then the search directions stay as they are.
        finite = jnp.isfinite(players.dot(E, PE)).all()
        tried = state.tried & finite & (inner[:k] > 0).all() & (scored > rival * MARGIN)
        # On rows that the sketch has seen its eigenvalues are too large.
        inner = inner * jnp.clip(scored / jnp.maximum(inner[some].sum(), tiny), 0, 1)
        gain = (inner[:k] - lam[:k]).sum() / jnp.maximum(inner[:k].sum(), tiny)
        unit = players.scale(1 / jnp.sqrt(norms), V)
        # A sketch of few rows has fewer eigenvectors: the rest are zeros, without noise.
        level = jnp.diag((players.dot(E, PE) > 0).astype(N.dtype)) / jnp.maximum(state.gathered.rows, 1)
        W = jax.tree.map(lambda w, e: w.at[K - len(some) :].set(jnp.where(finite, e[some], w[K - len(some) :])), W, E)
        new = E, players.scale(inner, PE), PE, unit, level, inner, gain, False
        now = V, AV, BV, W, N, lam, gained, finite
        S, AV, BV, W, N, lam, gained, tried = jax.tree.map(lambda a, b: jnp.where(tried, a, b), new, now)

    floors = jnp.sqrt(jnp.maximum(known.noise * jnp.diag(N), 0))[:k]
    wait = jnp.maximum(max(K, state.metric.rank), LATE * known.rows)
    return state._replace(
        S=players.stack(S, W),
        MA=AV,
        MB=None if problem.diagonal_only else BV,
        N=N,
        metric=P.metric,
        lam=lam,
        size=found.size,
        kappa=known.kappa,
        noise=known.noise,
        own=known.own,
        preconditioned_residuals=steep[:k] / found.size,
        floors=floors / found.size,
        cover=jnp.where(state.exact, state.cover, P.cover),
        tried=tried,
        rows_known=known.rows,
        rows_to_next_move=wait,
        heldout=state.heldout if state.exact else state.heldout.after_move(),
        # No gain is recorded for the first move: there is nothing to compare with.
        gains=jnp.append(state.gains[1:], jnp.where(state.moves == 0, jnp.nan, gained)),
        moves=state.moves + 1,
        rank=found.rank,
        failed=jnp.array(False),
    )


def sample(k: int, K: int) -> np.ndarray:
    """Indices of players that stand for the ``k`` leading ones."""
    return np.linspace(0, k - 1, min(k, max(1, K // TRIED))).round().astype(int)


def score(state: GameState, rows: np.ndarray) -> jax.Array:
    """The sum of the Rayleigh quotients of some vectors of ``S`` on the rows gathered."""
    v, a, b = (jax.tree.map(lambda x: x[rows], M) for M in (state.S, *state.gathered[1:]))
    a, b = players.dot(v, a), players.dot(v, b)
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0).sum()


def conjugate(W: Tree, g: Tree) -> tuple[Tree, jax.Array]:
    """``P``-orthonormal combinations of ``W = P⁻¹ g``, and the norms of ``W``."""
    # W P Wᵀ is W gᵀ.
    steep = jnp.sqrt(jnp.maximum(players.dot(g, W), 0))
    unit = jnp.where(steep > 0, 1 / jnp.where(steep > 0, steep, 1), 0)
    W = players.scale(unit, W)
    G, eye = players.gram(W, players.scale(unit, g)), jnp.eye(len(unit), dtype=unit.dtype)
    L = jnp.linalg.cholesky((G + G.T) / 2 + CUTOFF * eye)
    # Rounding may make G indefinite: then W stays as it is.
    L = jnp.where(jnp.isfinite(L).all(), L, eye)
    return players.combine(jax.scipy.linalg.solve_triangular(L, eye, lower=True), W), steep


def rayleigh_ritz(problem: Problem, state: GameState, known: Corrected) -> Ritz:
    """Rayleigh-Ritz in the span of ``S``; the noise level is added to ``B`` and subtracted from ``A``."""
    K, k = len(state.lam), state.k
    GA, GB = (symmetric(state.S, M, K) for M in (known.MA, known.MB))
    noise = known.kappa * known.N
    size = largest_quotient(GA, GB + noise, CUTOFF)
    # Noise in B would raise negative eigenvalues: shift them above 0 first.
    lift = 0.0 if problem.promises_positive else largest_quotient(GA, GB, CUTOFF)
    GA, plain = GA + lift * GB, GB
    GB = GB + noise
    lengths = jnp.maximum(jnp.diag(plain), jnp.finfo(GB.dtype).tiny)
    doubt = DOUBT * state.size * jnp.sqrt(K * jnp.maximum(jnp.diag(known.N), 0) / lengths) * jnp.diag(GB)
    GA = GA - jnp.diag(doubt)
    ritz, C = small_eigh(GA, GB, CUTOFF)
    C = C[:, :K]
    if state.exact:
        C = jnp.concatenate([C, orthogonal(C.at[:K].set(0), C, GB, CUTOFF)[:, :K]], axis=1)
    before = jnp.diag(GA)[:k] / jnp.maximum(jnp.diag(GB)[:k], jnp.finfo(GB.dtype).tiny)
    total = jnp.abs(ritz[:k]).sum()
    gained = (ritz[:k] - before).sum() / jnp.where(total > 0, total, 1)
    return Ritz(C, size, gained, (ritz > -jnp.inf).sum(dtype=state.rank.dtype))

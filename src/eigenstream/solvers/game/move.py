"""One move of the game: correct the tracked products, solve the small eigenproblem, find new search directions.

The players move to the best vectors in the span of ``S``: the players, the search directions and, in a pass over all
rows, the directions they came from. ``docs/accelerated.md`` derives each line.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from eigenstream.core import players
from eigenstream.core.precision import for_moves
from eigenstream.core.ritz import largest_quotient, orthogonal, small_eigh, small_svd
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.solvers.game.filter import LEAST, Corrected, combine, correct, scores, traces
from eigenstream.solvers.game.preconditioner import CUTOFF, Sketch
from eigenstream.solvers.game.state import GameState

#: Players wait for this share of all rows so far: moves on fewer lose more by noise than they gain.
LATE = 0.2


class Ritz(NamedTuple):
    """Ritz vectors in coordinates of the span."""

    #: For each part the columns: the players, and in a pass over all rows the directions they came from.
    C: jax.Array
    #: The largest Rayleigh quotient in magnitude.
    size: jax.Array
    #: By how much the move raised the sum of the leading Ritz values, relative to it.
    gained: jax.Array
    #: Directions in which ``B`` is not zero to rounding.
    rank: jax.Array


class Moved(NamedTuple):
    """The players after a move, with their products, and the search directions."""

    V: Tree
    AV: Tree
    BV: Tree
    N: jax.Array
    lam: jax.Array
    W: Tree
    gained: jax.Array


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
    return moved if problem.noiseless else moved._replace(gathered=players.zeros_in_place(state.gathered, state.step))


def unknown(gains: jax.Array) -> jax.Array:
    """The gains with one more move, whose gain is not known."""
    return jnp.append(gains[1:], jnp.nan)


def _moved(problem: Problem, state: GameState, half_life: float | None) -> GameState:
    K, k = len(state.lam), state.k
    P = state.metric.factor(problem, state.exact, K)
    known = correct(problem, state, P, half_life)
    found = rayleigh_ritz(problem, state, known)
    C = [c.T for c in found.C]
    S, C = combine(problem, C, players.take(state.S, 0, known.N.shape[1])), [c[:K] for c in C]
    V, AV, BV = players.take(S, 0, K), combine(problem, C, known.MA, True), combine(problem, C, known.MB)
    N = jnp.stack([c @ n @ c.T for c, n in zip(C, known.N, strict=True)])
    N = (N + N.transpose(0, 2, 1)) / 2

    # After Rayleigh-Ritz no player overlaps with a parent: of the paper's direction the rewards are left.
    rewards, b = players.dot(V, AV), players.dot(V, BV)
    norms, noisy = (_noisy_length(b, x * traces(N)) for x in (known.kappa, known.own))
    lam = jnp.where(jnp.arange(K) < found.rank, rewards / noisy, 0)
    g = players.subtract(players.scale(b / norms, AV), players.scale(rewards / norms, BV))
    # A Cholesky factor of rounded inner products may not be finite: then there are no such directions.
    ways = [jax.tree.map(lambda w: jnp.where(jnp.isfinite(w), w, 0), solve(g)) for solve in P.solves]
    steep = jnp.sqrt(jnp.maximum(players.dot(g, ways[0]), 0))
    W = players.stack(*(conjugate(problem, W, g, V, BV) for W in ways))
    new = Moved(V, AV, BV, N, lam, W, found.gained)

    if state.exact:
        rest = players.take(S, K, 2 * K)
    elif P.sketched is None:
        rest = players.take(state.S, 2 * K, 2 * K)
    else:
        new, rest = adopted(state, P.sketched, new, norms)
    wait = jnp.maximum(max(K, state.metric.sizes.rank), LATE * known.rows)
    return state._replace(
        S=players.stack(new.V, new.W, rest),
        MA=new.AV,
        MB=None if problem.diagonal_only else new.BV,
        N=new.N,
        metric=P.metric,
        lam=new.lam,
        size=found.size,
        kappa=known.kappa,
        noise=known.noise,
        own=known.own,
        preconditioned_residuals=steep[:k] / found.size,
        floors=jnp.sqrt(jnp.maximum(known.noise * traces(new.N), 0))[:k] / found.size,
        cover=jnp.where(state.exact, state.cover, P.cover),
        rows_known=known.rows,
        rows_to_next_move=wait,
        heldout=state.heldout if state.exact else state.heldout.after_move(),
        # No gain is recorded for the first move: there is nothing to compare with.
        gains=jnp.append(state.gains[1:], jnp.where(state.moves == 0, jnp.nan, new.gained)),
        moves=state.moves + 1,
        rank=found.rank,
        failed=jnp.array(False),
    )


def adopted(
    state: GameState, sketched: tuple[Tree, Tree, jax.Array], now: Moved, norms: jax.Array
) -> tuple[Moved, Tree]:
    """The sketch's own eigenvectors in the place of players that they outscore, and those to be scored next.

    They were not scored on rows that the sketch has seen. Their products count as known from as many rows.
    """
    E, PE, inner = sketched
    K, k, tiny = len(now.lam), state.k, jnp.finfo(inner.dtype).tiny
    # A factor of rounded inner products may not be finite.
    finite = jnp.isfinite(players.dot(E, PE)).all()
    tried = players.count(state.S) - 2 * K
    score, rival = (_quotients(state, start, tried).sum() for start in (2 * K, 0))
    # The last rows of a stream may be few.
    enough = state.gathered.rows >= state.rows_to_next_move
    better = enough & finite & (inner[:k] > 0).all() & (score > rival)
    # On rows that the sketch has seen its eigenvalues are too large.
    inner = inner * jnp.clip(score / jnp.maximum(inner[:tried].sum(), tiny), 0, 1)
    # A sketch of few rows has fewer eigenvectors: the rest are zeros, without noise.
    level = jnp.diag((players.dot(E, PE) > 0).astype(inner.dtype)) / jnp.maximum(state.gathered.rows, 1)
    N = jnp.broadcast_to(level / len(now.N), now.N.shape)
    gained = (inner[:k] - now.lam[:k]).sum() / jnp.maximum(inner[:k].sum(), tiny)
    unit = players.scale(1 / jnp.sqrt(norms), now.V)
    new = Moved(E, players.scale(inner, PE), PE, N, inner, unit, gained)
    probes = jax.tree.map(lambda x: jnp.where(finite, x, 0), players.take(E, 0, tried))
    return jax.tree.map(lambda a, b: jnp.where(better, a, b), new, now), probes


def _quotients(state: GameState, start: int, count: int) -> jax.Array:
    """Rayleigh quotients of some vectors of ``S`` on the rows gathered; 0 of zeros."""
    a, b = scores(state, state.gathered, start, start + count)
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def conjugate(problem: Problem, W: Tree, g: Tree, V: Tree, BV: Tree) -> Tree:
    """``P``-orthonormal combinations of ``W = P⁻¹ g``, less what they share with the players in ``B``; part by part."""

    def one(W: Tree, g: Tree, V: Tree, BV: Tree) -> Tree:
        # W P Wᵀ is W gᵀ.
        unit = _inverse(jnp.sqrt(jnp.maximum(players.dot(g, W), 0)))
        W = players.scale(unit, W)
        G, eye = players.gram(W, players.scale(unit, g)), jnp.eye(len(unit), dtype=unit.dtype)
        L = jnp.linalg.cholesky((G + G.T) / 2 + CUTOFF * eye)
        # Rounding may make G indefinite: then W stays as it is.
        L = jnp.where(jnp.isfinite(L).all(), L, eye)
        W = players.combine(jax.scipy.linalg.solve_triangular(L, eye, lower=True), W)
        # Without this the Gram matrix of the span is singular in float32.
        W = players.subtract(W, players.combine(players.gram(W, BV) * _inverse(players.dot(V, BV)), V))
        # More of them would depend on the players.
        return players.scale(
            jnp.where(jnp.arange(len(unit)) < players.size(players.template(V)) - len(unit), 1.0, 0), W
        )

    return problem.whole(tuple(one(*parts) for parts in zip(*map(problem.parts, (W, g, V, BV)), strict=True)))


def _noisy_length(b: jax.Array, noise: jax.Array) -> jax.Array:
    """``⟨v, B v⟩`` with noise added, which may have made it negative; above 0."""
    return jnp.maximum(jnp.maximum(b + noise, LEAST * (jnp.abs(b) + noise)), jnp.finfo(b.dtype).tiny)


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def rayleigh_ritz(problem: Problem, state: GameState, known: Corrected) -> Ritz:
    """Rayleigh-Ritz in the span of ``S``, with the noise added to ``B``: its expected value and a standard deviation.

    Two views have coefficients of their own, which are singular vectors.
    """
    K, k = len(state.lam), state.k
    S = players.take(state.S, 0, known.N.shape[1])
    S, MA, MB = (problem.parts(M) for M in (S, known.MA, known.MB))
    GA = inner(S[0], MA[0], S[-1], MA[-1], K)
    GB = jnp.stack([inner(s, b, s, b, K) for s, b in zip(S, MB, strict=True)])
    # Search directions are of unit length in P: what is left of those that the players span is rounding.
    lengths = jnp.einsum("pii->pi", GB)
    kept = jnp.where(lengths > jnp.where(jnp.arange(lengths.shape[1]) < K, 0, CUTOFF), 1, 0)
    GA, plain = kept[0][:, None] * GA * kept[-1], kept[:, :, None] * GB * kept[:, None]
    noise = kept[:, :, None] * known.kappa * known.N * kept[:, None]
    # Among K directions the best seems better than it is by √K standard deviations.
    doubt = jnp.sqrt(K * jnp.maximum(jnp.einsum("pii->pi", known.N), 0) * kept * lengths)
    GB = plain + noise + jax.vmap(jnp.diag)(doubt)
    if len(S) == 1:
        size = largest_quotient(GA, plain[0] + noise[0], CUTOFF)
        # Noise in B would raise negative eigenvalues: shift them above 0 first.
        GA = GA + (0.0 if problem.promises_positive else largest_quotient(GA, plain[0], CUTOFF)) * plain[0]
        ritz, C = small_eigh(GA, GB[0], CUTOFF)
        C = C[None]
    else:
        ritz, C = small_svd(GA, GB[0], GB[1], CUTOFF)
        if not problem.orthonormal:
            # Products of different rows contradict one another where a correlation is above 1: it comes last.
            ritz = jnp.where(ritz > 1, 1 / ritz, ritz)
            order = jnp.argsort(-ritz)
            ritz, C = ritz[order], C[:, :, order]
        size = jnp.maximum(ritz[0], jnp.finfo(GB.dtype).tiny)
    C = C[:, :, :K]
    if state.exact:
        came = [orthogonal(c.at[:K].set(0), c, g, CUTOFF)[:, :K] for c, g in zip(C, GB, strict=True)]
        C = jnp.concatenate([C, jnp.stack(came)], axis=2)
    before = jnp.diag(GA)[:k] * jnp.sqrt(_inverse(jnp.diag(GB[0])[:k]) * _inverse(jnp.diag(GB[-1])[:k]))
    total = jnp.abs(ritz[:k]).sum()
    gained = (ritz[:k] - before).sum() / jnp.where(total > 0, total, 1)
    return Ritz(C / jnp.sqrt(len(S)), size, gained, (ritz > -jnp.inf).sum(dtype=state.rank.dtype))


def inner(S: Tree, M: Tree, T: Tree, N: Tree, L: int) -> jax.Array:
    """Inner products of ``S`` with the products ``M``, averaged with those of ``T`` with ``N`` transposed.

    Those between one of the first ``L`` vectors and a later one are by the tracked product, that of the first.
    """

    def three(S: Tree, M: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        count = players.count(S)
        across, rest = jnp.split(players.gram(players.take(S, L, count), M), [L], axis=1)
        return players.gram(players.take(S, 0, L), players.take(M, 0, L)), across, rest

    (own, across, rest), (other, beside, last) = three(S, M), three(T, N)
    return jnp.block([[(own + other.T) / 2, beside.T], [across, (rest + last.T) / 2]])

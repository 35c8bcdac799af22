"""Products with all rows so far of players that move: a Kalman filter whose noise is a small matrix.

What is known of ``A S`` is ``M``, with noise ``N`` among the players, in units of a row's noise ``κ``. Rows gathered
say ``A_t S``, with noise ``R``. The best correction is ``M + (N + R)⁻¹N (A_t S - M)``: for players that stood still,
the mean over all rows; for a direction just taken, of which few rows are known, mostly what the new ones say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream import trees
from eigenstream.problems.base import Problem
from eigenstream.solvers.knowing import HeldOut
from eigenstream.solvers.metric import Diagonal

Tree = Any

#: Directions with a smaller share than this are rounding.
CUTOFF = 1e-5
#: Rows whose variance along the players is out by this factor follow another law than those before.
CHANGED = 3.0
#: The least eigenvalue, relative to the largest, that noise is measured against; where they may be negative.
OWN, OWN_SIGNED = 0.1, 0.3
#: Weight of the noise just measured.
FRESH = 0.3
#: A row moves ``B v`` by ``κ ⟨v, B v⟩`` on average, which the rows gathered can only estimate: this share of the noise
#: is put at ``κ ⟨v, P v⟩`` instead.
GUARD = 0.3


class Gathered(NamedTuple):
    """Sums over the rows since the last move."""

    rows: jax.Array
    A: Tree
    B: Tree

    def emptied(self) -> Gathered:
        """Sums over no rows."""
        return trees.emptied(self, self.rows)


class GameState(NamedTuple):
    """What is carried from step to step, and what a checkpoint holds."""

    #: Players, where they came from and where they would go: 3K of them.
    S: Tree
    #: ``A`` and ``B`` times the first 2K, and the noise in these products.
    MA: Tree
    MB: Tree
    N: jax.Array
    gathered: Gathered
    #: `Diagonal`, or a `Sketch` for each block of ``B``.
    metric: Any
    memory: Tree
    lam: jax.Array
    #: The largest eigenvalue met, in magnitude.
    size: jax.Array
    #: Noise of one row in the products and, of each player, in its residual.
    kappa: jax.Array
    noise: jax.Array
    #: ``|A v - λ B v|`` in the norm of ``P⁻¹``, relative to ``size``, and what noise alone would make it.
    residuals: jax.Array
    floors: jax.Array
    #: Rows behind the products, since the sketches last learned, and wanted before the next move.
    known: jax.Array
    sketched: jax.Array
    due: jax.Array
    #: Scores on rows before they were learned from, which they are in a first pass only.
    held: HeldOut
    first_pass: jax.Array
    #: By how much the last moves raised the sum of the leading eigenvalues, relative to it.
    gains: jax.Array
    step: jax.Array
    moves: jax.Array
    #: Directions of the last span in which ``B`` could be told from nothing.
    rank: jax.Array
    #: Moves that were not taken, and times the rows were found to have changed.
    refused: jax.Array
    restarts: jax.Array
    failed: jax.Array

    @property
    def long(self) -> tuple[str, ...]:
        """The fields that hold arrays as long as a player."""
        return ("S", "MA", "MB", "gathered", "metric", "memory")

    @property
    def plays_all(self) -> bool:
        """Whether the players span everything: they then track all of ``A`` and ``B``."""
        return len(self.lam) == len(self.N)


class Known(NamedTuple):
    """Products of the whole span, and the noise in them."""

    MA: Tree
    MB: Tree
    PS: Tree
    N: jax.Array
    #: Noise of the rows gathered alone, and what a row's is relative to.
    R: jax.Array
    energy: jax.Array
    noise: jax.Array
    kappa: jax.Array
    rows: jax.Array
    restart: jax.Array


class Blocks(NamedTuple):
    """The metric of a whole player, from that of each block."""

    problem: Problem
    metric: Any

    def apply(self, V: Tree) -> Tree:
        return self._each(lambda m, v: m.apply(v), V)

    def solve(self, G: Tree) -> Tree:
        return self._each(lambda m, g: m.solve(g), G)

    def rounding(self, V: Tree) -> jax.Array:
        """The least ``⟨v, B v⟩`` of each player that can be told from 0, as an exact solution would."""
        if isinstance(self.metric, Diagonal):
            return jnp.zeros_like(trees.dot(V, V))
        blocks = zip(self.metric, self.problem.blocks(V), strict=True)
        return sum(sketch.rounding(v) for sketch, v in blocks)

    def _each(self, f: Any, V: Tree) -> Tree:
        if isinstance(self.metric, Diagonal):
            return f(self.metric, V)
        return self.problem.joined(tuple(map(f, self.metric, self.problem.blocks(V))))


def known(problem: Problem, state: GameState, P: Blocks, half_life: float | None, whole: jax.Array) -> Known:
    """The products known, corrected by those of the rows gathered."""
    L, S = len(state.N), state.S
    n = state.gathered.rows
    A, B = (trees.scale(1 / n, sums) for sums in state.gathered[1:])
    PS = P.apply(S)
    energy = trees.gram(S, PS)
    if B is not None:
        energy = GUARD * energy + (1 - GUARD) * trees.gram(S, B)
        energy = (energy + energy.T) / 2
    R = energy / n
    forget = 1.0 if half_life is None else 2 ** jnp.minimum(n / half_life, 60)
    before = state.known / forget
    N, counted = forget * state.N, jnp.where(whole | state.plays_all, 0, R)
    restart = _changed(state, B) & ~whole
    anew = (state.moves == 0) | restart | whole
    noise, kappa = _noise(problem, state, P, A, B, N, R[:L, :L], anew)
    share = gain(N, counted[:L, :L], anew)
    if state.plays_all:
        # No direction is newer than another.
        share = jnp.where(anew, 1, n / (before + n)) * jnp.eye(L, dtype=N.dtype)
    MA = corrected(share, state.MA, A)
    MB = state.metric.exact(S) if problem.diagonal_only else corrected(share, state.MB, B)
    N = noise_after(share, jnp.where(anew, 0, N), counted)
    total = jnp.where(anew, 0, before) + n
    return Known(MA, MB, PS, N, R, jnp.diag(energy), noise, kappa, total, restart)


def _changed(state: GameState, B: Tree) -> jax.Array:
    """Whether the rows gathered vary along the players by far more or less than those before.

    Players that span everything are a mean over rows, like an exact solution, and go by no such sign.
    """
    if B is None or state.plays_all:
        return jnp.array(False)
    K = len(state.lam)
    V = trees.part(state.S, 0, K)
    now, before = (trees.dot(V, trees.part(M, 0, K)).sum() for M in (B, state.MB))
    # Fewer rows than a move waits for may vary as they like.
    return (state.moves > 0) & (state.gathered.rows >= 2 * K) & ~((now > before / CHANGED) & (now < before * CHANGED))


def _noise(
    problem: Problem, state: GameState, P: Blocks, A: Tree, B: Tree, N: Any, fresh: Any, anew: Any
) -> tuple[jax.Array, jax.Array]:
    """Noise of a row: of every player's residual, from how far new rows are from what was known; and ``κ``."""
    K = len(state.lam)
    if problem.noiseless:
        return state.noise, state.kappa
    surprise = trees.subtract(trees.part(A, 0, K), trees.part(state.MA, 0, K))
    expected = jnp.diag(N + fresh)[:K]
    expected = jnp.where(expected > 0, expected, jnp.inf)
    if B is not None:
        more = trees.subtract(trees.part(B, 0, K), trees.part(state.MB, 0, K))
        surprise = trees.subtract(surprise, trees.scale(state.lam, more))
    measured = trees.dot(surprise, P.solve(surprise)) / expected
    first = (state.noise == 0).all()
    noise = jnp.where(anew, state.noise, state.noise + jnp.where(first, 1, FRESH) * (measured - state.noise))
    if B is not None:
        return noise, sum(sketch.kappa for sketch in P.metric)
    # Where B is known all noise is A's. Before any is measured, that of the first rows is their number.
    own = jnp.maximum(jnp.abs(state.lam), (OWN if problem.positive else OWN_SIGNED) * state.size)
    relative = (noise / jnp.maximum(own, jnp.finfo(noise.dtype).tiny) ** 2).mean()
    return noise, jnp.where((noise == 0).all(), state.gathered.rows, relative)


def gain(N: jax.Array, R: jax.Array, anew: Any) -> jax.Array:
    """``(N + R)⁻¹ N``; all of the new where nothing was known."""
    total = N + R
    tiny = jnp.finfo(N.dtype).tiny
    jitter = jnp.diag(CUTOFF * jnp.diag(total) + jnp.where(jnp.diag(total) > 0, 0, 1) + tiny)
    one = jnp.eye(len(N), dtype=N.dtype)
    return jnp.where(anew, one, jnp.linalg.solve(total + jitter, N))


def corrected(gain: jax.Array, known: Tree, new: Tree) -> Tree:
    """The products known, corrected, with those of the search directions, of which nothing was known, below."""
    L = len(gain)
    surprise = trees.subtract(trees.part(new, 0, L), known)
    return trees.stack(trees.add(known, trees.combine(gain.T, surprise)), jax.tree.map(lambda x: x[L:], new))


def noise_after(gain: jax.Array, N: jax.Array, R: jax.Array) -> jax.Array:
    """The noise of corrected products and new ones together."""
    L = len(gain)
    rest = jnp.eye(L, dtype=N.dtype) - gain
    corner = gain.T @ R[:L, L:]
    known = rest.T @ N @ rest + gain.T @ R[:L, :L] @ gain
    return jnp.block([[known, corner], [corner.T, R[L:, L:]]])


def symmetric(G: jax.Array, L: int) -> jax.Array:
    """A Gram matrix of products: between known ones and new ones, what the known say."""
    G = G.at[:L, L:].set(G[L:, :L].T)
    return (G + G.T) / 2


def scores(state: GameState, new: Gathered) -> tuple[jax.Array, jax.Array]:
    """``⟨v, A v⟩`` and ``⟨v, B v⟩`` of the leading players, on the rows behind ``new``."""
    k = len(state.residuals)
    V = trees.part(state.S, 0, k)
    BV = trees.scale(new.rows, state.metric.exact(V)) if new.B is None else trees.part(new.B, 0, k)
    return trees.dot(V, trees.part(new.A, 0, k)), trees.dot(V, BV)

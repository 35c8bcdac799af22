"""The accelerated game: the paper's players with tracked products and a preconditioner, and nothing left to tune.

Each player has a vector ``v``, running estimates of ``A v`` and ``B v``, the direction ``e`` it came from and a search
direction ``w``: the paper's direction, preconditioned. Rows are multiplied with all of these held fixed; then the
players move to the best vectors in the common span. ``docs/accelerated.md`` derives each line.

    S = [V, E, W]
    M ← M + (N + R)⁻¹N (A_t S - M)                 correct the tracked products by the new rows; B alike
    V ← argmax over c S of  c (S MAᵀ) cᵀ - doubt   subject to   c (S MBᵀ + κ N) cᵀ = 1
    W ← P⁻¹ (rewards - penalties of V)

``N`` is the noise in ``M`` and ``R = S B Sᵀ / rows`` that of the new rows, in units of ``κ``, the noise of one row.
After ``T`` rows the players wait for about ``√(κ T)`` more: with fewer they follow noise, with more they waste rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import players, views
from eigenstream.core.ritz import fix_signs
from eigenstream.core.settings import check_count
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.solvers.game.filter import scores
from eigenstream.solvers.game.move import move_players
from eigenstream.solvers.game.preconditioner import Diagonal, Sketch
from eigenstream.solvers.game.state import GameState, Gathered
from eigenstream.solvers.game.verdict import HeldOut
from eigenstream.solvers.schedules import check_half_life, memory_rows
from eigenstream.solvers.stochastic import Info, residuals

#: A sketch is updated at each of the first EARLY moves, then whenever the rows have grown by the factor GROWTH.
EARLY, GROWTH = 6, 1.35
#: Without ``rank``, blocks of at most WHOLE dimensions are sketched whole and larger ones with RANK directions.
WHOLE, RANK = 1024, 384
#: Every dimension gets a player (K = d) where d is at most this many times the number of players otherwise.
ALL = 8
#: Gains of the last moves that are kept.
GAINS = 16


@dataclass(frozen=True, kw_only=True)
class Game:
    """The accelerated game: one pass over the rows, no learning rate.

    Memory is ``O(d (k + extra + rank))``. No setting has a unit: scaling the data does not change the result.

    Parameters
    ----------
    extra : int
        Players beyond the ``k`` asked for; they speed up convergence.
    rank : int, optional
        Rank of the sketch of each diagonal block of ``B``, the preconditioner. Default: 384, or the whole block where
        it has at most 1,024 dimensions.
    half_life : float, optional
        Rows after which the weight of a row has halved. None: all rows weigh the same.
    outlier : float, optional
        Scale rows down to this many times the mean squared norm, and report them. Default: rows are taken as they are,
        as by every solver.
    opening : float
        Memory for the first rows, as a multiple of that of the state; on a GPU at least ``memory_budget``, or half of
        what is free, if no results are wanted before the stream ends. The game opens with several moves on them; a
        stream that fits is solved whole. 0: every row is used once.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(6000, 200)) / np.arange(1, 201) ** 0.5
    >>> batches = np.split(X, 60)
    >>> exact = es.solve(es.problems.pca(), batches, k=2, solver="exact")
    >>> game = es.solve(es.problems.pca(), batches, k=2, solver="game")
    >>> es.metrics.subspace_error(game.V, exact.V) < 1e-2
    True
    """

    extra: int = 20
    rank: int | None = None
    half_life: float | None = None
    outlier: float | None = None
    opening: float = 2.0
    whole_spectrum: ClassVar[bool] = False
    has_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("extra", self.extra, least=0)
        check_count("rank", self.rank, none="for the default")
        check_half_life(self.half_life)
        if self.outlier is not None and not self.outlier > 1:
            raise ValueError(f"outlier={self.outlier!r}: give a multiple over 1 of the mean squared norm, or None")
        if not self.opening >= 0:
            raise ValueError(f"opening={self.opening!r}: give a number of at least 0")

    def fewest_rows(self, problem: Problem) -> int:
        """The smallest batch a step can use."""
        return problem.for_game().fewest_rows(_in_parts(problem))

    def players(self, d: int, k: int) -> int:
        """The number of players; ``d`` where products with all dimensions cost little more than three blocks."""
        K = min(k + self.extra, d)
        return d if d <= ALL * K else K

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> GameState:
        """The state before the first step; ``batch`` gives shapes only."""
        template = problem.template(batch)
        d = players.size(template)
        K = self.players(d, k)
        problem = problem.for_game(averaged=d == K)
        # With K = d start from unit vectors: mixing columns of unequal units would cost digits.
        V = players.normal(key, K, template) if d > K else players.units(template)
        dtype = jax.tree.leaves(V)[0].dtype
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        # With K = d there are no directions E and W outside the span.
        tracked, total = (2 * K, 3 * K) if d > K else (K, K)

        def products(count: int) -> tuple[Tree, Tree]:
            return players.blank(count, template), None if problem.diagonal_only else players.blank(count, template)

        return GameState(
            players.stack(V, players.blank(total - K, template)),
            *products(tracked),
            N=jnp.zeros((tracked, tracked), dtype),
            gathered=Gathered(zero, *products(total)),
            metric=self._start_metric(problem, batch),
            memory=problem.start(batch),
            lam=jnp.zeros(K, dtype),
            size=zero,
            kappa=zero,
            noise=jnp.zeros(K, dtype),
            preconditioned_residuals=jnp.ones(k, dtype),
            floors=jnp.zeros(k, dtype),
            rows_known=zero,
            rows_since_sketch=zero,
            rows_to_next_move=jnp.full((), 2 * K, dtype),
            heldout=HeldOut.empty(k, dtype),
            first_pass=jnp.array(True),
            gains=jnp.full(GAINS, jnp.nan, dtype),
            step=count,
            moves=count,
            rank=count,
            refused=count,
            restarts=count,
            failed=jnp.array(False),
        )

    def _start_metric(self, problem: Problem, batch: Tree) -> Any:
        template = problem.template(batch)
        zero = jnp.zeros((), jax.tree.leaves(template)[0].dtype)
        if problem.noiseless:
            return Diagonal(problem.diagonal((), batch), zero, zero)
        if problem.diagonal_only:
            ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), template)
            return Diagonal(ones, zero, zero if problem.orthonormal else zero + 1)
        blocks = problem.blocks(template)
        return tuple(Sketch.empty(block, self._rank(players.size(block)), problem.ridge) for block in blocks)

    def _rank(self, d: int) -> int:
        return min(self.rank or (RANK if d > WHOLE else d), d)

    def step(self, problem: Problem, state: GameState, batch: Tree) -> tuple[GameState, Info]:
        """Multiply one batch; move once enough rows are gathered."""

        def moved(state: GameState) -> GameState:
            updated = partial(self.update_sketch, problem)
            return self.move(problem, jax.lax.cond(self.sketch_is_due(state), updated, lambda s: s, state))

        state = self.gather(problem, state, batch)
        ready = problem.noiseless | (state.gathered.rows >= state.rows_to_next_move)
        state = jax.lax.cond(ready, moved, lambda s: s, state)
        return state, self.info(problem, state)

    def info(self, problem: Problem, state: GameState) -> Info:
        """Eigenvalues and residuals of the leading players by their tracked products."""
        V, AV, BV = self._leading(state)
        lam = state.lam[: state.k]
        return Info(lam, residuals(V, AV, BV, lam))

    def _leading(self, state: GameState) -> tuple[Tree, Tree, Tree]:
        """The ``k`` leading players and their products with ``A`` and ``B``."""
        V, AV = (players.take(M, 0, state.k) for M in (state.S, state.MA))
        return V, AV, state.metric.exact(V) if state.MB is None else players.take(state.MB, 0, state.k)

    def observe(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Update the means with a batch and queue its rows for the sketches."""
        problem, b = problem.for_game(state.plays_all), views.n_rows(batch)
        memory = problem.observe(self._faded(state.memory), batch)
        if problem.diagonal_only:
            metric: Any = state.metric.observe(problem.diagonal(memory, batch), b, memory_rows(self.half_life))
        else:
            blocks = problem.metric_rows(memory, batch)
            metric = tuple(sketch.keep(x) for sketch, x in zip(state.metric, blocks, strict=True))
        return state._replace(memory=memory, metric=metric, step=state.step + 1)

    def multiply(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Add the products of observed rows with the players, which do not move."""
        return state._replace(gathered=players.add(state.gathered, self._products(problem, state, batch)))

    def multiply_exactly(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """`multiply` for rows that are kept: without sampling noise, the rounding of short products would show."""
        with jax.default_matmul_precision("highest"):
            return self.multiply(problem, state, batch)

    def gather(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Observe a batch and multiply it; score the players on its rows if this is their first pass."""
        if problem.noiseless:
            return state._replace(gathered=self._products(problem, state, None), step=state.step + 1)
        state = self.observe(problem, state, batch)
        new = self._products(problem, state, batch)
        scored = state.heldout.add(*scores(state, new))
        heldout = jax.tree.map(lambda new, old: jnp.where(state.first_pass, new, old), scored, state.heldout)
        return state._replace(gathered=players.add(state.gathered, new), heldout=heldout)

    def validate(self, problem: Problem, state: GameState, batch: Tree) -> jax.Array:
        """``⟨v, A v⟩`` and ``⟨v, B v⟩`` of the leading players, summed over the rows of a batch."""
        leading = state._replace(S=players.take(state.S, 0, state.k))
        return jnp.stack(scores(leading, self._products(problem, leading, batch)))

    def _products(self, problem: Problem, state: GameState, batch: Tree) -> Gathered:
        """Sums of products over the rows of a batch; given matrices count as one row."""
        problem = problem.for_game(state.plays_all)
        b = jnp.ones_like(state.rows_to_next_move) * (1 if problem.noiseless else views.n_rows(batch))
        # Sampling noise exceeds the rounding of any precision; given matrices have none.
        with jax.default_matmul_precision("highest") if problem.noiseless else nullcontext():
            pairs = problem.signed_estimate(state.memory, batch, state.S, _in_parts(problem))
        A = players.mean([p.AV for p, _ in pairs])
        B = None if problem.diagonal_only else players.mean([q.BV for _, q in pairs])
        return Gathered(b, players.scale(b, A), players.scale(b, B))

    def _faded(self, memory: Tree) -> Tree:
        """The problem's running means with their row counts capped at the memory of ``half_life``."""
        if self.half_life is None or memory == ():
            return memory
        limit = memory_rows(self.half_life)
        if isinstance(memory, views.Mean):
            return memory._replace(rows=jnp.minimum(memory.rows, int(min(limit, 2**31 - 1))))
        total = memory.counts.sum()
        return memory._replace(counts=memory.counts * jnp.minimum(1, limit / jnp.maximum(total, 1)))

    def sketch_is_due(self, state: GameState) -> jax.Array:
        """Whether the sketches are due to be updated with their queued rows."""
        if isinstance(state.metric, Diagonal):
            return jnp.array(False)
        since, first = state.rows_since_sketch + state.gathered.rows, state.metric[0]
        return (first.waiting > 0) & (
            (first.updates < EARLY) | (since >= (GROWTH - 1) * (state.rows_known - state.rows_since_sketch))
        )

    def update_sketch(self, problem: Problem, state: GameState) -> GameState:
        """Update the sketches with their queued rows."""
        if isinstance(state.metric, Diagonal):
            return state
        metric = tuple(sketch.update(memory_rows(self.half_life)) for sketch in state.metric)
        return state._replace(metric=metric, rows_since_sketch=-state.gathered.rows)

    def move(self, problem: Problem, state: GameState, whole: Any = False) -> GameState:
        """Move all players once; ``whole``: the rows gathered are all there are."""
        return move_players(problem, state, self.half_life, whole)

    def order(self, state: GameState) -> np.ndarray:
        """The leading players in descending order of eigenvalue: noise may have swapped neighbours."""
        return np.argsort(-np.asarray(state.lam)[: state.k], kind="stable")

    def eigenpairs(self, problem: Problem, state: GameState) -> tuple[np.ndarray, Tree]:
        """Eigenvalues and the leading players, with ``⟨v, B v⟩ = 1`` and deterministic signs.

        The eigenvalues are ``⟨v, A v⟩ / (⟨v, B v⟩ + κ N)``: without ``κ N`` they would be too large by about that.
        """
        V, _, BV = self._leading(state)
        V, BV = (jax.tree.map(np.asarray, M) for M in (V, BV))
        norms = np.maximum(np.asarray(players.dot(V, BV), np.float64), np.finfo(np.float32).tiny)
        lam, order = np.asarray(state.lam, np.float64)[: state.k], self.order(state)
        V = players.scale((1 / np.sqrt(norms)).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam[order], fix_signs(jax.tree.map(lambda v: v[order], V))


def _in_parts(problem: Problem) -> bool:
    """Whether the factors of a product within ``A`` need parts of the batch that share no row."""
    return problem.shares != (1, 1)

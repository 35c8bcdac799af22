"""The accelerated game: the paper's players with tracked products and a preconditioner, and nothing left to tune.

Each player has a vector ``v``, running estimates of ``A v`` and ``B v`` and a search direction ``w``: the paper's
direction, preconditioned. Rows are multiplied with all of these held fixed; then the players move to the best vectors
in the common span. ``docs/accelerated.md`` derives each line.

    S = [V, W]
    M ← M + (N + R)⁻¹N (A_t V - M)                 correct the tracked products by the new rows; B alike
    V ← argmax over c S of  c (S MAᵀ) cᵀ - doubt   subject to   c (S MBᵀ + κ N) cᵀ = 1
    W ← P⁻¹ (rewards - penalties of V)

``N`` is the noise in ``M`` and ``R = S B Sᵀ / rows`` that of the new rows, in units of ``κ``, the noise of one row.
A pass over rows that were read before has no noise: `Game.reread` prepares the state, and each move takes a pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
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
from eigenstream.solvers.game.move import move_players, unknown
from eigenstream.solvers.game.preconditioner import Diagonal, Sketch
from eigenstream.solvers.game.state import GameState, Gathered
from eigenstream.solvers.game.verdict import HeldOut
from eigenstream.solvers.schedules import check_half_life, memory_rows
from eigenstream.solvers.stochastic import Info, residuals

#: The largest rank of a sketch by default.
RANK = 1024
#: Extra players by default: half of the components, within these limits.
FEWEST, MOST = 40, 100
#: Gains of the last moves that are kept.
GAINS = 3
#: Vectors as long as a player that each player has in a stream.
LONG = 8


@dataclass(frozen=True, kw_only=True)
class Game:
    """The accelerated game: no learning rate, and no setting that has a unit.

    Scaling the columns, each by its own factor, does not change the result. Memory is ``O(d (k + extra + rank))``.

    Parameters
    ----------
    extra : int, optional
        Players beyond the ``k`` asked for; they speed up convergence. Default: half of ``k``, from 40 to 100.
    rank : int, optional
        Leading directions of all rows that the preconditioner keeps, up to half of the columns. Default: what
        ``memory_budget`` has room for; if it has room for exact sums, these are solved in the place of a game.
    half_life : float, optional
        Rows after which the weight of a row has halved. None: all rows weigh the same.
    outlier : float, optional
        Scale rows down to this many times the mean squared norm, and report them. Default: rows are taken as they are,
        as by every solver.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(6000, 200)) / np.arange(1, 201) ** 0.5
    >>> batches = np.split(X, 60)
    >>> exact = es.solve(es.problems.pca(), batches, k=2, solver="exact")
    >>> game = es.solve(es.problems.pca(), batches, k=2, solver=es.solvers.Game(rank=50))
    >>> es.metrics.subspace_error(game.V, exact.V) < 1e-2
    True
    """

    extra: int | None = None
    rank: int | None = None
    half_life: float | None = None
    outlier: float | None = None
    whole_spectrum: ClassVar[bool] = False
    has_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("extra", self.extra, least=0, none="for the default")
        check_count("rank", self.rank, none="for the default")
        check_half_life(self.half_life)
        if self.outlier is not None and not self.outlier > 1:
            raise ValueError(f"outlier={self.outlier!r}: give a multiple over 1 of the mean squared norm, or None")

    def fewest_rows(self, problem: Problem) -> int:
        """The smallest batch a step can use."""
        return problem.for_game().fewest_rows(_in_parts(problem))

    def players(self, d: int, k: int) -> int:
        """The number of players; with as many search directions they fit in the ``d`` columns of the smallest part."""
        extra = min(max(k // 2, FEWEST), MOST) if self.extra is None else self.extra
        return max(min(k, d), min(k + extra, d // 4))

    def rank_within(self, budget: float, d: int, k: int) -> int:
        """The largest rank whose state takes at most ``budget`` bytes, for ``d`` columns.

        The inner products of more than RANK rows would take longer than the products with the players.
        """
        # 4 (2 r d + 3 r² + LONG K d) bytes: directions and their products, inner products and their factors.
        room = budget / 4 - LONG * self.players(d, k) * d
        return max(1, min(RANK, (d - 1) // 2, int((max(d * d + 3 * room, 0) ** 0.5 - d) / 3)))

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> GameState:
        """The state before the first step; ``batch`` gives shapes only."""
        template = problem.template(batch)
        K = self.players(min(map(players.size, problem.parts(template))), k)
        problem = problem.for_game()
        metric = self._start_metric(problem, batch)
        V = players.normal(key, K, template)
        dtype = jax.tree.leaves(V)[0].dtype
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)

        def products(count: int) -> tuple[Tree, Tree]:
            return players.blank(count, template), None if problem.diagonal_only else players.blank(count, template)

        scored = min(k, metric.sizes.scored, K - 1)
        state = GameState(
            players.stack(V, players.blank(K + scored, template)),
            *products(K),
            N=jnp.zeros((len(problem.parts(V)), K, K), dtype),
            gathered=Gathered(zero, *products(2 * K + scored)),
            metric=metric,
            memory=problem.start(batch),
            lam=jnp.zeros(K, dtype),
            size=zero,
            kappa=zero,
            noise=jnp.zeros(K, dtype),
            own=zero,
            preconditioned_residuals=jnp.ones(k, dtype),
            floors=jnp.zeros(k, dtype),
            rows_known=zero,
            rows_to_next_move=jnp.full((), max(2 * K, metric.sizes.rank), dtype),
            cover=zero,
            heldout=HeldOut.empty(k, dtype),
            gains=jnp.full(GAINS, jnp.nan, dtype),
            step=count,
            moves=count,
            rank=count,
            refused=count,
            failed=jnp.array(False),
        )
        return self.reread(problem, state) if problem.noiseless else state

    def reread(self, problem: Problem, state: GameState) -> GameState:
        """Prepare for passes over rows that were read before: nothing new is observed, and each move takes a pass."""
        if state.exact:
            return state
        # In place of what is to be scored: more search directions, and those that players came from.
        return self._with_span(state, [len(state.lam)] * state.metric.sizes.ways)._replace(gains=unknown(state.gains))

    def reopen(self, problem: Problem, state: GameState) -> GameState:
        """Prepare for new rows after such passes."""
        # The products are those of all rows: their noise is that of the mean of so many.
        level = jnp.eye(len(state.lam), dtype=state.N.dtype) / jnp.maximum(state.rows_known, 1) / len(state.N)
        return self._with_span(state, [_scored(state)])._replace(N=jnp.broadcast_to(level, state.N.shape))

    def _with_span(self, state: GameState, blank: list[int]) -> GameState:
        """The state with zeros after the players and the search directions, and nothing gathered."""
        K = len(state.lam)

        def cut(M: Tree) -> Tree:
            if M is None:
                return None
            none = [players.zeros_in_place(players.take(M, 0, count), state.step) for count in blank]
            return players.stack(players.take(M, 0, 2 * K), *none)

        gathered = Gathered(state.size, *map(cut, state.gathered[1:]))
        return state._replace(S=cut(state.S), gathered=players.zeros_in_place(gathered, state.step))

    def _start_metric(self, problem: Problem, batch: Tree) -> Any:
        template = problem.template(batch)
        zero = jnp.zeros((), jax.tree.leaves(template)[0].dtype)
        if problem.noiseless:
            return Diagonal(problem.diagonal((), batch), zero, zero)
        if problem.diagonal_only:
            ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), template)
            return Diagonal(ones, zero, zero if problem.orthonormal else zero + 1)
        blocks, rank = problem.blocks(template), self.rank or RANK
        return Sketch.empty(blocks, rank, problem.ridge)

    def step(self, problem: Problem, state: GameState, batch: Tree) -> tuple[GameState, Info]:
        """Multiply one batch; move once enough rows are gathered."""
        state = self.gather(problem, state, batch)
        ready = problem.noiseless | (state.gathered.rows >= state.rows_to_next_move)
        state = jax.lax.cond(ready, lambda s: self.move(problem, s), lambda s: s, state)
        return state, self.info(problem, state)

    def info(self, problem: Problem, state: GameState) -> Info:
        """Eigenvalues and residuals of the leading players by their tracked products."""
        V, AV, BV = self._leading(state)
        lam = state.lam[: state.k]
        return Info(lam, residuals(V, AV, BV, lam))

    def _leading(self, state: GameState) -> tuple[Tree, Tree, Tree]:
        """The ``k`` leading players and their products with ``A`` and ``B``."""
        V, AV = (players.take(M, 0, state.k) for M in (state.S, state.MA))
        return V, AV, state.metric.times(V) if state.MB is None else players.take(state.MB, 0, state.k)

    def gather(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Add the products of a batch; in a first pass learn its means, score the players on it and queue its rows."""
        new_step = state.step + 1
        if problem.noiseless:
            return state._replace(gathered=self._products(problem, state, None), step=new_step)
        if state.exact:
            # Sampling noise, which hides the rounding of short products, is gone.
            with jax.default_matmul_precision("highest"):
                new = self._products(problem, state, batch)
            return state._replace(gathered=players.add(state.gathered, new), step=new_step)
        state = self._observe(problem.for_game(), state, batch)
        new = self._products(problem, state, batch)
        heldout = state.heldout.add(*scores(state, new, 0, state.k))
        return state._replace(gathered=players.add(state.gathered, new), heldout=heldout, step=new_step)

    def _observe(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        b, horizon = views.n_rows(batch), memory_rows(self.half_life)
        memory = problem.observe(self._faded(state.memory), batch)
        if problem.diagonal_only:
            metric: Any = state.metric.observe(problem.diagonal(memory, batch), b, horizon)
        else:
            rows = problem.metric_rows(memory, batch)
            metric = state.metric.observe(rows, horizon)

            def standardised(S: Tree) -> Tree:
                return problem.joined(jax.tree.map(jnp.divide, problem.blocks(S), metric.deviations()))

            # The first players are drawn for columns of unit variance, so that units do not matter.
            state = state._replace(S=jax.lax.cond(state.step == 0, standardised, lambda S: S, state.S))
        return state._replace(memory=memory, metric=metric)

    def _products(self, problem: Problem, state: GameState, batch: Tree) -> Gathered:
        """Sums of products over the rows of a batch; given matrices count as one row."""
        problem = problem.for_game()
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

    def move(self, problem: Problem, state: GameState) -> GameState:
        """Move all players once."""
        return move_players(problem, state, self.half_life)

    def order(self, state: GameState) -> np.ndarray:
        """The leading players in descending order of eigenvalue: noise may have swapped neighbours."""
        return np.argsort(-np.asarray(state.lam)[: state.k], kind="stable")

    def eigenpairs(self, problem: Problem, state: GameState) -> tuple[np.ndarray, Tree]:
        """Eigenvalues and the leading players, with ``⟨v, B v⟩ = 1`` and deterministic signs.

        They are ``⟨v, A v⟩ / (⟨v, B v⟩ + κ N)`` with the players' own ``κ``: without it they would be too large.
        """
        V, _, BV = self._leading(state)
        V, BV = (jax.tree.map(np.asarray, M) for M in (V, BV))
        norms = np.maximum(np.asarray(players.dot(V, BV), np.float64), np.finfo(np.float32).tiny)
        lam, order = np.asarray(state.lam, np.float64)[: state.k], self.order(state)
        V = players.scale((1 / np.sqrt(norms)).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam[order], fix_signs(jax.tree.map(lambda v: v[order], V))


def _scored(state: GameState) -> int:
    """How many eigenvectors of the sketch a stream scores."""
    return min(state.k, state.metric.sizes.scored, len(state.lam) - 1)


def _in_parts(problem: Problem) -> bool:
    """Whether the factors of a product within ``A`` need parts of the batch that share no row."""
    return problem.shares != (1, 1)

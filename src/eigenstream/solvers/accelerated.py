"""The accelerated game: the paper's players, with nothing left to tune.

A player has a vector ``v``, the products ``A v`` and ``B v`` with all rows so far, the direction ``e`` it last came
from, and the direction ``w`` it would go: the paper's, preconditioned. Rows are gathered with all of these held fixed;
then the players move to the best vectors in their common span. ``docs/accelerated.md`` derives each line.

    S = [V, E, W]
    M ← M + (N + R)⁻¹N (A_t S - M)            what was known of A V and A E, corrected by the rows gathered; B alike
    V ← argmax over c S of  c (S MAᵀ) cᵀ - doubt   subject to   c (S MBᵀ + κ N) cᵀ = 1
    W ← P⁻¹ (rewards less penalties of V)

``N`` is the noise in ``M`` and ``R = S B Sᵀ / rows`` that of the rows gathered, in units of ``κ``, the noise of a row.
The players wait for about ``√(κ T)`` rows after ``T``: fewer would move them by noise, more would waste rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import rows, trees
from eigenstream.eigenpairs import fix_signs
from eigenstream.problems.base import Problem, Products
from eigenstream.small import largest_quotient, orthogonal, small_eigh, whitening
from eigenstream.solvers import tracking
from eigenstream.solvers.game import direction
from eigenstream.solvers.knowing import HeldOut
from eigenstream.solvers.metric import Diagonal, Sketch
from eigenstream.solvers.schedules import check_half_life
from eigenstream.solvers.stochastic import Info
from eigenstream.solvers.tracking import CUTOFF, GameState, Gathered, Known

Tree = Any

#: Moves are this much (squared) more frequent than one in √(κ T) rows, where residuals stand out of their noise; in
#: proportion less where they do not, down to a share.
PACE, UNCLEAR = 4.0, 0.2
#: By how many deviations of its noise an eigenvalue within the span is taken for less than it seems.
DOUBT = 0.5
#: At least so much of a player's length is taken not to be noise.
CLEAR = 0.1
#: A sketch is updated at each move until it was so many times, then whenever rows have grown by this factor.
EARLY, GROWTH = 6, 1.35
#: Blocks of up to this dimension are sketched whole where no rank is asked for; larger ones by so many directions.
WHOLE, RANK = 1024, 384
#: All play where the dimension is at most so many times the players there would be.
ALL = 8
#: How much of the held-out scores before a move still counts after it.
KEPT = 0.7
#: Gains of the last moves that are remembered.
GAINS = 16


@dataclass(frozen=True, kw_only=True)
class Game:
    """The accelerated γ-EigenGame: one pass and no learning rate.

    Memory is ``O(d (k + extra + rank))``. No setting has a unit: scaling the data changes nothing.

    Parameters
    ----------
    extra : int
        Players beyond those asked for, which make these converge faster.
    rank : int, optional
        Rank of the sketch of each block of ``B`` that preconditions the moves; left out, 384, or all of a block of no
        more than 1,024 dimensions.
    half_life : float, optional
        Rows after which a row counts half; None: all count alike.
    outlier : float
        A row of more than so many times the mean energy is scaled down to that, counted and reported.

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
    outlier: float = 100.0

    def __post_init__(self) -> None:
        for name, least in (("extra", 0), ("rank", 1)):
            value = getattr(self, name)
            if value is None and name == "rank":
                continue
            if not (isinstance(value, int | np.integer) and value >= least):
                raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
        check_half_life(self.half_life)
        if not self.outlier > 1:
            raise ValueError(f"outlier={self.outlier!r}: give a number over 1, or np.inf to take rows as they are")

    @property
    def _horizon(self) -> float:
        """The rows that a memory of this half-life amounts to."""
        return np.inf if self.half_life is None else self.half_life / np.log(2)

    def fewest_rows(self, problem: Problem) -> int:
        """The smallest batch a step can use."""
        return problem.by_running_mean().fewest_rows(_in_parts(problem))

    def players(self, d: int, k: int) -> int:
        """How many play; all of ``d`` where that is little more to multiply than three blocks, and exact."""
        K = min(k + self.extra, d)
        return d if d <= ALL * K else K

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> GameState:
        """The state before the first step; ``batch`` gives shapes only."""
        template = problem.template(batch)
        d = trees.size(template)
        K = self.players(d, k)
        problem = problem.by_running_mean(averaged=d == K)
        # All of them begin as coordinates, whatever the units of each: mixing them would cost digits.
        V = trees.normal(key, K, template) if d > K else trees.units(template)
        dtype = jax.tree.leaves(V)[0].dtype
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        # Players that span everything have nowhere to come from and nowhere to go.
        tracked, total = (2 * K, 3 * K) if d > K else (K, K)

        def products(count: int) -> tuple[Tree, Tree]:
            return trees.blank(count, template), None if problem.diagonal_only else trees.blank(count, template)

        return GameState(
            trees.stack(V, trees.blank(total - K, template)),
            *products(tracked),
            N=jnp.zeros((tracked, tracked), dtype),
            gathered=Gathered(zero, *products(total)),
            metric=self._start_metric(problem, batch),
            memory=problem.start(batch),
            lam=jnp.zeros(K, dtype),
            size=zero,
            kappa=zero,
            noise=jnp.zeros(K, dtype),
            residuals=jnp.ones(k, dtype),
            floors=jnp.zeros(k, dtype),
            known=zero,
            sketched=zero,
            due=jnp.full((), 2 * K, dtype),
            held=HeldOut.empty(k, dtype),
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
        return tuple(Sketch.empty(block, self._rank(trees.size(block)), problem.ridge) for block in blocks)

    def _rank(self, d: int) -> int:
        return min(self.rank if self.rank is not None else RANK if d > WHOLE else d, d)

    def step(self, problem: Problem, state: GameState, batch: Tree) -> tuple[GameState, Info]:
        """Learn from one batch, and move once enough rows are gathered."""

        def moved(state: GameState) -> GameState:
            return self.move(problem, jax.lax.cond(self.is_to_learn(state), self.learn, lambda s: s, state))

        state = self.gather(problem, state, batch)
        ready = problem.noiseless | (state.gathered.rows >= state.due)
        state = jax.lax.cond(ready, moved, lambda s: s, state)
        return state, self.info(state)

    def info(self, state: GameState) -> Info:
        return Info(state.lam[: len(state.residuals)], state.residuals)

    # Rows.

    def observe(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Take the rows of a batch into the means and, to be learned, into the sketches."""
        problem, b = problem.by_running_mean(state.plays_all), rows.n_rows(batch)
        memory = problem.observe(self._faded(state.memory), batch)
        if problem.diagonal_only:
            metric: Any = state.metric.observe(problem.diagonal(memory, batch), b, self._horizon)
        else:
            views = problem.metric_rows(memory, batch)
            metric = tuple(sketch.keep(view) for sketch, view in zip(state.metric, views, strict=True))
        return state._replace(memory=memory, metric=metric, step=state.step + 1)

    def multiply(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Add the products of observed rows with the players, who stand still."""
        return state._replace(gathered=trees.add(state.gathered, self._products(problem, state, batch)))

    def gather(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Observe a batch, multiply it and, where its rows are new, score the players on it."""
        if problem.noiseless:
            return state._replace(gathered=self._products(problem, state, None), step=state.step + 1)
        state = self.observe(problem, state, batch)
        new = self._products(problem, state, batch)
        scored = state.held.add(*tracking.scores(state, new))
        held = jax.tree.map(lambda new, old: jnp.where(state.first_pass, new, old), scored, state.held)
        return state._replace(gathered=trees.add(state.gathered, new), held=held)

    def judge(self, problem: Problem, state: GameState, batch: Tree) -> jax.Array:
        """``⟨v, A v⟩`` and ``⟨v, B v⟩`` of the leading players, summed over the rows of a batch."""
        leading = state._replace(S=trees.part(state.S, 0, len(state.residuals)))
        return jnp.stack(tracking.scores(leading, self._products(problem, leading, batch)))

    def _products(self, problem: Problem, state: GameState, batch: Tree) -> Gathered:
        """Sums over the rows of a batch; what is given without rows counts as one."""
        problem = problem.by_running_mean(state.plays_all)
        b = jnp.ones_like(state.due) * (1 if problem.noiseless else rows.n_rows(batch))
        # Rows have more noise than products of any precision; given matrices have none.
        with jax.default_matmul_precision("highest") if problem.noiseless else nullcontext():
            pairs = problem.estimate(state.memory, batch, state.S, _in_parts(problem))
        A = trees.mean([p.AV for p, _ in pairs])
        B = None if problem.diagonal_only else trees.mean([q.BV for _, q in pairs])
        return Gathered(b, trees.scale(b, A), trees.scale(b, B))

    def _faded(self, memory: Tree) -> Tree:
        """What the problem remembers, as of no more rows than are to be remembered."""
        if self.half_life is None or memory == ():
            return memory
        if isinstance(memory, rows.Mean):
            return memory._replace(rows=jnp.minimum(memory.rows, int(min(self._horizon, 2**31 - 1))))
        total = memory.counts.sum()
        return memory._replace(counts=memory.counts * jnp.minimum(1, self._horizon / jnp.maximum(total, 1)))

    def is_to_learn(self, state: GameState) -> jax.Array:
        """Whether it is time for the sketches to learn the rows that wait for them."""
        if isinstance(state.metric, Diagonal):
            return jnp.array(False)
        since, first = state.sketched + state.gathered.rows, state.metric[0]
        return (first.waiting > 0) & (
            (first.updates < EARLY) | (since >= (GROWTH - 1) * (state.known - state.sketched))
        )

    def learn(self, state: GameState) -> GameState:
        """Let the sketches learn the rows that wait for them."""
        if isinstance(state.metric, Diagonal):
            return state
        metric = tuple(sketch.update(self._horizon) for sketch in state.metric)
        return state._replace(metric=metric, sketched=-state.gathered.rows)

    # Moves.

    def move(self, problem: Problem, state: GameState, whole: Any = False) -> GameState:
        """Correct what is known by the rows gathered, and let the players move.

        ``whole`` says that those are all rows there are: their products have no noise, and nothing before counts.
        """
        with jax.default_matmul_precision("highest"):
            new = self._moved(problem.by_running_mean(state.plays_all), state, jnp.asarray(whole) | problem.noiseless)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((new.S, new.MA, new.MB, new.N))]).all()
        # A move not taken leaves the players where they stand; the rows gathered are gone in either case.
        stay = state._replace(refused=state.refused + 1, failed=state.moves == 0)
        moved = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, stay)
        # Products of what is given without rows are not added to.
        return moved if problem.noiseless else moved._replace(gathered=state.gathered.emptied())

    def _moved(self, problem: Problem, state: GameState, whole: jax.Array) -> GameState:
        K, k, L = len(state.lam), len(state.residuals), len(state.N)
        P = tracking.Blocks(problem, state.metric)
        known = tracking.known(problem, state, P, self.half_life, whole)

        # Rayleigh and Ritz, in doubt of what noise there is.
        found = self._ritz(problem, state, known)
        J = jnp.concatenate([found.C, found.came], axis=1)
        S, MA, MB, PS = (trees.combine(J.T, M) for M in (state.S, known.MA, known.MB, known.PS))
        noisy = J.T @ known.N @ J
        V, AV, BV = (trees.part(M, 0, K) for M in (S, MA, MB))

        # The paper's direction, of the players found.
        tiny = jnp.finfo(noisy.dtype).tiny
        Bv = trees.add(BV, trees.scale(known.kappa * jnp.diag(noisy)[:K], trees.part(PS, 0, K)))
        norms = jnp.maximum(trees.dot(V, Bv), tiny)
        # Lengths with their noise: a sketch makes those of players outside it too long, the small problem does not.
        bare = trees.dot(V, BV)
        lengths = jnp.minimum(norms, jnp.maximum(bare + known.kappa * jnp.diag(noisy)[:K], tiny))
        bare = jnp.maximum(bare, CLEAR * lengths)
        rewards = trees.dot(V, AV)
        lam = jnp.where(jnp.arange(K) < found.rank, rewards / jnp.where(rewards > 0, lengths, bare), 0)
        shift = 0.0 if problem.positive else 2 * jnp.maximum(0, -lam.min())
        pair = Products(AV, Bv), Products(AV, Bv)
        g = trees.scale(1 / norms, direction(V, [pair], Bv, norms, shift))
        W = P.solve(g)
        steep = jnp.sqrt(jnp.maximum(trees.dot(g, W), 0))
        W = trees.scale(jnp.where(steep > 0, 1 / jnp.where(steep > 0, steep, 1), 0), W)
        # Out of the way of what is tracked, and of one another: rounding would not survive less.
        W = trees.subtract(W, trees.combine(trees.gram(W, MB), S))
        W = trees.combine(whitening(trees.gram(W, P.apply(W)), CUTOFF)[0].T, W)

        # What is left of noise, and how long to wait for the next move.
        N = jnp.where(whole & (not problem.noiseless), J.T @ known.R @ J, noisy)
        floors = jnp.sqrt(jnp.maximum(known.noise[:k] * jnp.diag(N)[:k], 0))
        clear = (steep[:k] ** 2).sum() / jnp.maximum((floors**2).sum(), tiny)
        wait = jnp.sqrt(known.kappa * known.rows / (PACE * jnp.clip(clear, UNCLEAR, 1)))
        if state.plays_all:
            # Nothing is found by moving often.
            wait = jnp.minimum(known.rows, self._horizon / 4)
        metric = state.metric
        if not isinstance(metric, Diagonal):
            metric = tuple(sketch.anew(known.restart) for sketch in metric)
        return state._replace(
            S=S if L == K else trees.stack(S, W),
            MA=MA,
            MB=None if problem.diagonal_only else MB,
            N=(N + N.T) / 2,
            metric=metric,
            lam=lam,
            size=found.size,
            kappa=known.kappa,
            noise=known.noise,
            residuals=steep[:k] / found.size,
            floors=floors / found.size,
            known=known.rows,
            sketched=jnp.where(whole, 0, state.sketched + state.gathered.rows),
            due=jnp.where(known.restart, 2 * K, jnp.maximum(2 * K, wait)),
            held=state.held.fade(jnp.where(whole | ~state.first_pass, 1, KEPT)),
            # A first move has nowhere else to go, and gains nothing by that.
            gains=jnp.append(state.gains[1:], jnp.where((state.moves == 0) | known.restart, jnp.nan, found.gained)),
            moves=state.moves + 1,
            rank=found.rank,
            failed=jnp.array(False),
            restarts=state.restarts + known.restart,
        )

    def _ritz(self, problem: Problem, state: GameState, known: Known) -> _Found:
        """The best vectors in the span, and where they came from."""
        K, k, L = len(state.lam), len(state.residuals), len(state.N)
        GA, GB = (tracking.symmetric(trees.gram(state.S, M), L) for M in (known.MA, known.MB))
        lengths = jnp.maximum(known.energy, jnp.finfo(GB.dtype).tiny)
        noise = known.kappa * known.N
        if state.plays_all:
            # Players where nothing varies have rounding for their products, and rounding has any quotient.
            some = jnp.diag(GB) > tracking.Blocks(problem, state.metric).rounding(state.S)
            GA, GB = (jnp.where(some & some[:, None], G, 0) for G in (GA, GB))
        size = largest_quotient(GA, GB + noise, CUTOFF)
        # Noise in the denominator must not raise an eigenvalue, as it would a negative one.
        lift = 0.0 if problem.positive else largest_quotient(GA, GB, CUTOFF)
        GA, GB = GA + lift * GB, GB + noise
        doubt = DOUBT * state.size * jnp.sqrt(K * jnp.maximum(jnp.diag(known.N), 0) / lengths) * jnp.diag(GB)
        GA = GA - jnp.diag(doubt)
        # Players that span everything go on to, also where no row has varied yet.
        ritz, C = small_eigh(GA, GB, CUTOFF, complete=state.plays_all)
        alone, _ = small_eigh(GA[:K, :K], GB[:K, :K], CUTOFF)
        C = C[:, :K]
        came = orthogonal(C.at[:K].set(0), C, GB, CUTOFF)[:, : L - K]
        total = jnp.abs(ritz[:k]).sum()
        gained = (ritz[:k].sum() - alone[:k].sum()) / jnp.where(total > 0, total, 1)
        return _Found(C, came, size, gained, (ritz > -jnp.inf).sum(dtype=state.rank.dtype))

    def order(self, state: GameState) -> np.ndarray:
        """Of the leading players, by their eigenvalues: noise may swap neighbours."""
        return np.argsort(-np.asarray(state.lam)[: len(state.residuals)], kind="stable")

    def eigenpairs(self, problem: Problem, state: GameState) -> tuple[np.ndarray, Tree]:
        """The leading players, ``⟨v, B v⟩ = 1``, with deterministic signs, and their eigenvalues.

        The Rayleigh quotients of players that have followed some noise are too large by about ``κ N``; those with it
        below are not.
        """
        k = len(state.residuals)
        V = trees.part(state.S, 0, k)
        BV = state.metric.exact(V) if state.MB is None else trees.part(state.MB, 0, k)
        V, BV = (jax.tree.map(np.asarray, M) for M in (V, BV))
        norms = np.maximum(np.asarray(trees.dot(V, BV), np.float64), np.finfo(np.float32).tiny)
        lam, order = np.asarray(state.lam, np.float64)[:k], self.order(state)
        V = trees.scale((1 / np.sqrt(norms)).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam[order], fix_signs(jax.tree.map(lambda v: v[order], V))


class _Found(NamedTuple):
    """Coordinates of the players within the span and of where they came from."""

    C: jax.Array
    came: jax.Array
    size: jax.Array
    gained: jax.Array
    rank: jax.Array


def _in_parts(problem: Problem) -> bool:
    """Whether factors within ``A`` must come from parts of the batch that share no row."""
    return problem.shares != (1, 1)

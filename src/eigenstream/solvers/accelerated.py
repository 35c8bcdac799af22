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

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import rows, trees
from eigenstream.eigenpairs import fix_signs
from eigenstream.lobpcg import small_eigh
from eigenstream.problems.base import Problem, Products
from eigenstream.solvers.exact import check_half_life
from eigenstream.solvers.game import direction
from eigenstream.solvers.knowing import HeldOut
from eigenstream.solvers.metric import Diagonal, Sketch
from eigenstream.solvers.stochastic import Info

Tree = Any

#: Moves are this much (squared) more frequent than one in √(κ T) rows.
PACE = 4.0
#: By how many deviations of its noise an eigenvalue within the span is taken for less than it seems.
DOUBT = 0.5
#: Directions of the span with a smaller share than this are rounding.
CUTOFF = 1e-5
#: A sketch is updated at each of its first moves, then whenever rows have grown by this factor.
EARLY, GROWTH = 6, 1.1
#: Rows whose variance along the players is out by this factor follow another law than those before.
CHANGED = 3.0
#: The least eigenvalue, relative to the largest, that noise is measured against.
OWN = 0.1
#: A row moves ``B v`` by ``κ ⟨v, B v⟩`` on average, which the rows gathered can only estimate: this share of the noise
#: is put at ``κ ⟨v, P v⟩`` instead.
GUARD = 0.3
#: Blocks of up to this dimension are sketched whole where no rank is asked for; larger ones by so many directions.
WHOLE, RANK = 1024, 384
#: How much of the held-out scores before a move still counts after it.
KEPT = 0.7
#: Gains of the last moves that are remembered.
GAINS = 16


class Gathered(NamedTuple):
    """Sums over the rows since the last move."""

    rows: jax.Array
    A: Tree
    B: Tree


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
    #: Rows behind the products, behind the sketches, and wanted before the next move.
    known: jax.Array
    sketched: jax.Array
    due: jax.Array
    held: HeldOut
    #: By how much the last moves raised the sum of the leading eigenvalues, relative to it.
    gains: jax.Array
    step: jax.Array
    moves: jax.Array
    #: Moves that were not taken, and times the rows were found to have changed.
    refused: jax.Array
    restarts: jax.Array
    failed: jax.Array


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

    extra: int = 32
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
        """How many play; all of ``d`` where three blocks would span everything anyway."""
        K = min(k + self.extra, d)
        return d if d <= 3 * K else K

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> GameState:
        """The state before the first step; ``batch`` gives shapes only."""
        problem = problem.by_running_mean()
        template = problem.template(batch)
        d = trees.size(template)
        K = self.players(d, k)
        V = trees.normal(key, K, template)
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
            gains=jnp.full(GAINS, jnp.nan, dtype),
            step=count,
            moves=count,
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
        state = self.gather(problem, state, batch)
        ready = state.gathered.rows >= state.due
        state = jax.lax.cond(ready, lambda s: self.move(problem, s), lambda s: s, state)
        return state, self.info(state)

    def info(self, state: GameState) -> Info:
        return Info(state.lam[: len(state.residuals)], state.residuals)

    def gather(self, problem: Problem, state: GameState, batch: Tree) -> GameState:
        """Add a batch's products with the players, who stand still."""
        problem = problem.by_running_mean()
        if problem.noiseless:
            A, B = _products(problem, (), None, state.S)
            B = None if problem.diagonal_only else B
            return state._replace(gathered=Gathered(state.due, A, B), step=state.step + 1)
        b, k = rows.n_rows(batch), len(state.residuals)
        memory = problem.observe(self._faded(state.memory), batch)
        A, B = _products(problem, memory, batch, state.S)
        if problem.diagonal_only:
            metric, B = state.metric.observe(problem.diagonal(memory, batch), b, self._horizon), None
        else:
            views = problem.metric_rows(memory, batch)
            metric = tuple(sketch.keep(view) for sketch, view in zip(state.metric, views, strict=True))
        V = trees.part(state.S, 0, k)
        BV = metric.exact(V) if B is None else trees.part(B, 0, k)
        total = jax.tree.map(lambda s, x: s + b * x, state.gathered, Gathered(jnp.ones(()), A, B))
        return state._replace(
            gathered=total,
            metric=metric,
            memory=memory,
            held=state.held.add(b * trees.dot(V, trees.part(A, 0, k)), b * trees.dot(V, BV)),
            step=state.step + 1,
        )

    def _faded(self, memory: Tree) -> Tree:
        """What the problem remembers, as of no more rows than are to be remembered."""
        if self.half_life is None or memory == ():
            return memory
        horizon = self._horizon
        if isinstance(memory, rows.Mean):
            return memory._replace(rows=jnp.minimum(memory.rows, int(horizon)))
        total = memory.counts.sum()
        return memory._replace(counts=memory.counts * jnp.minimum(1, horizon / jnp.maximum(total, 1)))

    def move(self, problem: Problem, state: GameState) -> GameState:
        """Learn from what was gathered, and let the players move."""
        with jax.default_matmul_precision("highest"):
            new = self._moved(problem.by_running_mean(), state)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((new.S, new.MA, new.MB, new.N))]).all()
        # A move not taken drops the rows gathered and leaves the players where they stand.
        nothing = jax.tree.map(jnp.zeros_like, state.gathered)
        stay = state._replace(gathered=nothing, refused=state.refused + 1, failed=state.moves == 0)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, stay)

    def _moved(self, problem: Problem, state: GameState) -> GameState:
        K, L, S = len(state.lam), len(state.N), state.S
        n = jnp.ones_like(state.due) if problem.noiseless else state.gathered.rows
        metric, sketched = self._learn_metric(problem, state)
        P = _Blocks(problem, metric)
        A, B = (trees.scale(1 / n, sums) for sums in state.gathered[1:])
        PS = P.apply(S)
        energy = trees.gram(S, PS)
        if B is not None:
            energy = GUARD * energy + (1 - GUARD) * trees.gram(S, B)
            energy = (energy + energy.T) / 2
        R = jnp.zeros_like(energy) if problem.noiseless else energy / n

        # A Kalman filter: what was known of the products, and what the rows gathered say.
        forget = 1.0 if self.half_life is None else 2 ** (n / self.half_life)
        N, fresh = forget * state.N, R[:L, :L]
        restart = self._changed(state, B)
        anew = (state.moves == 0) | restart | problem.noiseless
        noise, kappa = self._noise(problem, state, P, A, B, N, fresh, anew)
        gain = _gain(N, fresh, anew)
        MA = _corrected(gain, state.MA, A)
        MB = metric.exact(S) if problem.diagonal_only else _corrected(gain, state.MB, B)
        N = _noise_after(gain, jnp.where(anew, 0, N), R)

        # Rayleigh and Ritz, in doubt of what noise there is.
        GA, GB = _symmetric(trees.gram(S, MA), L), _symmetric(trees.gram(S, MB), L)
        lengths = jnp.maximum(jnp.diag(energy), jnp.finfo(GB.dtype).tiny)
        size = _largest_quotient(GA, GB + kappa * N)
        # Noise in the denominator must not raise an eigenvalue, as it would a negative one.
        lift = 0.0 if problem.positive else _largest_quotient(GA, GB)
        GA, GB = GA + lift * GB, GB + kappa * N
        doubt = DOUBT * state.size * jnp.sqrt(K * jnp.maximum(jnp.diag(N), 0) / lengths) * jnp.diag(GB)
        ritz, C = small_eigh(GA - jnp.diag(doubt), GB, CUTOFF)
        alone, _ = small_eigh((GA - jnp.diag(doubt))[:K, :K], GB[:K, :K], CUTOFF)
        C = C[:, :K]
        came = _orthogonal(C.at[:K].set(0), C, GB)[:, : L - K]
        J = jnp.concatenate([C, came], axis=1)
        S, MA, MB, PS = (trees.combine(J.T, M) for M in (S, MA, MB, PS))
        N = J.T @ N @ J
        V, AV, BV = (trees.part(M, 0, K) for M in (S, MA, MB))

        # The paper's direction, of the players found.
        Bv = trees.add(BV, trees.scale(kappa * jnp.diag(N)[:K], trees.part(PS, 0, K)))
        norms = jnp.maximum(trees.dot(V, Bv), jnp.finfo(N.dtype).tiny)
        bare = jnp.maximum(trees.dot(V, BV), jnp.finfo(N.dtype).tiny)
        lam = jnp.where(trees.dot(V, AV) > 0, trees.dot(V, AV) / norms, trees.dot(V, AV) / bare)
        shift = 0.0 if problem.positive else 2 * jnp.maximum(0, -lam.min())
        pair = Products(AV, Bv), Products(AV, Bv)
        g = trees.scale(1 / norms, direction(V, [pair], Bv, norms, shift))
        W = P.solve(g)
        steep = jnp.sqrt(jnp.maximum(trees.dot(g, W), 0))
        W = trees.scale(jnp.where(steep > 0, 1 / jnp.where(steep > 0, steep, 1), 0), W)
        # Out of the way of what is tracked, and of one another: rounding would not survive less.
        W = trees.subtract(W, trees.combine(trees.gram(W, MB), S))
        W = trees.combine(_whitening(trees.gram(W, P.apply(W))).T, W)
        k = len(state.residuals)
        known = state.known / forget * jnp.where(anew, 0, 1) + n
        total = jnp.abs(ritz[:k]).sum()
        gained = (ritz[:k].sum() - alone[:k].sum()) / jnp.where(total > 0, total, 1)
        return state._replace(
            S=S if L == K else trees.stack(S, W),
            MA=MA,
            MB=None if problem.diagonal_only else MB,
            N=(N + N.T) / 2,
            gathered=jax.tree.map(jnp.zeros_like, state.gathered),
            metric=metric,
            lam=lam,
            size=size,
            kappa=kappa,
            noise=noise,
            residuals=steep[:k] / size,
            floors=jnp.sqrt(jnp.maximum(noise[:k] * jnp.diag(N)[:k], 0)) / size,
            known=known,
            sketched=sketched,
            due=jnp.maximum(2 * K, jnp.sqrt(kappa * known / PACE)),
            held=state.held.fade(KEPT),
            gains=jnp.append(state.gains[1:], gained),
            moves=state.moves + 1,
            restarts=state.restarts + restart,
        )

    def _learn_metric(self, problem: Problem, state: GameState) -> tuple[Any, jax.Array]:
        """The sketches with the rows that wait for them, where it is time."""
        if not isinstance(state.metric, tuple) or isinstance(state.metric, Diagonal):
            return state.metric, state.sketched
        seen = state.known + state.gathered.rows
        due = (state.moves < EARLY) | (seen >= GROWTH * state.sketched)
        updated = jax.lax.cond(
            due, lambda m: tuple(sketch.update(self._horizon) for sketch in m), lambda m: m, state.metric
        )
        return updated, jnp.where(due, seen, state.sketched)

    def _changed(self, state: GameState, B: Tree) -> jax.Array:
        """Whether the rows gathered vary along the players by far more or less than those before."""
        if B is None:
            return jnp.array(False)
        K = len(state.lam)
        V = trees.part(state.S, 0, K)
        now, before = (trees.dot(V, trees.part(M, 0, K)).sum() for M in (B, state.MB))
        return (state.moves > 0) & ~((now > before / CHANGED) & (now < before * CHANGED))

    def _noise(
        self, problem: Problem, state: GameState, P: _Blocks, A: Tree, B: Tree, N: Any, fresh: Any, anew: Any
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
        weight = jnp.where(state.moves <= 1, 1, 0.3)
        noise = jnp.where(anew, state.noise, state.noise + weight * (measured - state.noise))
        if B is not None:
            return noise, sum(sketch.kappa for sketch in P.metric)
        # Where B is known all noise is A's. Before any is measured, that of the first rows is their number.
        own = jnp.maximum(jnp.abs(state.lam), (OWN if problem.positive else 0.3) * state.size)
        relative = (noise / jnp.maximum(own, jnp.finfo(noise.dtype).tiny) ** 2).mean()
        return noise, jnp.where(state.moves == 0, state.gathered.rows, relative)

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
        lam = np.asarray(state.lam, np.float64)[:k]
        order = np.argsort(-lam, kind="stable")
        V = trees.scale((1 / np.sqrt(norms)).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam[order], fix_signs(jax.tree.map(lambda v: v[order], V))


class _Blocks(NamedTuple):
    """The metric of a whole player, from that of each block."""

    problem: Problem
    metric: Any

    def apply(self, V: Tree) -> Tree:
        return self._each(lambda m, v: m.apply(v), V)

    def solve(self, G: Tree) -> Tree:
        return self._each(lambda m, g: m.solve(g), G)

    def _each(self, f: Any, V: Tree) -> Tree:
        if isinstance(self.metric, Diagonal):
            return f(self.metric, V)
        return self.problem.joined(tuple(map(f, self.metric, self.problem.blocks(V))))


def _in_parts(problem: Problem) -> bool:
    """Whether factors within ``A`` must come from parts of the batch that share no row."""
    return problem.shares != (1, 1)


def _products(problem: Problem, memory: Tree, batch: Tree, S: Tree) -> Products:
    pairs = problem.estimate(memory, batch, S, _in_parts(problem))
    return Products(trees.mean([p.AV for p, _ in pairs]), trees.mean([q.BV for _, q in pairs]))


def _gain(N: jax.Array, fresh: jax.Array, anew: Any) -> jax.Array:
    """``(N + R)⁻¹ N``; all of the new where nothing was known."""
    total = N + fresh
    tiny = jnp.finfo(N.dtype).tiny
    jitter = jnp.diag(CUTOFF * jnp.diag(total) + jnp.where(jnp.diag(total) > 0, 0, 1) + tiny)
    one = jnp.eye(len(N), dtype=N.dtype)
    return jnp.where(anew, one, jnp.linalg.solve(total + jitter, N))


def _corrected(gain: jax.Array, known: Tree, new: Tree) -> Tree:
    """The products known, corrected, with those of the search directions, of which nothing was known, below."""
    L = len(gain)
    surprise = trees.subtract(trees.part(new, 0, L), known)
    return trees.stack(trees.add(known, trees.combine(gain.T, surprise)), jax.tree.map(lambda x: x[L:], new))


def _noise_after(gain: jax.Array, N: jax.Array, R: jax.Array) -> jax.Array:
    """The noise of corrected products and new ones together."""
    L = len(gain)
    rest = jnp.eye(L, dtype=N.dtype) - gain
    corner = gain.T @ R[:L, L:]
    known = rest.T @ N @ rest + gain.T @ R[:L, :L] @ gain
    return jnp.block([[known, corner], [corner.T, R[L:, L:]]])


def _largest_quotient(GA: jax.Array, GB: jax.Array) -> jax.Array:
    """The largest Rayleigh quotient among the columns, in magnitude."""
    quotients = jnp.diag(GA) / jnp.where(jnp.diag(GB) > 0, jnp.diag(GB), jnp.inf)
    return jnp.maximum(jnp.abs(quotients).max(), jnp.finfo(GB.dtype).tiny)


def _symmetric(G: jax.Array, L: int) -> jax.Array:
    """A Gram matrix of products: between known ones and new ones, what the known say."""
    G = G.at[:L, L:].set(G[L:, :L].T)
    return (G + G.T) / 2


def _orthogonal(X: jax.Array, C: jax.Array, G: jax.Array) -> jax.Array:
    """Columns orthonormal in ``G``, and to those of ``C``, that span what ``X`` adds to them; 0 past that."""

    def unit(X: jax.Array) -> jax.Array:
        squares = jnp.maximum((X * (G @ X)).sum(0), 0)
        return jnp.where(squares > 0, X / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)

    X = unit(X)
    X = unit(X - C @ (C.T @ (G @ X)))
    return X @ _whitening(X.T @ G @ X)


def _whitening(G: jax.Array) -> jax.Array:
    """``T`` with ``Tᵀ G T = I`` on the numerical range of ``G``, and columns of 0 past it."""
    size = jnp.sqrt(jnp.maximum(jnp.diag(G), 0))
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1), 0)
    sigma, U = jnp.linalg.eigh((G + G.T) / 2 * inverse * inverse[:, None])
    keep = sigma > CUTOFF * jnp.maximum(sigma[-1], 0)
    return inverse[:, None] * jnp.where(keep, U / jnp.sqrt(jnp.where(keep, sigma, 1)), 0)[:, ::-1]

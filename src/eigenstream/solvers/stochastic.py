"""What the iterative solvers share: their settings, their state, and the step around each one's direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eigenstream.core import players, views
from eigenstream.core.ritz import fix_signs, rayleigh_ritz, residuals
from eigenstream.core.settings import check_count
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products

Schedule = float | Callable[[Any], Any]
Pair = tuple[Products, Products]

#: Reported Rayleigh quotients are running means over about this many batches.
MEMORY = 50


class State(NamedTuple):
    """What is carried from step to step. Checkpoints hold its leaves in this order."""

    V: Tree
    #: Auxiliary variables of the algorithm: ``[Bv]`` and the like.
    aux: Tree
    optimizer: Tree
    #: The problem's running means.
    memory: Tree
    #: Running means of ``⟨v_i, A v_j⟩`` and ``⟨v_i, B v_j⟩``, or of their diagonals alone.
    grams: tuple[jax.Array, jax.Array]
    step: jax.Array
    #: A step was not finite; the state stays the last finite one.
    failed: jax.Array

    @property
    def long(self) -> tuple[str, ...]:
        """The fields whose arrays are as long as a player."""
        return ("V", "aux", "optimizer", "memory")


class Info(NamedTuple):
    """What a step reports."""

    eigenvalues: jax.Array
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)`` on this batch, its sampling noise included.
    residuals: jax.Array


@dataclass(frozen=True, kw_only=True)
class Stochastic:
    """Settings of every iterative solver here.

    Parameters
    ----------
    learning_rate : float or schedule
        ``η_t``.
    optimizer : function of a learning rate that returns an optax transformation
        ``optax.sgd`` is the algorithm as printed; ``optax.adam`` is what the paper used at scale.
    independent : bool
        Whether ``A`` and ``B`` come from parts of the batch that share no row, which makes the direction unbiased. The
        parts take turns, so every row serves both.
    shards : int
        ``M``: the batch is cut into this many parts and their directions are averaged.
    epsilon : float
        ``ε``, added to ``B`` in the units of the data; a problem's ``ridge`` is the relative form.
    shift : float, optional
        Solve with ``A + shift B`` and report the eigenvalues of ``A``. The shift must make the leading ones positive.
    polish : bool
        Whether to end with Rayleigh-Ritz on running means; otherwise the players are given as they are.
    """

    learning_rate: Schedule = 0.1
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd
    independent: bool = True
    shards: int = 1
    epsilon: float = 0.0
    shift: float | None = None
    polish: bool = False
    #: Whether all components cost no more than one.
    whole_spectrum: ClassVar[bool] = False
    #: Whether `Info.residuals` is measured, so that ``tol`` applies.
    has_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.learning_rate) and not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate!r}: give a positive number or a schedule")
        if not callable(self.optimizer):
            raise ValueError("optimizer: give a function of a learning rate, optax.adam and not optax.adam(1e-3)")
        check_count("shards", self.shards)
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r}: give a number of at least 0")

    def start_aux(self, V: Tree) -> Tree:
        """The auxiliary variables before the first step."""
        return ()

    def direction(self, V: Tree, aux: Tree, pairs: list[Pair]) -> Tree:
        """The direction of ascent, averaged over the pairs that `pairs` gives."""
        raise NotImplementedError

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Tree:
        """The auxiliary variables after a step from ``state``, whose ``grams`` include this batch."""
        return state.aux

    def retract(self, V: Tree) -> tuple[Tree, Tree]:
        """Return the players to the set they are constrained to, and numbers that are finite if that succeeded."""
        return V, ()

    def fixed_shift(self, problem: Problem) -> float:
        """The multiple of ``B`` added to ``A``."""
        if self.shift is None and not problem.promises_positive:
            raise ValueError(
                f"{type(self).__name__} needs positive leading eigenvalues, which this problem does not promise: "
                "pass shift=s, so that those of A + s B are (shift=0.0 if you know they are)"
            )
        return self.shift or 0.0

    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer(self.learning_rate)

    def parts(self, problem: Problem) -> int | None:
        """The number of parts that a step cuts a padded batch into; None if batches must not be padded."""
        if not problem.fills:
            return None
        return self.shards * (sum(problem.shares) if self.independent else 1)

    def fewest_rows(self, problem: Problem) -> int:
        """The smallest batch a step can use."""
        return problem.fewest_rows(self.independent) * self.shards

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> State:
        """The state before the first step; ``batch`` gives shapes only."""
        self.fixed_shift(problem)
        V, _ = self.retract(players.normal(key, k, problem.template(batch)))
        G = jnp.zeros((k, k) if self._keeps_grams(problem) else k, jax.tree.leaves(V)[0].dtype)
        memory = problem.start(batch)
        zero = jnp.zeros((), jnp.int32)
        return State(V, self.start_aux(V), self._optimizer().init(V), memory, (G, G), zero, jnp.array(False))

    def step(self, problem: Problem, state: State, batch: Tree) -> tuple[State, Info]:
        """One step on one batch: pairs → direction → move → retract → auxiliary; undone if it is not finite."""
        memory = problem.observe(state.memory, batch)
        pairs = self.pairs(problem, memory, batch, state.V)
        ascent = self.direction(state.V, state.aux, pairs)
        moved, optimizer, overflowed = self.move(state, ascent)
        V, retraction = self.retract(moved)

        AV, BV = players.mean([first.AV for first, _ in pairs]), players.mean([second.BV for _, second in pairs])
        batch_grams = self._grams(problem, state.V, pairs)
        weight = jnp.maximum(1 / (state.step + 1), 1 if problem.noiseless else 1 / MEMORY).astype(state.grams[0].dtype)
        grams = jax.tree.map(lambda G, g: G + weight * (g - G), state.grams, batch_grams)
        aux = self.update_aux(problem, state._replace(grams=grams), BV)

        new = State(V, aux, optimizer, memory, grams, state.step + 1, overflowed)
        # Norms and Gram matrices are checked, not V: they are known before any array of length d is written.
        new = _only_if_finite((players.norms(ascent), batch_grams, retraction), new, state)
        return new, self._info(state.V, AV, BV, new.grams, self.fixed_shift(problem))

    def pairs(self, problem: Problem, memory: Tree, batch: Tree, V: Tree) -> list[Pair]:
        """Two estimates of ``A V`` and ``B V`` for every shard of the batch; with ``independent`` they share no row."""
        shards = views.split(batch, (1,) * self.shards) if self.shards > 1 and batch is not None else [batch]
        return [
            (self._adjusted(problem, first, V), self._adjusted(problem, second, V))
            for shard in shards
            for first, second in problem.signed_estimate(memory, shard, V, self.independent)
        ]

    def move(self, state: State, ascent: Tree) -> tuple[Tree, Tree, jax.Array]:
        """The players after the optimizer's update, the optimizer's state, and whether it overflowed."""
        update, optimizer = self._optimizer().update(players.scale(-1, ascent), state.optimizer, state.V)
        # The optimizer overflowed: zero those entries of the update and mark the step as failed.
        overflowed = ~jnp.isfinite(jnp.stack([leaf.sum() for leaf in jax.tree.leaves(update)])).all()
        update = jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0), update)
        return optax.apply_updates(state.V, update), optimizer, overflowed

    def _grams(self, problem: Problem, V: Tree, pairs: list[Pair]) -> Any:
        if self._keeps_grams(problem):
            return players.mean([(first.VAV(V), second.VBV(V)) for first, second in pairs])
        return players.mean([(jnp.diag(first.VAV(V)), second.vBv(V)) for first, second in pairs])

    def _keeps_grams(self, problem: Problem) -> bool:
        """Whether inner products of different players are kept, for Rayleigh-Ritz at the end or for the shift."""
        return self.polish or not problem.promises_positive

    def _adjusted(self, problem: Problem, p: Products, V: Tree) -> Products:
        shift = self.fixed_shift(problem)
        p = replace(p, BV=players.add(p.BV, players.scale(self.epsilon, V)), in_B=None) if self.epsilon else p
        return replace(p, AV=players.add(p.AV, players.scale(shift, p.BV)), in_A=None) if shift else p

    def _info(self, V: Tree, AV: Tree, BV: Tree, grams: Any, shift: float) -> Info:
        AV = players.subtract(AV, players.scale(shift, BV)) if shift else AV
        lam = players.dot(V, AV) / players.dot(V, BV)
        return Info(_quotients(*grams) - shift, residuals(V, AV, BV, lam))

    def eigenpairs(self, problem: Problem, state: State) -> tuple[np.ndarray, Tree]:
        """Eigenvalues and players, ``⟨v, B v⟩ = 1`` by the running means, with deterministic signs."""
        grams = state.grams
        if problem.noiseless:
            [(exact, _)] = problem.signed_estimate((), None, state.V, False)
            exact = self._adjusted(problem, exact, state.V)
            grams = exact.VAV(state.V), exact.VBV(state.V)
        GA, GB = (np.asarray(G, np.float64) for G in grams)
        if self.polish:
            lam, W = rayleigh_ritz(GA, GB)
            V = players.combine(W.astype(jax.tree.leaves(state.V)[0].dtype), jax.tree.map(np.asarray, state.V))
        else:
            lam = _quotients(GA, GB)
            norms = np.sqrt(np.maximum(_diagonal(GB), np.finfo(np.float32).tiny))
            V = jax.tree.map(np.asarray, state.V)
            V = players.scale((1 / norms).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam - self.fixed_shift(problem), fix_signs(V)


def _only_if_finite(checked: Tree, new: State, old: State) -> State:
    """The new state if what is checked is finite and no step has failed before; else the old one, marked as failed."""
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(checked)]).all()
    failed = old.failed | ~finite
    kept = jax.tree.map(lambda a, b: jnp.where(failed, a, b), old, new)
    return kept._replace(failed=failed | new.failed)


def _diagonal(G: Any) -> Any:
    return G if G.ndim == 1 else G.diagonal()


def _quotients(GA: Any, GB: Any) -> Any:
    return _diagonal(GA) / _diagonal(GB)

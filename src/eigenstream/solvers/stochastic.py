"""What the iterative solvers share: their settings, their state and the step around each one's direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eigenstream import rows, trees
from eigenstream.eigenpairs import fix_signs, rayleigh_ritz
from eigenstream.problems.base import Problem, Products

Tree = Any
Schedule = float | Callable[[Any], Any]
Pair = tuple[Products, Products]

#: The Rayleigh quotients reported are averaged over about this many of the last batches.
MEMORY = 50


class State(NamedTuple):
    """What is carried from step to step, and what a checkpoint holds."""

    V: Tree
    #: Auxiliary variables of the algorithm: ``[Bv]`` and the like.
    aux: Tree
    optimizer: Tree
    #: What the problem remembers of the stream.
    memory: Tree
    #: Running means of ``⟨v_i, A v_j⟩`` and ``⟨v_i, B v_j⟩``; of ``j = i`` alone where that is enough.
    grams: tuple[jax.Array, jax.Array]
    step: jax.Array
    #: A step went non-finite; the state is the last finite one, and stays.
    failed: jax.Array

    @property
    def long(self) -> tuple[str, ...]:
        """The fields that hold arrays as long as a player."""
        return ("V", "aux", "optimizer", "memory")


class Info(NamedTuple):
    """What is looked at and thrown away."""

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
        ``M``: directions are taken on so many parts of the batch and averaged.
    epsilon : float
        ``ε``, added to ``B`` in the data's own units; a problem's ``ridge`` is the relative form.
    shift : float, optional
        Solve with ``A + shift B``, and give the eigenvalues of ``A``. The leading ones must be positive after it.
    polish : bool
        Whether to end with Rayleigh-Ritz on running means, rather than the players as they are.
    """

    learning_rate: Schedule = 0.1
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd
    independent: bool = True
    shards: int = 1
    epsilon: float = 0.0
    shift: float | None = None
    polish: bool = False

    def __post_init__(self) -> None:
        if not callable(self.learning_rate) and not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate!r}: give a positive number or a schedule")
        if not callable(self.optimizer):
            raise ValueError("optimizer: give a function of a learning rate, optax.adam and not optax.adam(1e-3)")
        if not (isinstance(self.shards, int) and self.shards >= 1):
            raise ValueError(f"shards={self.shards!r}: give a whole number of at least 1")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r}: give a number of at least 0")

    # What an algorithm adds.

    def start_aux(self, V: Tree) -> Tree:
        """Its auxiliary variables before the first step."""
        return ()

    def direction(self, V: Tree, aux: Tree, pairs: list[Pair]) -> Tree:
        """The direction of ascent, a mean over pairs; the two of a pair come from independent parts of the batch."""
        raise NotImplementedError

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Tree:
        """The auxiliary variables after a step from ``state``, whose ``grams`` know this batch already."""
        return state.aux

    def retract(self, V: Tree, stay: Any = False) -> tuple[Tree, Any]:
        """Back to the set the players live in, unless they are to stay, and whether that went well."""
        return V, True

    def fixed_shift(self, problem: Problem) -> float:
        """The multiple of ``B`` added to ``A``."""
        if self.shift is None and not problem.positive:
            raise ValueError(
                f"{type(self).__name__} needs positive leading eigenvalues, which this problem does not promise: "
                "pass shift=s, so that those of A + s B are (shift=0.0 if you know they are)"
            )
        return self.shift or 0.0

    # The step around it.

    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer(self.learning_rate)

    def parts(self, problem: Problem) -> int | None:
        """Into how many parts a step cuts a batch that may be filled up with zeros; None where it may not."""
        if not problem.fills:
            return None
        return self.shards * (sum(problem.shares) if self.independent else 1)

    def fewest_rows(self, problem: Problem) -> int:
        """The smallest batch a step can use."""
        return problem.fewest_rows(self.independent) * self.shards

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> State:
        """The state before the first step; ``batch`` gives shapes only."""
        self.fixed_shift(problem)
        V, _ = self.retract(trees.normal(key, k, problem.template(batch)))
        G = jnp.zeros((k, k) if self._keeps_grams(problem) else k, jax.tree.leaves(V)[0].dtype)
        memory = problem.start(batch)
        zero = jnp.zeros((), jnp.int32)
        return State(V, self.start_aux(V), self._optimizer().init(V), memory, (G, G), zero, jnp.array(False))

    def step(self, problem: Problem, state: State, batch: Tree) -> tuple[State, Info]:
        """One step of the algorithm on one batch."""
        V, aux, shift = state.V, state.aux, self.fixed_shift(problem)
        memory = problem.observe(state.memory, batch)

        parts = rows.split(batch, (1,) * self.shards) if self.shards > 1 and batch is not None else [batch]
        pairs = [
            (self._adjusted(first, V, shift), self._adjusted(second, V, shift))
            for part in parts
            for first, second in problem.estimate(memory, part, V, self.independent)
        ]
        ascent = self.direction(V, aux, pairs)
        AV, BV = trees.mean([first.AV for first, _ in pairs]), trees.mean([second.BV for _, second in pairs])
        if self._keeps_grams(problem):
            batch_grams = trees.mean([(first.VAV(V), second.VBV(V)) for first, second in pairs])
        else:
            batch_grams = trees.mean([(jnp.diag(first.VAV(V)), second.vBv(V)) for first, second in pairs])
        # Known before anything long is written, so that nothing long is read again to undo it.
        failed = state.failed | ~_finite((trees.norms(ascent), batch_grams))

        change, optimizer = self._optimizer().update(trees.scale(-1, ascent), state.optimizer, V)
        # An optimizer may make more of a finite direction: what is not finite of a change is none, and shows.
        shows = ~jnp.isfinite(jnp.stack(trees.sums(change))).all()
        change = jax.tree.map(lambda c: jnp.where(failed | ~jnp.isfinite(c), 0, c), change)
        moved, well = self.retract(optax.apply_updates(V, change), failed)
        if well is not True:
            moved, failed = _unless(~well, V, moved), failed | ~well

        weight = jnp.maximum(1 / (state.step + 1), 1 if problem.noiseless else 1 / MEMORY).astype(state.grams[0].dtype)
        grams = jax.tree.map(lambda G, g: G + weight * (g - G), state.grams, batch_grams)
        aux = self.update_aux(problem, state._replace(grams=grams), BV)
        new = state._replace(aux=aux, optimizer=optimizer, memory=memory, grams=grams, step=state.step + 1)
        new = _unless(failed, state, new)._replace(V=moved, failed=failed | shows)
        return new, self._info(V, AV, BV, new.grams, shift)

    def _keeps_grams(self, problem: Problem) -> bool:
        """Whether inner products of different players are needed, for Rayleigh-Ritz at the end or for the shift."""
        return self.polish or not problem.positive

    def _adjusted(self, p: Products, V: Tree, shift: float) -> Products:
        p = replace(p, BV=trees.add(p.BV, trees.scale(self.epsilon, V)), in_B=None) if self.epsilon else p
        return replace(p, AV=trees.add(p.AV, trees.scale(shift, p.BV)), in_A=None) if shift else p

    def _info(self, V: Tree, AV: Tree, BV: Tree, grams: Any, shift: float) -> Info:
        AV = trees.subtract(AV, trees.scale(shift, BV)) if shift else AV
        lam, norms = trees.dot(V, AV) / trees.dot(V, BV), trees.norms(V)
        # The largest A v stands for the size of A, so that a null vector's residual can be small.
        size = (trees.norms(AV) / norms).max() * norms + jnp.abs(lam) * trees.norms(BV)
        rest = trees.norms(trees.subtract(AV, trees.scale(lam, BV)))
        return Info(_quotients(*grams) - shift, rest / jnp.where(size > 0, size, 1))

    def eigenpairs(self, problem: Problem, state: State) -> tuple[np.ndarray, Tree]:
        """Eigenvalues and players, ``⟨v, B v⟩ = 1`` by the running means, with deterministic signs."""
        grams = state.grams
        if problem.noiseless:
            [(exact, _)] = problem.estimate((), None, state.V, False)
            exact = self._adjusted(exact, state.V, self.fixed_shift(problem))
            grams = exact.VAV(state.V), exact.VBV(state.V)
        GA, GB = (np.asarray(G, np.float64) for G in grams)
        if self.polish:
            lam, W = rayleigh_ritz(GA, GB)
            V = trees.combine(W.astype(jax.tree.leaves(state.V)[0].dtype), jax.tree.map(np.asarray, state.V))
        else:
            lam = _quotients(GA, GB)
            norms = np.sqrt(np.maximum(_diagonal(GB), np.finfo(np.float32).tiny))
            V = jax.tree.map(np.asarray, state.V)
            V = trees.scale((1 / norms).astype(jax.tree.leaves(V)[0].dtype), V)
        return lam - self.fixed_shift(problem), fix_signs(V)


def _unless(failed: jax.Array, old: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(failed, a, b), old, new)


def _finite(tree: Tree) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _diagonal(G: Any) -> Any:
    return G if G.ndim == 1 else G.diagonal()


def _quotients(GA: Any, GB: Any) -> Any:
    return _diagonal(GA) / _diagonal(GB)

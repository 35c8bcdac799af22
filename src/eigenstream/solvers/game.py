"""The paper: the generalized eigenvalue problem as a game of k players, and its Algorithms 1, 2 and 3 as printed.

Player ``i`` chooses ``v_i`` on the unit sphere to maximise its Rayleigh quotient, less a penalty for every parent
``j < i`` that it overlaps with in the metric ``B``. In matrix form, rows of ``V`` the players:

    b = diag(V·BVᵀ)   a = diag(V·AVᵀ)   m = max(diag(V·[BV]ᵀ), ρ)
    W = strictly_lower(V·AVᵀ) / m
    direction = b·AV - a·BV - ( (b·W)·[BV] - rowsum(W ∘ V·[BV]ᵀ)·BV )
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream import trees
from eigenstream.problems.base import Problem
from eigenstream.small import small_eigh
from eigenstream.solvers.stochastic import Pair, Schedule, State, Stochastic

Tree = Any


def utilities(V: Tree, AV: Tree, BV: Tree) -> jax.Array:
    """Every player's utility ``u_i`` given its parents (equation 3).

    Parameters
    ----------
    V, AV, BV : players and their products
        Leaves ``(k, ...)``.

    Examples
    --------
    The second player gains nothing where the first is, and the second eigenvalue at the second eigenvector.

    >>> import jax.numpy as jnp, eigenstream as es
    >>> A, V = jnp.diag(jnp.array([3.0, 2.0])), jnp.eye(2)
    >>> es.solvers.utilities(V, V @ A, V).tolist()
    [3.0, 2.0]
    """
    b = trees.dot(V, BV)
    lam = trees.dot(V, AV) / b
    overlap = trees.gram(V, BV) ** 2 / (b[:, None] * b[None, :])
    return lam - (jnp.tril(overlap, -1) * lam).sum(1)


def gradient(V: Tree, AV: Tree, BV: Tree) -> Tree:
    """``∇u_i`` with respect to ``v_i`` (Lemma ``grad_derivation``), exact for any parents."""
    a, b = trees.dot(V, AV), trees.dot(V, BV)
    VBV = trees.gram(V, BV)
    W = jnp.tril(VBV, -1) * (a / b**2)
    reward = trees.subtract(trees.scale(b, AV), trees.scale(a, BV))
    penalty = trees.subtract(trees.scale(b, trees.combine(W, BV)), trees.scale((W * VBV).sum(1), BV))
    return trees.scale(2 / b**2, trees.subtract(reward, penalty))


def direction(V: Tree, pairs: list[Pair], BV_aux: Tree, norms: Any, shift: Any = 0.0) -> Tree:
    """Rewards less penalties: the simplified direction of equation 5 and of line 12 of Algorithm 2.

    Parameters
    ----------
    V : players
    pairs : list of pairs of products
        ``A V`` is taken from the first of a pair and ``B V`` from the second; the direction is the mean over machines.
    BV_aux : like V
        ``[Bv]``, which stands for the parents' ``B v_j``.
    norms : (k,) array
        What stands for the parents' ``⟨v_j, B v_j⟩``.
    shift : float
        ``s``, to play on ``A + s B``: rewards do not change, penalties grow.
    """
    VBV = trees.gram(V, BV_aux)
    near, far = [], []
    for first, second in pairs:
        VAV, b = first.VAV(V), second.vBv(V)
        a, W = jnp.diag(VAV), jnp.tril(VAV + shift * VBV, -1) / norms
        near.append(trees.subtract(trees.scale(b, first.AV), trees.scale(a - (W * VBV).sum(1), second.BV)))
        far.append(-b[:, None] * W)
    # The parents' vectors are the same for every machine, so they are combined once.
    return trees.add(trees.mean(near), trees.combine(trees.mean(far), BV_aux))


class Auxiliary(NamedTuple):
    """The auxiliary variables beside the players."""

    #: ``[Bv]``, the running mean of ``B v``.
    BV: Tree
    #: ``z``, from which Algorithm 3 takes ``⟨v, B v⟩``.
    z: jax.Array
    #: The shift that the players have been seen to need.
    shift: jax.Array


@dataclass(frozen=True, kw_only=True)
class Paper(Stochastic):
    """Algorithm 2 of the paper, stochastic γ-EigenGame; with ``averaging=None``, Algorithm 1.

    Parameters
    ----------
    averaging : float, schedule or None
        ``γ_t`` (``β_t`` in the paper's tables), the step of the running mean ``[Bv]``; at most 2, past which it
        diverges. None: the batch's own ``B v`` in its place, which with the whole data is Algorithm 1.
    floor : float
        ``ρ``, a lower bound on ``B``'s smallest eigenvalue, at which ``⟨v, [Bv]⟩`` is clipped.
    learning_rate, optimizer, independent, shards, epsilon, polish
        As in every iterative solver; see `eigenstream.solvers.Stochastic`.
    shift : float, optional
        Play on ``A + shift B``. The game needs positive leading eigenvalues; left out, it is 0, as printed, where the
        problem promises them, and elsewhere what the players' Ritz values call for in the first steps.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> A, B = np.diag([3.0, 2.0, 1.0]), np.diag([1.0, 2.0, 1.0])
    >>> solver = es.solvers.Paper(learning_rate=0.1, averaging=None)
    >>> result = es.solve(es.problems.matrices(A, B), None, k=2, solver=solver, max_steps=500)
    >>> result.eigenvalues.round(3).tolist()
    [3.0, 1.0]
    """

    averaging: Schedule | None = 0.1
    floor: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_averaging(self.averaging)
        if not self.floor >= 0:
            raise ValueError(f"floor={self.floor!r}: give a number of at least 0")

    def fixed_shift(self, problem: Problem) -> float:
        return self.shift or 0.0

    def start_aux(self, V: Tree) -> Auxiliary:
        return _start(V)

    def direction(self, V: Tree, aux: Auxiliary, pairs: list[Pair]) -> Tree:
        BV_aux = trees.mean([second.BV for _, second in pairs]) if self.averaging is None else aux.BV
        norms = jnp.maximum(jnp.diag(trees.gram(V, BV_aux)), self.floor)
        return direction(V, pairs, BV_aux, norms, aux.shift)

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Auxiliary:
        mean = running_mean(state.aux.BV, BV, _at(self.averaging, state.step))
        return Auxiliary(mean, state.aux.z, _shift(self.shift, problem, state))

    def retract(self, V: Tree, stay: Any = False) -> tuple[Tree, Any]:
        return trees.scale(jnp.where(stay, 1, 1 / trees.norms(V)), V), True


@dataclass(frozen=True, kw_only=True)
class Smooth(Stochastic):
    """Algorithm 3 of the paper: ``⟨v, B v⟩`` kept between bounds by a log-space variable in place of clipping.

    Parameters
    ----------
    floor, ceiling : float
        ``ρ`` and ``ν``, bounds on ``B``'s smallest and largest eigenvalue.
    averaging : float or schedule
        ``γ_t``, the step of the running mean ``[Bv]`` and of ``z``.
    learning_rate, optimizer, independent, shards, epsilon, shift, polish
        As in `Paper`.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> A, B = np.diag([3.0, 2.0, 1.0]), np.diag([1.0, 2.0, 1.0])
    >>> solver = es.solvers.Smooth(learning_rate=0.1, averaging=1.0, floor=0.1, ceiling=10.0)
    >>> result = es.solve(es.problems.matrices(A, B), None, k=2, solver=solver, max_steps=500)
    >>> result.eigenvalues.round(3).tolist()
    [3.0, 1.0]
    """

    averaging: Schedule = 0.1
    floor: float = 1e-3
    ceiling: float = 1e3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_averaging(self.averaging)
        if not 0 < self.floor < self.ceiling:
            raise ValueError(f"floor={self.floor!r}, ceiling={self.ceiling!r}: give 0 < floor < ceiling")

    def fixed_shift(self, problem: Problem) -> float:
        return self.shift or 0.0

    def start_aux(self, V: Tree) -> Auxiliary:
        return _start(V)

    def norms(self, z: jax.Array) -> jax.Array:
        """``[⟨v, B v⟩] = exp(log ρ + (log ν - log ρ) σ(z))``."""
        return self.floor * jnp.exp(jnp.log(self.ceiling / self.floor) * jax.nn.sigmoid(z))

    def direction(self, V: Tree, aux: Auxiliary, pairs: list[Pair]) -> Tree:
        return direction(V, pairs, aux.BV, self.norms(aux.z), aux.shift)

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Auxiliary:
        gamma, (mean, z, _) = _at(self.averaging, state.step), state.aux
        norms, squash = self.norms(z), jax.nn.sigmoid(z)
        slope = norms * jnp.log(self.ceiling / self.floor) * squash * (1 - squash)
        z = z + gamma * (trees.dot(state.V, mean) - norms) * slope
        return Auxiliary(running_mean(mean, BV, gamma), z, _shift(self.shift, problem, state))

    def retract(self, V: Tree, stay: Any = False) -> tuple[Tree, Any]:
        return trees.scale(jnp.where(stay, 1, 1 / trees.norms(V)), V), True


def running_mean(mean: Tree, new: Tree, gamma: Any) -> Tree:
    """``[Bv] ← [Bv] + γ_t (B_t v - [Bv])``."""
    return jax.tree.map(lambda m, n: m + gamma * (n - m), mean, new)


def needed_shift(GA: jax.Array, GB: jax.Array, cutoff: float) -> jax.Array:
    """Twice how far below 0 the smallest Ritz value of the players' span lies.

    With exact parents, a component along a parent grows as if its eigenvalue were ``-s`` and one along ``v_j`` as if it
    were ``λ_j``, so ``s > -λ_k`` is what the players need; and by Cauchy's interlacing the smallest of ``k`` Ritz
    values is at most ``λ_k``. A positive one asks for nothing, and the algorithm is as printed.
    """
    ritz, _ = small_eigh(GA, GB, cutoff)
    return jnp.maximum(0, -2 * jnp.where(jnp.isfinite(ritz), ritz, 0).min())


#: Steps in which the players, still near their random start and so independent, are asked for the shift they need.
SHIFT_STEPS = 10


def _shift(shift: float | None, problem: Problem, state: State) -> jax.Array:
    """The largest shift seen to be needed; none where one was given or the problem promises to need none."""
    if shift is not None or problem.positive:
        return state.aux.shift
    cutoff = 1e-6 if problem.noiseless else 1e-2
    needed = jax.lax.cond(
        state.step < SHIFT_STEPS,
        lambda: needed_shift(*state.grams, cutoff),
        lambda: jnp.zeros_like(state.aux.shift),
    )
    return jnp.maximum(state.aux.shift, needed)


def _start(V: Tree) -> Auxiliary:
    zeros = jnp.zeros_like(trees.dot(V, V))
    return Auxiliary(V, zeros, zeros[0])


def _at(averaging: Schedule | None, step: Any) -> Any:
    return 1.0 if averaging is None else averaging(step) if callable(averaging) else averaging


def _check_averaging(step: Schedule | None) -> None:
    if step is not None and not callable(step) and not 0 < step <= 2:
        raise ValueError(f"averaging={step!r}: a running mean converges for steps in (0, 2]; try 1.0 or 0.1")

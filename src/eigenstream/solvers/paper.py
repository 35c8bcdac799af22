"""The paper: the generalized eigenvalue problem as a game of k players, and its Algorithms 1, 2 and 3 as printed.

Player ``i`` chooses ``v_i`` on the unit sphere to maximise its Rayleigh quotient less a penalty for every parent
``j < i`` that it overlaps with in the metric ``B``. In matrix form the players are the rows of ``V``, and the rows of
``AV``, ``BV`` and ``[BV]`` are ``A v_i``, ``B v_i`` and the running mean ``[Bv]_i``. One machine computes

    a_i = ⟨v_i, A v_i⟩   b_i = ⟨v_i, B v_i⟩   m_j = max(⟨v_j, [Bv]_j⟩, ρ)   W_ij = ⟨v_i, A v_j⟩ / m_j  for j < i, else 0
    rewards_i   = b_i A v_i - a_i B v_i
    penalties_i = Σ_j W_ij (b_i [Bv]_j - ⟨v_i, [Bv]_j⟩ B v_i)

``y_j = v_j / √m_j`` and ``[By]_j = [Bv]_j / √m_j`` always occur together, so ``W`` divides by ``m_j`` once for both.

============================================  ==  ======  ======  ====================================================
line of the algorithm                         1   2       3       line of code
============================================  ==  ======  ======  ====================================================
Given: ``η_t``, ``γ_t``, ``ρ``, ``ν``, ``M``  1   1       1       fields of `Stochastic`, `Paper` and `Smooth`
``v_i`` drawn from the unit sphere            2   2       2       `Stochastic.init`: `normal`
``[Bv]_i ← v_i``                                  3       3       `Auxiliary.start`: ``BV``
``z_i ← 0``                                               4       `Auxiliary.start`: ``z``
for t = 1 … T                                 3   4       5       `Stochastic.step`, once a batch
for every player, in parallel                 4   5       6       all rows of ``V`` at once
for every machine, in parallel                    6       7       each of the ``pairs`` in `direction`
``A_tm``, ``B_tm`` from independent batches       7       8       `Stochastic.pairs`: `signed_estimate`
``[⟨v, B v⟩]_j`` between ``ρ`` and ``ν``                  9       `Smooth.squared_norms`
``y_j`` and ``[By]_j``                        5   8, 9    10, 11  ``W`` in `direction`; clipped: `Paper.squared_norms`
rewards                                       6   10      12      ``rewards`` in `direction`
penalties                                     7   11      13      ``penalties`` in `direction`
rewards - penalties; mean over machines       8   12, 15  14, 18  `direction`
``∇Bv = B v - [Bv]``; mean over machines          13, 18  15, 21  ``BV`` in `Stochastic.step`; `running_mean`
``∇z``, the same on all machines                          16, 23  ``slope`` in `Smooth.update_aux`
``v' ← v + η_t ∇``                            9   16      19      `Stochastic.move`
``v ← v' / ‖v'‖``                             10  17      20      `Paper.retract`, `Smooth.retract`
``[Bv] ← [Bv] + γ_t ∇Bv``                         19      22      `running_mean`, in `Paper.update_aux`
``z ← z + γ_t ∇z``                                        24      `Smooth.update_aux`
return all ``v_i``                            13  22      27      `Stochastic.eigenpairs`
============================================  ==  ======  ======  ====================================================

The defaults ``optimizer=optax.sgd``, ``independent=True`` and ``polish=False`` are the algorithm as printed.
Algorithm 1 is Algorithm 2 on given matrices with ``averaging=None``: the exact ``B v`` in the place of ``[Bv]``.
`Stochastic.step` updates the auxiliary variables from the state before the move, as the algorithms do. Where
eigenvalues may be negative, the players play on ``A + s B``: see `needed_shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eigenstream.core import players
from eigenstream.core.ritz import small_eigh
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.solvers.stochastic import Pair, Schedule, State, Stochastic


class Coefficients(NamedTuple):
    """Coefficients of ``A v_i``, of ``B v_i`` and, a (k, k) array, of the parents' ``[Bv]_j`` in a direction."""

    AV: Any
    BV: Any
    parents: Any


def direction(V: Tree, pairs: list[Pair], BV_aux: Tree, norms: Any, shift: Any = 0.0) -> Tree:
    """Rewards less penalties, averaged over the machines.

    Parameters
    ----------
    V : players
    pairs : list of pairs of products
        One pair for each machine: two independent estimates of ``A V`` and ``B V``. ``A V`` is taken from the first and
        ``B V`` from the second.
    BV_aux : like V
        ``[Bv]``, in the place of the parents' ``B v_j``.
    norms : (k,) array
        ``m``, in the place of the parents' ``⟨v_j, B v_j⟩``.
    shift : float
        ``s``, to play on ``A + s B``: the rewards do not change, the penalties grow.
    """
    VBV = players.gram(V, BV_aux)  # ⟨v_i, [Bv]_j⟩
    own, parents = [], []
    for first, second in pairs:
        VAV, b = first.VAV(V), second.vBv(V)  # ⟨v_i, A v_j⟩ and b_i
        W = jnp.tril(VAV + shift * VBV, -1) / norms
        rewards = Coefficients(AV=b, BV=-jnp.diag(VAV), parents=0.0)
        penalties = Coefficients(AV=0.0, BV=-(W * VBV).sum(1), parents=b[:, None] * W)
        total = jax.tree.map(jnp.subtract, rewards, penalties)
        own.append(players.add(players.scale(total.AV, first.AV), players.scale(total.BV, second.BV)))
        parents.append(total.parents)
    # The parents' [BV] is the same on all machines: one product with the mean of its coefficients serves them all.
    return players.add(players.mean(own), players.combine(players.mean(parents), BV_aux))


def running_mean(mean: Tree, new: Tree, gamma: Any) -> Tree:
    """``[Bv] ← [Bv] + γ_t (B_t v - [Bv])``."""
    return jax.tree.map(lambda m, n: m + gamma * (n - m), mean, new)


class Auxiliary(NamedTuple):
    """The auxiliary variables beside the players."""

    #: ``[Bv]``, the running mean of ``B v``.
    BV: Tree
    #: ``z``, from which Algorithm 3 computes ``⟨v, B v⟩``.
    z: jax.Array
    #: ``s``, the shift found in the first steps; not in the paper.
    shift: jax.Array

    @classmethod
    def start(cls, V: Tree) -> Auxiliary:
        zeros = jnp.zeros_like(players.dot(V, V))
        return cls(BV=V, z=zeros, shift=zeros[0])


@dataclass(frozen=True, kw_only=True)
class Paper(Stochastic):
    """Algorithm 2 of the paper; on given matrices with ``averaging=None``, Algorithm 1.

    Parameters
    ----------
    averaging : float, schedule or None
        ``γ_t`` (``β_t`` in the paper's tables), the step of the running mean ``[Bv]``. Steps above 2 diverge and are
        refused, among them the 5 of the paper's table for Mediamill. None: the batch's own ``B v`` in its place.
    floor : float
        ``ρ``, a lower bound on the smallest eigenvalue of ``B``, at which ``⟨v, [Bv]⟩`` is clipped.
    learning_rate, optimizer, independent, shards, epsilon, polish
        As in every iterative solver; see `eigenstream.solvers.Stochastic`.
    shift : float, optional
        Play on ``A + shift B``. The penalties need positive leading eigenvalues. Default: 0, as printed, if the problem
        promises them; otherwise what `needed_shift` finds in the first steps.

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
        # A shift that is given is added to A in the products; one that is found goes to `direction`.
        return self.shift or 0.0

    def start_aux(self, V: Tree) -> Auxiliary:
        return Auxiliary.start(V)

    def squared_norms(self, V: Tree, BV_aux: Tree) -> jax.Array:
        """``m = max(⟨v, [Bv]⟩, ρ)``."""
        return jnp.maximum(jnp.diag(players.gram(V, BV_aux)), self.floor)

    def direction(self, V: Tree, aux: Auxiliary, pairs: list[Pair]) -> Tree:
        BV_aux = players.mean([second.BV for _, second in pairs]) if self.averaging is None else aux.BV
        return direction(V, pairs, BV_aux, self.squared_norms(V, BV_aux), aux.shift)

    def retract(self, V: Tree) -> tuple[Tree, Tree]:
        return players.scale(1 / players.norms(V), V), ()

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Auxiliary:
        mean = running_mean(state.aux.BV, BV, _at(self.averaging, state.step))
        return Auxiliary(mean, state.aux.z, _shift(self.shift, problem, state))


@dataclass(frozen=True, kw_only=True)
class Smooth(Stochastic):
    """Algorithm 3 of the paper: ``⟨v, B v⟩`` is kept between bounds by a log-space variable in place of clipping.

    Parameters
    ----------
    floor, ceiling : float
        ``ρ`` and ``ν``, bounds on the smallest and the largest eigenvalue of ``B``.
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

    fixed_shift, start_aux, retract = Paper.fixed_shift, Paper.start_aux, Paper.retract

    def squared_norms(self, z: jax.Array) -> jax.Array:
        """``[⟨v, B v⟩] = exp(log ρ + (log ν - log ρ) σ(z))``."""
        return self.floor * jnp.exp(jnp.log(self.ceiling / self.floor) * jax.nn.sigmoid(z))

    def direction(self, V: Tree, aux: Auxiliary, pairs: list[Pair]) -> Tree:
        return direction(V, pairs, aux.BV, self.squared_norms(aux.z), aux.shift)

    def update_aux(self, problem: Problem, state: State, BV: Tree) -> Auxiliary:
        gamma, (mean, z, _) = _at(self.averaging, state.step), state.aux
        m, sigmoid = self.squared_norms(z), jax.nn.sigmoid(z)
        slope = m * jnp.log(self.ceiling / self.floor) * sigmoid * (1 - sigmoid)
        z = z + gamma * (players.dot(state.V, mean) - m) * slope  # ∇z = (⟨v, [Bv]⟩ - m) slope
        return Auxiliary(running_mean(mean, BV, gamma), z, _shift(self.shift, problem, state))


def utilities(V: Tree, AV: Tree, BV: Tree) -> jax.Array:
    """Every player's utility ``u_i`` given its parents (section 2).

    Parameters
    ----------
    V, AV, BV : players and their products
        Leaves ``(k, ...)``.

    Examples
    --------
    At the eigenvectors the utilities are the eigenvalues.

    >>> import jax.numpy as jnp, eigenstream as es
    >>> A, V = jnp.diag(jnp.array([3.0, 2.0])), jnp.eye(2)
    >>> es.solvers.utilities(V, V @ A, V).tolist()
    [3.0, 2.0]
    """
    b = players.dot(V, BV)
    lam = players.dot(V, AV) / b
    overlap = players.gram(V, BV) ** 2 / (b[:, None] * b[None, :])
    return lam - (jnp.tril(overlap, -1) * lam).sum(1)


def gradient(V: Tree, AV: Tree, BV: Tree) -> Tree:
    """``∇u_i`` with respect to ``v_i`` (Lemma ``grad_derivation``), exact for any parents."""
    a, b = players.dot(V, AV), players.dot(V, BV)
    VBV = players.gram(V, BV)
    W = jnp.tril(VBV, -1) * (a / b**2)
    rewards = players.subtract(players.scale(b, AV), players.scale(a, BV))
    penalties = players.subtract(players.scale(b, players.combine(W, BV)), players.scale((W * VBV).sum(1), BV))
    return players.scale(2 / b**2, players.subtract(rewards, penalties))


def needed_shift(GA: jax.Array, GB: jax.Array, cutoff: float) -> jax.Array:
    """Twice the distance of the smallest Ritz value of the players' span below 0; 0 if it is positive.

    With exact parents, the component of a player along a parent grows as if its eigenvalue were ``-s``, and along any
    other eigenvector at the rate of its own eigenvalue. So the players need ``s > -λ_k``. By Cauchy's interlacing
    theorem the smallest of ``k`` Ritz values is at most ``λ_k``.
    """
    ritz, _ = small_eigh(GA, GB, cutoff)
    return jnp.maximum(0, -2 * jnp.where(jnp.isfinite(ritz), ritz, 0).min())


#: The shift is found in this many first steps, while the players are near their random start and so independent.
SHIFT_STEPS = 10


def _shift(shift: float | None, problem: Problem, state: State) -> jax.Array:
    """The largest shift needed so far; none if one was given or the problem promises positive eigenvalues."""
    if shift is not None or problem.promises_positive:
        return state.aux.shift
    cutoff = 1e-6 if problem.noiseless else 1e-2
    needed = jax.lax.cond(
        state.step < SHIFT_STEPS,
        lambda: needed_shift(*state.grams, cutoff),
        lambda: jnp.zeros_like(state.aux.shift),
    )
    return jnp.maximum(state.aux.shift, needed)


def _at(averaging: Schedule | None, step: Any) -> Any:
    return 1.0 if averaging is None else averaging(step) if callable(averaging) else averaging


def _check_averaging(step: Schedule | None) -> None:
    if step is not None and not callable(step) and not 0 < step <= 2:
        raise ValueError(f"averaging={step!r}: a running mean converges for steps in (0, 2]; try 1.0 or 0.1")

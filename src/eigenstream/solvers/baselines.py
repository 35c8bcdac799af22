"""Streaming solvers of other authors, as their papers define them, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import jax.scipy.linalg

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.solvers.stochastic import Pair, Stochastic


@dataclass(frozen=True, kw_only=True)
class EckartYoung(Stochastic):
    """GEP-EY (Chapman, Wells and Lawry Aguila, 2024): descend ``-2 tr(W'AW) + tr((W'BW)²)``.

    At the minimum ``W`` spans the leading eigenvectors and ``W'BW`` has their eigenvalues. ``polish=True`` orders them.

    Parameters
    ----------
    nested : bool
        The ordered form: player ``i`` depends on players ``j ≤ i`` only and converges to the i-th eigenvector.
    learning_rate, optimizer, independent, shards, epsilon, shift, polish
        See `eigenstream.solvers.Stochastic`. ``independent`` takes the two factors ``B`` of the penalty from two parts.
        For CCA its authors add the diagonal blocks to ``A``: ``shift=1.0``.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> solver = es.solvers.EckartYoung(learning_rate=0.02, shift=0.0, nested=True)
    >>> problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0]))
    >>> es.solve(problem, None, k=2, solver=solver, max_steps=1000).eigenvalues.round(3).tolist()
    [3.0, 2.0]
    """

    nested: bool = False

    def direction(self, V: Tree, aux: Tree, pairs: list[Pair]) -> Tree:
        def one(first: Products, second: Products) -> Tree:
            # Column i of BW(W'BW) is row i of (V·BVᵀ)·BV; the two factors come from different parts of the batch.
            G = first.VBV(V)
            penalty = players.combine(jnp.tril(G) if self.nested else G, second.BV)
            return players.scale(4, players.subtract(first.AV, penalty))

        return players.mean([one(*pair) for pair in pairs])


@dataclass(frozen=True, kw_only=True)
class SGHA(Stochastic):
    """Stochastic generalized Hebbian algorithm (Chen, Li, Yang, Yang and Zhao, 2019): ``W += η(AW - BW(W'AW))``.

    At its fixed points ``W`` spans eigenvectors and ``W'BW = I``. ``polish=True`` orders them.

    Parameters
    ----------
    ordered : bool
        GHA-GEP: only the upper triangle of ``W'AW``, so player i converges to the i-th eigenvector.
    learning_rate, optimizer, independent, shards, epsilon, shift, polish
        See `eigenstream.solvers.Stochastic`.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> solver = es.solvers.SGHA(learning_rate=0.1, shift=0.0, ordered=True)
    >>> problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0]))
    >>> es.solve(problem, None, k=2, solver=solver, max_steps=1000).eigenvalues.round(3).tolist()
    [3.0, 2.0]
    """

    ordered: bool = False

    def direction(self, V: Tree, aux: Tree, pairs: list[Pair]) -> Tree:
        def one(first: Products, second: Products) -> Tree:
            G = first.VAV(V)
            return players.subtract(first.AV, players.combine(jnp.tril(G) if self.ordered else G, second.BV))

        return players.mean([one(*pair) for pair in pairs])


@dataclass(frozen=True, kw_only=True)
class Oja(Stochastic):
    """Oja's algorithm for ``B = I``: ``W ← qr(W + η A W)``, which orders the eigenvectors.

    Parameters
    ----------
    learning_rate, optimizer, shards, epsilon, shift, polish
        See `eigenstream.solvers.Stochastic`. The direction is linear in ``A``, so it is unbiased on whole batches.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0]))
    >>> solver = es.solvers.Oja(learning_rate=1.0, shift=0.0)
    >>> es.solve(problem, None, k=2, solver=solver, max_steps=200).eigenvalues.round(3).tolist()
    [3.0, 2.0]
    """

    independent: bool = False

    def fixed_shift(self, problem: Problem) -> float:
        if not problem.orthonormal:
            raise ValueError("Oja solves problems with B = I (pca, pls, the plain Laplacian): choose another solver")
        return super().fixed_shift(problem)

    def direction(self, V: Tree, aux: Tree, pairs: list[Pair]) -> Tree:
        return players.mean([first.AV for first, _ in pairs])

    def retract(self, V: Tree) -> tuple[Tree, Tree]:
        # With LLᵀ = VVᵀ the rows of L⁻¹V are the columns of Q in W = QR. Done twice for orthogonality.
        for _ in range(2):
            V = players.scale(1 / players.norms(V), V)
            L = jnp.linalg.cholesky(players.gram(V, V))
            V = players.combine(jax.scipy.linalg.solve_triangular(L, jnp.eye(len(L), dtype=L.dtype), lower=True), V)
        return V, L

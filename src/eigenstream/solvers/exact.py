"""The exact solution: sum the sufficient statistics in one pass, solve once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from eigenstream import generalized, rows, trees
from eigenstream.eigenpairs import Dense, fix_signs, solve_dense
from eigenstream.generalized import EighInfo
from eigenstream.metrics import residuals
from eigenstream.moments import BLOCK_ROWS
from eigenstream.problems.base import Problem, view_sizes
from eigenstream.problems.matrices import Operands

Tree = Any


class ExactState(NamedTuple):
    """The statistics so far, and batches that wait, with how many rows, until they fill a block."""

    statistics: Any
    pending: tuple[Tree, ...]
    waiting: int
    template: Tree
    k: int
    #: The coarsest arithmetic among the rows.
    epsilon: float


@dataclass(frozen=True)
class Exact:
    """Accumulate what ``A`` and ``B`` are made of in float64 on the host, then solve with LAPACK.

    One pass, nothing to tune; a singular ``B`` is treated on its range. Memory grows as ``d²``, time as ``n d² + d³``.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> result = es.solve(es.problems.pca(), [X[:500], X[500:]], k=3, solver=es.solvers.Exact())
    >>> bool(np.allclose(result.eigenvalues, np.linalg.eigvalsh(np.cov(X.T))[::-1]))
    True
    """

    def init(self, problem: Problem, batch: Tree, k: int, repeatable: bool = False) -> ExactState:
        """Empty statistics for batches like this one; ``repeatable`` says that they can be read twice."""
        statistics = problem.statistics(batch, repeatable)
        return ExactState(statistics, (), 0, problem.template(batch), k, float(np.finfo(np.float64).eps))

    def step(self, problem: Problem, state: ExactState, batch: Tree) -> ExactState:
        """The statistics with one more batch."""
        batch = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, batch)
        floats = [x.dtype for x in rows.leaves(batch) if x.dtype.kind == "f"]
        epsilon = max([state.epsilon, *(float(np.finfo(dtype).eps) for dtype in floats)])
        waiting = state.waiting + rows.n_rows(batch)
        state = state._replace(pending=(*state.pending, batch), waiting=waiting, epsilon=epsilon)
        return self._settled(state) if waiting >= BLOCK_ROWS else state

    def _settled(self, state: ExactState) -> ExactState:
        if not state.pending:
            return state
        return state._replace(statistics=state.statistics.add(list(state.pending)), pending=(), waiting=0)

    def next_pass(self, state: ExactState) -> ExactState | None:
        """The state to read the batches again with, or None if one pass was enough."""
        again = self._settled(state).statistics.again()
        return None if again is None else state._replace(statistics=again, pending=(), waiting=0)

    def solve(self, problem: Problem, state: ExactState, which: str) -> tuple[Dense, Tree, EighInfo]:
        """Eigenpairs of the statistics, as SciPy would give them and as signed players, and how they were found."""
        operands = self._settled(state).statistics.operands()
        if isinstance(operands, Operands):
            lam, V, info = generalized.eigh(operands.A, operands.B, k=state.k, which=which)
            solved = Dense(np.asarray(lam), np.asarray(V), [V.shape[0]])
        else:
            A, B = (trees.columns(M) for M in problem.products(operands, trees.identity(state.template)))
            if not (np.isfinite(A).all() and np.isfinite(B).all()):
                raise ValueError("the sums are not finite: the rows hold NaN, infinity or numbers too large to square")
            d = len(A)
            # Rounding of float32 rows reaches √d ε in a covariance of unit diagonal; of float64 rows, LAPACK's d ε.
            coarse = state.epsilon > np.finfo(np.float64).eps
            cutoff = state.epsilon * (np.sqrt(d) if coarse else d)
            solved = solve_dense((A + A.T) / 2, B, state.k, which, cutoff, view_sizes(state.template))
            rest = residuals(solved.vectors, solved.eigenvalues, A, B)
            info = EighInfo("scipy.linalg.eigh", rest, True, "solved exactly")
        most = problem.most_components(solved.ranks)
        if state.k > most:
            raise ValueError(
                f"k={state.k} is too large: B has ranks {solved.ranks} (constant or duplicate columns, or few rows), "
                f"so there are {most} components; give k of at most {most}, or a ridge"
            )
        return solved, fix_signs(trees.rows(solved.vectors, state.template)), info

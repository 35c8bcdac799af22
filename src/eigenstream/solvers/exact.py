"""The exact solution: sum the sufficient statistics in one pass, solve once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Summary
from eigenstream.core.ritz import Dense, fix_signs, solve_dense
from eigenstream.core.types import Tree
from eigenstream.metrics import residuals
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import check_finite, view_sizes
from eigenstream.problems.matrices import Operands
from eigenstream.solvers.direct import EighInfo, solve_on_host, to_host
from eigenstream.solvers.schedules import check_half_life

#: Columns of B are dependent if their residual is below this many roundings of the rows.
ROUNDED = 4
#: Rows with a half-life are added in pieces of this share of it.
PIECES = 8


class ExactState(NamedTuple):
    """The sums so far."""

    statistics: Any
    template: Tree
    #: How many eigenpairs; None for all.
    k: int | None
    #: The largest machine epsilon among the rows' types.
    epsilon: float


@dataclass(frozen=True)
class Exact:
    """Sum covariances in float64 on the host, then solve once with LAPACK.

    One pass and nothing to tune. A singular ``B`` is solved on its range. Memory is ``O(d²)``, time ``O(n d² + d³)``.

    Parameters
    ----------
    half_life : float, optional
        Rows after which the weight of a row has halved. None: all rows weigh the same.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> result = es.solve(es.problems.pca(), [X[:500], X[500:]], k=3, solver=es.solvers.Exact())
    >>> bool(np.allclose(result.eigenvalues, np.linalg.eigvalsh(np.cov(X.T))[::-1]))
    True
    """

    half_life: float | None = None
    #: All components come at the cost of one.
    whole_spectrum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_half_life(self.half_life)

    def init(self, problem: Problem, batch: Tree, k: int | None, repeatable: bool = False) -> ExactState:
        """Empty sums for batches like this one; ``repeatable``: they can be read twice."""
        statistics = problem.statistics(batch, repeatable)
        if self.half_life is not None and not hasattr(statistics, "faded"):
            raise ValueError(
                f"half_life: the sums of {type(problem).__name__} cannot fade; take solver='game', or half_life=None"
            )
        return ExactState(statistics, problem.template(batch), k, float(np.finfo(np.float64).eps))

    def step(self, problem: Problem, state: ExactState, batch: Tree) -> ExactState:
        """Add one batch, best of thousands of rows."""
        batch = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, batch)
        floats = [x.dtype for x in views.leaves(batch) if x.dtype.kind == "f"]
        epsilon = max([state.epsilon, *(float(np.finfo(dtype).eps) for dtype in floats)])
        # Rows that are not finite raise below: no warning here.
        with np.errstate(invalid="ignore", over="ignore"):
            statistics = self._added(state.statistics, batch)
        # A row that is not finite makes the diagonals not finite.
        small = [np.diagonal(x) if np.ndim(x) == 2 else x for x in jax.tree.leaves(statistics) if np.ndim(x) <= 2]
        if not all(np.isfinite(x).all() for x in small):
            check_finite(batch)
            raise ValueError("the sums are not finite: the rows hold numbers too large to square")
        return state._replace(statistics=statistics, epsilon=epsilon)

    def _added(self, statistics: Any, batch: Tree) -> Any:
        if self.half_life is None:
            return statistics.add(batch)
        # Rows added together have equal weights, so pieces are small against the half-life.
        for piece in host_batches.pieces(batch, max(1, int(self.half_life / PIECES))):
            statistics = statistics.faded(0.5 ** (views.n_rows(piece) / self.half_life)).add(piece)
        return statistics

    def next_pass(self, state: ExactState) -> ExactState | None:
        """The state for another pass over the rows; None if one pass was enough."""
        again = state.statistics.again()
        return None if again is None else state._replace(statistics=again)

    def summary(self, state: ExactState) -> Summary | None:
        """Counts and means of the rows summed."""
        return state.statistics.summary()

    def covariance(self, state: ExactState) -> np.ndarray | None:
        """The covariance of all views side by side; None if other sums were taken."""
        return state.statistics.covariance() if hasattr(state.statistics, "covariance") else None

    def solve(self, problem: Problem, state: ExactState, which: str, n: int) -> tuple[Dense, Tree, EighInfo]:
        """Solve the sums of ``n`` rows: dense vectors, players with fixed signs, and how they were found."""
        operands = state.statistics.operands()
        if isinstance(operands, Operands):
            A, B = map(to_host, operands)
            lam, V, method = solve_on_host(A, B, state.k or A.shape[0], which, 0.0, 0)
            solved = Dense(lam, V, [V.shape[0]])
            info = EighInfo(method, residuals(V, lam, A, B), True, f"{len(lam)} pairs by {method}")
        else:
            A, B = (players.to_matrix(M) for M in problem.products(operands, players.identity(state.template)))
            if not (np.isfinite(A).all() and np.isfinite(B).all()):
                raise ValueError("the sums are not finite: the rows hold numbers too large to square")
            d = len(A)
            # LAPACK's rounding, and that of the rows: a column dependent to relative error ε leaves a variance of ε².
            cutoff = max(d * np.finfo(np.float64).eps, (ROUNDED * state.epsilon) ** 2)
            solved = solve_dense((A + A.T) / 2, B, state.k or d, which, cutoff, view_sizes(state.template))
            most = problem.most_components(solved.ranks)
            if most < 1:
                raise ValueError(
                    f"there are no components: B has ranks {solved.ranks} (constant columns, or too few rows); give "
                    "more rows, columns that vary, or a ridge"
                )
            if state.k is None:
                solved = solved.first(min(most, n) if problem.has_rows else most)
            elif state.k > most:
                more = "a larger ridge" if problem.ridge else "a ridge"
                raise ValueError(
                    f"k={state.k} is too large: B has ranks {solved.ranks} (constant or duplicate columns, or few "
                    f"rows), so there are {most} components; give k of at most {most}, or {more}"
                )
            rest = residuals(solved.vectors, solved.eigenvalues, A, B)
            info = EighInfo("scipy.linalg.eigh", rest, True, "solved exactly")
        return solved, fix_signs(players.from_matrix(solved.vectors, state.template)), info

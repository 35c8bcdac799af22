"""The exact solution: sum the sufficient statistics in one pass, solve once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from eigenstream import distributed
from eigenstream.core import host_batches, players, ritz, views
from eigenstream.core.moments import NotFinite
from eigenstream.core.pencil import ROUGH, Solved, solve
from eigenstream.core.precision import compiled, wide
from eigenstream.core.ritz import fix_signs
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
#: Float32 products change eigenvalues by about 10⁻¹⁰ times the condition of B (measured): by 10⁻⁶ at this one.
SHORT_CONDITION = 1e4
#: With fewer features the host is as fast, and compiles nothing.
DEVICE_FEATURES = 256


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
    """Sum covariances in float64, on JAX's device or mesh or on the processor, then solve once.

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

    def init(
        self, problem: Problem, batch: Tree, k: int | None, repeatable: bool = False, mesh: Any = None
    ) -> ExactState:
        """Empty sums for batches like this one; ``repeatable``: they can be read twice; ``mesh``: devices for them."""
        statistics = problem.statistics(batch, repeatable)
        if self.half_life is not None and not hasattr(statistics, "faded"):
            raise ValueError(
                f"half_life: the sums of {type(problem).__name__} cannot fade; take solver='game', or half_life=None"
            )
        if hasattr(statistics, "on_device") and sums_on_device(batch, players.size(statistics.template), mesh):
            statistics = statistics.on_device(mesh)
        return ExactState(statistics, problem.template(batch), k, float(np.finfo(np.float64).eps))

    def step(self, problem: Problem, state: ExactState, batch: Tree, **how: Any) -> ExactState:
        """Add one batch, best of thousands of rows; ``how``: see `MomentStatistics.add`."""
        floats = [x.dtype for x in views.leaves(batch) if x.dtype.kind == "f"]
        epsilon = max([state.epsilon, *(float(np.finfo(dtype).eps) for dtype in floats)])
        statistics = state.statistics
        with report_not_finite():
            if self.half_life is None:
                return state._replace(statistics=statistics.add(batch, **how), epsilon=epsilon)
            # Rows added together have equal weights, so pieces are small against the half-life.
            for piece in host_batches.pieces(batch, max(1, int(self.half_life / PIECES))):
                statistics = statistics.faded(0.5 ** (views.n_rows(piece) / self.half_life)).add(piece)
        return state._replace(statistics=statistics, epsilon=epsilon)

    def next_pass(self, state: ExactState) -> ExactState | None:
        """The state for another pass over the rows; None if one pass was enough."""
        again = state.statistics.again()
        return None if again is None else state._replace(statistics=again)

    def solve(
        self, problem: Problem, state: ExactState, which: str, n: int
    ) -> tuple[Solved, Tree, EighInfo, list[np.ndarray] | None]:
        """Solve the sums of ``n`` rows: dense vectors, players with fixed signs, and how they were found.

        Of problems of several views also, for each view, the covariance ``(d, k)`` of all features with its scores.
        """
        with report_not_finite():
            operands, summary = state.statistics.operands(), state.statistics.summary()
        if isinstance(operands, Operands):
            A, B = map(to_host, operands)
            lam, V, method = solve_on_host(A, B, state.k or A.shape[0], which, 0.0, 0)
            info = EighInfo(method, residuals(V, lam, A, B), True, f"{len(lam)} pairs by {method}")
            solved = Solved(lam, V, [V.shape[0]], method)
            return solved, fix_signs(players.from_matrix(V, state.template)), info, None
        with np.errstate(over="ignore"):
            squares = summary and summary.scatter + sum((m * m).sum() for m in jax.tree.leaves(summary.means))
        if summary is not None and not np.isfinite(squares):
            raise ValueError("the sums are not finite: the rows hold numbers too large to square")
        times = Times(problem, state.template)
        with wide():
            if _solves_on_device(players.size(state.template)):
                # Some sums are taken on the host. They are solved on the device as well.
                operands = views.to_be_put(operands)
            solved = self._from_moments(problem, state, operands, times, which, n)
            # Only now, when the factors of B are freed.
            V = fix_signs(players.from_matrix(distributed.fetched(solved.vectors), state.template))
            rest, crossed = times.measured(views.read(operands), V, solved.eigenvalues)
        message = "solved exactly"
        if not solved.converged:
            message = f"not solved to {ROUGH:g}: the relative residual is {solved.residual:.1g}"
        return solved, V, EighInfo(solved.method, rest, solved.converged, message), crossed

    def _from_moments(
        self, problem: Problem, state: ExactState, operands: Tree, times: Times, which: str, n: int
    ) -> Solved:
        sizes, d = view_sizes(state.template), players.size(state.template)
        # LAPACK's rounding, and that of the rows: a column dependent to relative error ε leaves a variance of ε².
        cutoff = max(d * np.finfo(np.float64).eps, (ROUNDED * state.epsilon) ** 2)
        k = state.k
        if k is None:
            k = min(problem.most_components(sizes), n) if problem.has_rows else problem.most_components(sizes)
        B, C = problem.metric(operands), problem.between(operands)
        solved = solve(times, partial(views.read, operands), B, C, sizes, k, which, cutoff, n)
        if problem.orthonormal:
            # B is 1 + ridge times the identity.
            solved = solved.scaled(1 + problem.ridge)
        if getattr(getattr(state.statistics, "moments", None), "short", False) and solved.condition > SHORT_CONDITION:
            warnings.warn(
                "this device multiplies in float32, and columns that nearly depend on one another multiply its rounding"
                f" errors by up to {solved.condition:.1g}: give a ridge, or sum on a CPU with JAX_PLATFORMS=cpu",
                stacklevel=2,
            )
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
        return solved


class Times:
    """``A V`` of a problem for the columns of ``V``, equal and hashed by problem and template."""

    def __init__(self, problem: Problem, template: Tree):
        self.problem, self.template = problem, template
        leaves, structure = jax.tree.flatten(template)
        self._key = problem, structure, tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Times) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, operands: Tree, V: Any) -> Any:
        AV = self.problem.products(operands, players.from_matrix(V, self.template)).AV
        leaves = [leaf.reshape(len(leaf), -1).T for leaf in jax.tree.leaves(AV)]
        return leaves[0] if len(leaves) == 1 else (np if isinstance(V, np.ndarray) else jnp).concatenate(leaves)

    def measured(self, operands: Tree, V: Tree, lam: np.ndarray) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """Residuals of eigenpairs and, of several views, the covariance of all features with each view's scores."""
        start = np.random.default_rng(0).normal(size=(players.size(self.template), 4))
        on_host = isinstance(jax.tree.leaves(operands)[0], np.ndarray)
        rest, crossed = (_measured if on_host else _measured_on_device)(self, operands, V, lam, start)
        return distributed.fetched(rest), crossed and [distributed.fetched(scores).T for scores in crossed]


def _measured(times: Times, operands: Tree, V: Tree, lam: Any, start: Any) -> tuple[Any, list[Any] | None]:
    xp: Any = np if isinstance(start, np.ndarray) else jnp
    AV, BV = times.problem.products(operands, V)
    # ‖A‖ by a power iteration: the wanted eigenvalues may be the smallest. Divide A by its size first, because the
    # squared length of A² x may overflow.
    images = times(operands, start)
    size = xp.abs(images).max()
    size = xp.where(size > 0, size, 1)
    norms = [xp.linalg.norm(M / size, axis=0) for M in (images, times(operands, images / size))]
    norm_A = (norms[1] / xp.where(norms[0] > 0, norms[0], 1)).max()
    # A plain tuple is one covariance for each view. Operands of LDA and ICA are named tuples.
    crossed = None
    if type(operands) is tuple:
        crossed = [views.project(x, v) for x, v in zip(operands, V, strict=True)]
    return ritz.residuals(V, jax.tree.map(lambda leaf: leaf / size, AV), BV, lam / size, norm_A), crossed


_measured_on_device = compiled(_measured, static_argnums=0)


@contextmanager
def report_not_finite() -> Iterator[None]:
    """Name the row of a batch that the sums refused."""
    try:
        yield
    except NotFinite as error:
        check_finite(error.batch)
        raise ValueError("the sums are not finite: the rows hold numbers too large to square") from None


def sums_on_device(batch: Tree, d: int, mesh: Any) -> bool:
    """Whether to sum on a device: for a mesh, and for dense rows of many features if JAX's own device is no CPU."""
    if any(scipy.sparse.issparse(leaf) for leaf in views.leaves(batch)):
        return False
    return mesh is not None or _solves_on_device(d)


def _solves_on_device(d: int) -> bool:
    return jax.default_backend() != "cpu" and d >= DEVICE_FEATURES

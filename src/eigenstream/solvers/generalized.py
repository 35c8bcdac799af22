"""`eigh`: the leading eigenpairs of matrices and operators, by whichever tool fits them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

from eigenstream.eigenpairs import WHICH, leading
from eigenstream.metrics import residuals
from eigenstream.problems.base import Negated, Problem
from eigenstream.problems.matrices import Matvec, check_operands, matrices, to_jax
from eigenstream.solvers.accelerated import Game, GameState

__all__ = ["EighInfo", "eigh"]


class EighInfo(NamedTuple):
    """What `eigh` did."""

    #: The routine: for instance ``"scipy.linalg.eigh"``.
    method: str
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)`` of each pair.
    residuals: np.ndarray
    converged: bool
    #: How it went, in words.
    message: str


#: Dense matrices up to this size go to LAPACK whatever B is: repeated eigenvalues do not slow it down.
SMALL = 2000


def eigh(
    A: Any,
    B: Any = None,
    k: int | None = None,
    which: str = "largest",
    *,
    size: int | None = None,
    tol: float | None = None,
    max_steps: int = 1000,
    random_state: int = 0,
) -> tuple[Any, Any, EighInfo]:
    """The ``k`` leading eigenpairs of ``A v = λ B v``, for symmetric ``A`` and positive definite ``B``.

    NumPy arrays go to LAPACK, SciPy's sparse matrices and operators to ARPACK, without a dense copy; JAX arrays,
    sparse arrays and functions stay in JAX, in their own precision.

    Parameters
    ----------
    A, B : array, scipy.sparse matrix, scipy LinearOperator, JAX array, JAX BCOO, or JAX function of one vector
        ``B`` is the identity if left out.
    k : int, optional
        How many; all if left out.
    which : {"largest", "smallest", "magnitude"}
        From which end; the first returned is the most extreme.
    size : int
        The dimension, where ``A`` is a function.
    tol : float, optional
        The residual at which an iteration ends; by default what the precision allows.
    max_steps : int
        The most iterations in JAX.
    random_state : int
        Seed of the first vectors of an iteration.

    Returns
    -------
    w : (k,) array
    V : (d, k) array
        B-orthonormal columns.
    info : EighInfo

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> w, V, info = es.eigh(np.diag([1.0, 3.0, 2.0]), np.diag([1.0, 1.0, 4.0]), k=2)
    >>> w.tolist(), info.method
    ([3.0, 1.0], 'scipy.linalg.eigh')
    """
    A, B = check_operands(A, B, size)
    d = A.shape[0]
    if which not in WHICH:
        raise ValueError(f"which={which!r}: give 'largest', 'smallest' or 'magnitude'")
    k = d if k is None else k
    if not (isinstance(k, int | np.integer) and 1 <= k <= d):
        raise ValueError(f"k={k}: give a whole number from 1 to the dimension, {d}")
    w: Any
    V: Any
    in_jax = any(isinstance(M, jax.Array | jsparse.BCOO | Matvec) for M in (A, B))
    if in_jax:
        w, V, method, message = _in_jax(A, B, k, which, tol, max_steps, random_state)
    elif (isinstance(A, np.ndarray) and (B is None or isinstance(B, np.ndarray) or d <= SMALL)) or 2 * k > d:
        w, V, method, message = _by_lapack(A, B, k, which)
    else:
        w, V, method, message = _by_arpack(A, B, k, which, tol or 0.0, random_state)
    rest = residuals(V, w, A, B)
    return w, V, EighInfo(method, rest, not message, message or f"{k} pairs by {method}")


def _by_lapack(A: Any, B: Any, k: int, which: str) -> tuple[np.ndarray, np.ndarray, str, str]:
    # Half or more of all the vectors make a dense d×d array whatever the input was.
    A, B = (M if M is None or isinstance(M, np.ndarray) else M @ np.eye(M.shape[0]) for M in (A, B))
    A, B = (None if M is None else np.asarray(M, np.float64) for M in (A, B))
    d = len(A)
    subset = {"largest": [d - k, d - 1], "smallest": [0, k - 1], "magnitude": None}[which]
    try:
        w, V = scipy.linalg.eigh(A, B, subset_by_index=subset)
    except scipy.linalg.LinAlgError as error:
        raise ValueError(f"B is not positive definite ({error}): add a ridge, B + r·tr(B)/d·I") from error
    order = leading(w, k, which)
    return w[order], V[:, order], "scipy.linalg.eigh", ""


def _by_arpack(A: Any, B: Any, k: int, which: str, tol: float, seed: int) -> tuple[np.ndarray, np.ndarray, str, str]:
    A, B = (M.astype(np.float64) if scipy.sparse.issparse(M) else M for M in (A, B))
    d = A.shape[0]
    options: dict[str, Any] = {"tol": tol, "v0": np.random.default_rng(seed).normal(size=d), "maxiter": 20 * d}
    options["ncv"] = min(d, max(2 * k + 1, k + 20))
    if B is not None:
        options |= {"M": B, "Minv": _inverse(B)}
    method, message = "scipy.sparse.linalg.eigsh", ""
    code = {"largest": "LA", "smallest": "SA", "magnitude": "LM"}[which]
    sparse = scipy.sparse.issparse(A) and (B is None or scipy.sparse.issparse(B))
    try:
        # The lower end of a Laplacian is crowded: where a first try gets nowhere, a factorisation is worth its cost.
        quick = {"maxiter": 100} if sparse and which == "smallest" else {}
        w, V = sla.eigsh(A, k, which=code, **(options | quick))
    except sla.ArpackNoConvergence as error:
        found = _by_inverse(A, B, k, error.eigenvalues, options) if quick else None
        if found is None:
            raise ValueError(f"ARPACK found {len(error.eigenvalues)} of k={k} pairs: give a larger tol") from error
        return *found, f"{method} with sigma", message
    w, V = _with_repeats(A, B, w, V, code, options)
    order = leading(w, k, which)
    return w[order], V[:, order], method, message


def _by_inverse(A: Any, B: Any, k: int, known: np.ndarray, options: dict[str, Any]) -> Any:
    """The smallest pairs by inverting ``A - σB``, with σ just under the spectrum; None if no such σ is found."""
    metric = scipy.sparse.eye_array(A.shape[0], format="csr") if B is None else B
    probe = options["v0"]
    size = np.linalg.norm(A @ probe) / np.linalg.norm(metric @ probe)
    start = min([0.0, *known.tolist()])
    for step in np.geomspace(1e-6, 10, 8) * size:
        sigma = start - step
        try:
            factor = _factor(A - sigma * metric)
        except ValueError:
            continue
        # A - σB is positive definite: nothing lies below σ, and what is nearest to it is smallest.
        inverse = sla.LinearOperator(A.shape, factor.solve, dtype=np.float64)
        rest = {key: value for key, value in options.items() if key != "Minv"}
        w, V = sla.eigsh(A, k, which="LM", sigma=sigma, OPinv=inverse, **rest)
        order = np.argsort(w)
        return w[order], V[:, order]
    return None


def _factor(M: Any) -> Any:
    """A sparse factorisation of a positive definite matrix."""
    try:
        factor = sla.splu(M.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError as error:
        raise ValueError(f"B is singular ({error}): add a ridge, B + r·tr(B)/d·I") from error
    # With diagonal pivots, U's diagonal holds those of LDLᵀ, whose signs are the inertia.
    if not (factor.U.diagonal() > 0).all():
        raise ValueError("B is not positive definite: add a ridge, B + r·tr(B)/d·I")
    return factor


def _with_repeats(A: Any, B: Any, w: Any, V: Any, code: str, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Add the copies of repeated eigenvalues that a Krylov space of one vector cannot see.

    The pairs found are moved to the far end of the spectrum; what is then still more extreme than the least of them was
    missed.
    """

    def key(w: Any) -> Any:
        return {"LA": w, "SA": -w, "LM": np.abs(w)}[code]

    d, size = A.shape[0], np.abs(w).max()
    for _ in range(len(w)):
        BV = V if B is None else B @ V
        goal = {"LA": -2 * size, "SA": 2 * size, "LM": 0.0}[code]

        def deflated(x: np.ndarray, BV: np.ndarray = BV, push: np.ndarray = goal - w) -> np.ndarray:
            return A @ x + BV @ (push * (BV.T @ x))

        operator = sla.LinearOperator((d, d), deflated, dtype=np.float64)
        try:
            more, U = sla.eigsh(operator, 1, which=code, **(options | {"ncv": min(d, 20)}))
        except sla.ArpackNoConvergence:
            break
        if key(more[0]) <= key(w).min() + 1e-9 * size:
            break
        keep = np.argsort(-key(w), kind="stable")[:-1]
        w, V = np.append(w[keep], more), np.column_stack([V[:, keep], U])
    return w, V


def _inverse(B: Any) -> sla.LinearOperator:
    """``B⁻¹``: the diagonal's reciprocals, a sparse factorisation, or conjugate gradients on an operator."""
    d = B.shape[0]
    if isinstance(B, np.ndarray):
        try:
            factor = scipy.linalg.cho_factor(B)
        except scipy.linalg.LinAlgError as error:
            raise ValueError(f"B is not positive definite ({error}): add a ridge, B + r·tr(B)/d·I") from error
        return sla.LinearOperator((d, d), lambda x: scipy.linalg.cho_solve(factor, x), dtype=np.float64)
    if not scipy.sparse.issparse(B):
        return sla.LinearOperator((d, d), lambda x: _conjugate_gradients(B, x), dtype=np.float64)
    factor = _factor(B)
    return sla.LinearOperator((d, d), factor.solve, dtype=np.float64)


def _conjugate_gradients(B: Any, x: np.ndarray) -> np.ndarray:
    solution, failed = sla.cg(B, x, rtol=1e-13, maxiter=20 * len(x))
    if failed:
        raise ValueError("B is too ill-conditioned for conjugate gradients: give it as a matrix, or add a ridge")
    return solution


def _in_jax(
    A: Any, B: Any, k: int, which: str, tol: float | None, max_steps: int, seed: int
) -> tuple[jax.Array, jax.Array, str, str]:
    d = A.shape[0]
    A, B = to_jax(A), to_jax(B)
    dtype = A.dtype if not isinstance(A, Matvec) or B is None else B.dtype
    solver = Game(extra=max(8, k // 4))
    whole = which == "magnitude" or solver.players(d, k) == d
    is_dense = isinstance(A, jax.Array) and (B is None or isinstance(B, jax.Array))
    if is_dense or whole:
        identity = jnp.eye(d, dtype=dtype)
        A, B = (M if M is None or isinstance(M, jax.Array) else M @ identity for M in (A, B))
        w, V = _dense(A if which != "smallest" else -A, B, d if which == "magnitude" else k)
        w = -w if which == "smallest" else w
        if not np.isfinite(np.asarray(w)).all():
            raise ValueError("B is not positive definite in this precision: add a ridge, B + r·tr(B)/d·I")
        order = leading(np.asarray(w), k, which)
        return w[order], V[:, order], "jax.numpy.linalg.eigh", ""
    limit = max(1e-8, 100 * float(jnp.finfo(dtype).eps)) if tol is None else tol
    problem: Problem = matrices(A, B)
    problem, sign = (Negated(problem), -1) if which == "smallest" else (problem, 1)
    state = _played(solver, problem, k, jax.random.key(seed), limit, max_steps)
    if bool(state.failed) or not np.isfinite(np.asarray(state.lam[:k])).all():
        raise ValueError("B is not positive definite in this precision, or A or B holds NaN: add a ridge, or mend them")
    worst = float(state.residuals.max())
    message = "" if worst <= limit else f"the residual is {worst:.2g} after {max_steps} steps, not {limit:.2g}"
    return sign * state.lam[:k], state.S[:k].T, "eigenstream.solvers.Game", message


@partial(jax.jit, static_argnames=("solver", "k", "max_steps"))
def _played(solver: Game, problem: Problem, k: int, key: jax.Array, tol: float, max_steps: int) -> GameState:
    """Moves on given products, until the ``k`` leading residuals are under ``tol``."""

    def unfinished(state: GameState) -> jax.Array:
        return (state.step < max_steps) & ((state.residuals > tol).any() | (state.moves < 2)) & ~state.failed

    def step(state: GameState) -> GameState:
        return solver.step(problem, state, None)[0]

    return jax.lax.while_loop(unfinished, step, solver.init(problem, None, k, key))


def _dense(A: jax.Array, B: jax.Array | None, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of dense JAX arrays, by Cholesky and `jax.numpy.linalg.eigh`."""
    if B is None:
        lam, V = jnp.linalg.eigh(A)
        return lam[::-1][:k], V[:, ::-1][:, :k]
    L = jnp.linalg.cholesky(B)
    half = jax.scipy.linalg.solve_triangular(L, A, lower=True)
    inner = jax.scipy.linalg.solve_triangular(L, half.T, lower=True)
    lam, W = jnp.linalg.eigh((inner + inner.T) / 2)
    return lam[::-1][:k], jax.scipy.linalg.solve_triangular(L, W[:, ::-1][:, :k], lower=True, trans=1)

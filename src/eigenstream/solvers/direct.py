"""Eigenpairs of matrices and operators on the host, by LAPACK and ARPACK in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

from eigenstream.core.ritz import leading
from eigenstream.problems.matrices import Matvec


class EighInfo(NamedTuple):
    """How `eigh` found the pairs."""

    #: The routine: for instance ``"scipy.linalg.eigh"``.
    method: str
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)`` of each pair.
    residuals: np.ndarray
    converged: bool
    #: The outcome in words.
    message: str


#: Dense A up to this size goes to LAPACK even if B is sparse: repeated eigenvalues do not slow it down.
SMALL = 2000


def solve_on_host(A: Any, B: Any, k: int, which: str, tol: float, seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Eigenvalues, ``(d, k)`` vectors and the routine's name, for NumPy and SciPy operands."""
    d = A.shape[0]
    if (isinstance(A, np.ndarray) and (B is None or isinstance(B, np.ndarray) or d <= SMALL)) or 2 * k > d:
        return by_lapack(A, B, k, which)
    return by_arpack(A, B, k, which, tol, seed)


def to_host(M: Any) -> Any:
    """A JAX operand as NumPy, SciPy or LinearOperator; a function of small dimension as its matrix."""
    if isinstance(M, jax.Array):
        return np.asarray(M, np.float64)
    if isinstance(M, jsparse.BCOO):
        return scipy.sparse.coo_array((np.asarray(M.data), np.asarray(M.indices).T), shape=M.shape).tocsr()
    if not isinstance(M, Matvec):
        return M
    if M.size <= SMALL:
        return np.asarray(M @ np.eye(M.size, dtype=M.dtype), np.float64)
    return sla.LinearOperator(M.shape, lambda x: np.asarray(M.function(x.astype(M.dtype))), dtype=M.dtype)


def by_lapack(A: Any, B: Any, k: int, which: str) -> tuple[np.ndarray, np.ndarray, str]:
    # d/2 or more vectors fill a dense d×d array in any case, so a dense copy of the input costs no more.
    A, B = (M if M is None or isinstance(M, np.ndarray) else M @ np.eye(M.shape[0]) for M in (A, B))
    A, B = (None if M is None else np.asarray(M, np.float64) for M in (A, B))
    d = len(A)
    subset = {"largest": [d - k, d - 1], "smallest": [0, k - 1], "magnitude": None}[which]
    try:
        w, V = scipy.linalg.eigh(A, B, subset_by_index=subset)
    except scipy.linalg.LinAlgError as error:
        raise ValueError(f"B is not positive definite ({error}): add a ridge, B + r·tr(B)/d·I") from error
    order = leading(w, k, which)
    return w[order], V[:, order], "scipy.linalg.eigh"


def by_arpack(A: Any, B: Any, k: int, which: str, tol: float, seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    A, B = (M.astype(np.float64) if scipy.sparse.issparse(M) else M for M in (A, B))
    d = A.shape[0]
    # An operator in float32 allows no smaller residual than its rounding.
    tol = max(tol, *(_rounding(M) for M in (A, B)))
    options: dict[str, Any] = {"tol": tol, "v0": np.random.default_rng(seed).normal(size=d), "maxiter": 20 * d}
    options["ncv"] = min(d, max(2 * k + 1, k + 20))
    if B is not None:
        options |= {"M": B, "Minv": _inverse(B)}
    method = "scipy.sparse.linalg.eigsh"
    code = {"largest": "LA", "smallest": "SA", "magnitude": "LM"}[which]
    sparse = scipy.sparse.issparse(A) and (B is None or scipy.sparse.issparse(B))
    try:
        # The smallest eigenvalues of a Laplacian are close together: try Lanczos briefly, then shift-invert.
        quick = {"maxiter": 100} if sparse and which == "smallest" else {}
        w, V = sla.eigsh(A, k, which=code, **(options | quick))
    except sla.ArpackNoConvergence as error:
        found = _by_inverse(A, B, k, error.eigenvalues, options) if quick else None
        if found is None:
            raise ValueError(f"ARPACK found {len(error.eigenvalues)} of k={k} pairs: give a larger tol") from error
        return *found, f"{method} with sigma"
    w, V = _with_repeats(A, B, w, V, code, options)
    order = leading(w, k, which)
    return w[order], V[:, order], method


def _by_inverse(A: Any, B: Any, k: int, known: np.ndarray, options: dict[str, Any]) -> Any:
    """The smallest pairs by shift-invert, with σ just below the spectrum; None if no such σ is found."""
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
        # A - σB is positive definite, so no eigenvalue is below σ and the nearest to σ are the smallest.
        inverse = sla.LinearOperator(A.shape, factor.solve, dtype=np.float64)
        rest = {key: value for key, value in options.items() if key != "Minv"}
        w, V = sla.eigsh(A, k, which="LM", sigma=sigma, OPinv=inverse, **rest)
        order = np.argsort(w)
        return w[order], V[:, order]
    return None


def _factor(M: Any) -> Any:
    """Factorise a sparse positive definite matrix."""
    try:
        factor = sla.splu(M.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError as error:
        raise ValueError(f"B is singular ({error}): add a ridge, B + r·tr(B)/d·I") from error
    # With diagonal pivots the diagonal of U is that of D in LDLᵀ, whose signs are the inertia.
    if not (factor.U.diagonal() > 0).all():
        raise ValueError("B is not positive definite: add a ridge, B + r·tr(B)/d·I")
    return factor


def _with_repeats(A: Any, B: Any, w: Any, V: Any, code: str, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Add the copies of repeated eigenvalues that a Krylov space of one vector cannot contain.

    Deflation moves the pairs found to the far end of the spectrum. A pair that is still more extreme than the last of
    them was missed.
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
    """``B⁻¹`` by a dense or sparse factorisation, or by conjugate gradients if ``B`` is an operator."""
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
    solution, failed = sla.cg(B, x, rtol=max(1e-13, _rounding(B)), maxiter=20 * len(x))
    if failed:
        raise ValueError("B is too ill-conditioned for conjugate gradients: give it as a matrix, or add a ridge")
    return solution


def _rounding(M: Any) -> float:
    return 10 * float(np.finfo(np.float32).eps) if M is not None and M.dtype == np.float32 else 0.0

"""Errors of eigenvectors. Vectors are columns, ``(d, k)``, as in SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from eigenstream.core import ritz

__all__ = ["angles", "proportion_captured", "residuals", "subspace_error", "tcc"]


def _apply(M: Any, V: np.ndarray) -> np.ndarray:
    return V if M is None else np.asarray(M @ V, np.float64)


def _squares(V: np.ndarray, M: Any) -> np.ndarray:
    """``⟨v, M v⟩`` of each column."""
    return (V * _apply(M, V)).sum(0)


def _pair(V: Any, V_true: Any) -> tuple[np.ndarray, np.ndarray]:
    V, V_true = np.asarray(V, np.float64), np.asarray(V_true, np.float64)
    if V.ndim != 2 or V.shape != V_true.shape:
        raise ValueError(f"V has shape {V.shape} and V_true {V_true.shape}: give two (d, k) arrays of columns")
    return V, V_true


def subspace_error(V: Any, V_true: Any, B: Any = None) -> float:
    """``1 - tr(U* P) / k`` for both spans mapped by ``B^{1/2}`` (appendix A): 0 if equal, 1 if orthogonal.

    Parameters
    ----------
    V, V_true : (d, k) arrays
    B : (d, d) array, sparse matrix or operator, optional
        The metric, used in products only. Default: the identity.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> round(es.metrics.subspace_error(np.eye(3)[:, :2], np.eye(3)[:, 1:]), 6)
    0.5
    """
    Q, Q_true = (_orthonormal(W, B) for W in _pair(V, V_true))
    # rank Q - ‖Q*ᵀ B Q‖² = ‖Q - Q* Q*ᵀ B Q‖²; the right side has no cancellation near 0. Missing directions count 1.
    rest = Q - Q_true @ (Q_true.T @ _apply(B, Q))
    k = np.shape(V)[1]
    return float((k - Q.shape[1] + _squares(rest, B).sum()) / k)


def _orthonormal(V: np.ndarray, B: Any) -> np.ndarray:
    norms = np.sqrt(_squares(V, B))
    V = V[:, norms > 0] / norms[norms > 0]
    for _ in range(2):
        gram = V.T @ _apply(B, V)
        sigma, U = scipy.linalg.eigh((gram + gram.T) / 2)
        keep = sigma > 1e-12 * sigma[-1]
        V = V @ U[:, keep] / np.sqrt(sigma[keep])
    return V


def angles(V: Any, V_true: Any, B: Any = None) -> np.ndarray:
    """The angle between each vector and its match in radians; signs do not matter.

    Parameters
    ----------
    V, V_true : (d, k) arrays
    B : (d, d) array, sparse matrix or operator, optional
        The metric of the angles. Default: the identity.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> np.degrees(es.metrics.angles(np.array([[1.0], [1.0]]), np.array([[-1.0], [0.0]]))).round().tolist()
    [45.0]
    """
    V, V_true = (W / np.sqrt(_squares(W, B)) for W in _pair(V, V_true))
    cosine = (V * _apply(B, V_true)).sum(0)
    rest = V - V_true * cosine
    return np.arctan2(np.sqrt(np.maximum(_squares(rest, B), 0)), np.abs(cosine))


def residuals(V: Any, eigenvalues: Any, A: Any, B: Any = None) -> np.ndarray:
    """``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)`` of each pair.

    Parameters
    ----------
    V : (d, k) array
    eigenvalues : (k,) array
    A, B : matrices, sparse matrices or operators
        Used in products only; ``‖A‖`` is estimated from products with ``V`` and with one random vector.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> es.metrics.residuals(np.eye(2), [2.0, 1.0], np.diag([2.0, 1.0])).tolist()
    [0.0, 0.0]
    """
    V, lam = np.asarray(V, np.float64), np.asarray(eigenvalues, np.float64)
    if V.ndim != 2 or lam.shape != V.shape[1:]:
        raise ValueError(f"V has shape {V.shape} and eigenvalues {lam.shape}: give (d, k) columns and k values")
    AV, BV = _apply(A, V), _apply(B, V)
    probe = np.random.default_rng(0).normal(size=(len(V), 1))
    norms = np.linalg.norm(V, axis=0)
    norm_A = max(np.linalg.norm(_apply(A, probe)) / np.linalg.norm(probe), (np.linalg.norm(AV, axis=0) / norms).max())
    return ritz.residuals(V.T, AV.T, BV.T, lam, norm_A)


def proportion_captured(V: Any, A: Any, B: Any = None, eigenvalues: Any = None) -> float:
    """The sum of the Rayleigh quotients over the sum of the leading eigenvalues (section 5).

    Parameters
    ----------
    V : (d, k) array
    A, B : matrices, sparse matrices or operators
    eigenvalues : array, optional
        The true eigenvalues. Default: computed, which needs dense matrices.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> es.metrics.proportion_captured(np.eye(3)[:, 1:2], np.diag([4.0, 3.0, 1.0]))
    0.75
    """
    V = np.asarray(V, np.float64)
    d, k = V.shape
    if eigenvalues is None:
        eigenvalues = scipy.linalg.eigh(A, B, eigvals_only=True, subset_by_index=[d - k, d - 1])
    quotients = _squares(V, A) / _squares(V, B)
    return float(quotients.sum() / np.sort(np.asarray(eigenvalues))[::-1][:k].sum())


def tcc(scores_x: Any, scores_y: Any, correlations: Any) -> float:
    """Total correlation captured: the sum of the canonical correlations of two sets of scores over its maximum.

    Parameters
    ----------
    scores_x, scores_y : (n, k) arrays
        Projections of the two views; an invertible combination of the columns gives the same value.
    correlations : array
        The exact correlations; the leading ``k`` are used.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> Z = np.random.default_rng(0).normal(size=(100, 2))
    >>> round(es.metrics.tcc(Z, Z @ [[1.0, 2.0], [0.0, 1.0]], [1.0, 1.0]), 6)
    1.0
    """
    bases = []
    for scores in (scores_x, scores_y):
        Z = np.asarray(scores, np.float64)
        Z = Z - Z.mean(0)
        norms = np.maximum(np.linalg.norm(Z, axis=0), np.finfo(float).tiny)
        bases.append(scipy.linalg.orth(Z / norms, rcond=1e-10))
    captured = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).sum()
    return float(captured / np.sort(np.asarray(correlations))[::-1][: np.shape(scores_x)[1]].sum())

"""Whitening of the diagonal blocks of ``B``: for each block ``T`` with ``Tᵀ B T = I``.

By the inverse of a Cholesky factor if the block is certain to have full rank, else by its eigenvectors. Arrays are on
the host, on a device, or sharded over a mesh (`eigenstream.core.mesh_cholesky`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from eigenstream import distributed
from eigenstream.core import mesh_cholesky
from eigenstream.core.precision import compiled

#: Triangles up to this size are inverted by a solve.
TRIANGLE = 2048


def whitened(B: list[Callable[[], Any]], cutoff: float) -> tuple[list[Any], list[int], float]:
    """For each block ``T`` of full column rank with ``Tᵀ B T = I`` and ``B T Tᵀ B = B``; ranks; the condition."""
    factors, worst = [], 1.0
    for block in B:
        T, bound = _by_cholesky(block())
        # Unless the block is certain to have full rank, its eigenvalues tell.
        factors.append(T if bound * cutoff < 1 else _by_eigh(block(), cutoff))
        worst = max(worst, bound)
    return factors, [T.shape[1] for T in factors], worst


def unit_scale(block: Any) -> np.ndarray:
    """Factors that give the block a unit diagonal; 0 for constant features."""
    diagonal = mesh_cholesky.diagonal(block) if mesh_cholesky.is_spread(block) else np.asarray(block.diagonal())
    scale = np.sqrt(np.maximum(diagonal, 0))
    alive = scale > np.finfo(np.float64).eps * scale.max(initial=0.0)
    return np.where(alive, 1 / np.where(alive, scale, 1), 0)


def _by_cholesky(block: Any) -> tuple[Any, float]:
    """By the inverse of a Cholesky factor, with a bound on the condition; infinite if there is no such factor."""
    factors, spread = unit_scale(block), mesh_cholesky.is_spread(block)
    inverse: Any = _inverse_factor if isinstance(block, np.ndarray) else _inverse_factor_on_device
    try:
        T, bound = (mesh_cholesky.inverse_factor if spread else inverse)(block, factors)
    except scipy.linalg.LinAlgError:
        return None, np.inf
    if not factors.all():
        T = mesh_cholesky.columns(T, np.flatnonzero(factors)) if spread else T[:, factors > 0]
    return T, float(bound) if np.isfinite(bound) else np.inf


def _inverse_factor(block: Any, factors: Any) -> tuple[Any, Any]:
    """``T = D L⁻ᵀ`` for ``D B D = L Lᵀ``, and a bound on the condition of ``D B D``.

    A constant feature has a row of zeros and gets a diagonal of 1.
    """
    xp: Any = np if isinstance(block, np.ndarray) else jnp
    unit = factors[:, None] * block * factors + xp.diag(xp.where(factors > 0, 0.0, 1.0))
    # 1/λ_min is at most tr(unit⁻¹) = ‖L⁻¹‖², and λ_max the largest row sum.
    largest = xp.abs(unit).sum(1).max()
    if xp is np:
        L = scipy.linalg.cholesky(unit, lower=True, overwrite_a=True, check_finite=False)
        M = scipy.linalg.lapack.dtrtri(L, lower=1, overwrite_c=1)[0]
    else:
        M = inverse_triangle(jax.lax.linalg.cholesky(unit, symmetrize_input=False))
    return (M * factors).T, largest * (M * M).sum()


_inverse_factor_on_device = compiled(_inverse_factor)


def inverse_triangle(L: jax.Array) -> jax.Array:
    """The inverse of a lower triangle, by halves: a device multiplies faster than it solves."""
    n = len(L)
    if n <= TRIANGLE:
        return jax.lax.linalg.triangular_solve(L, jnp.eye(n), left_side=True, lower=True)
    h = n // 2
    A, C = inverse_triangle(L[:h, :h]), inverse_triangle(L[h:, h:])
    return jnp.block([[A, jnp.zeros((h, n - h))], [-C @ (L[h:, :h] @ A), C]])


def _by_eigh(block: Any, cutoff: float) -> Any:
    """By the eigenvectors of the block, without those of eigenvalue 0."""
    factors = unit_scale(block)
    sigma, U = (_decomposed_unit if isinstance(block, np.ndarray) else _decomposed_unit_on_device)(block, factors)
    values = distributed.of_first(sigma)
    keep = values > cutoff * max(values[-1], 0)
    T = factors[:, None] * U[:, keep] / np.sqrt(values[keep])
    return mesh_cholesky.spread(T, block) if mesh_cholesky.is_spread(block) else T


def _decomposed_unit(block: Any, factors: Any) -> tuple[Any, Any]:
    unit = factors[:, None] * block[: len(factors)] * factors
    return (np if isinstance(block, np.ndarray) else jnp).linalg.eigh(unit)


_decomposed_unit_on_device = compiled(_decomposed_unit)

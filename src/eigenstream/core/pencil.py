"""The leading eigenpairs of a pencil of matrices: ``A`` by its products, ``B`` by its diagonal blocks.

``B`` is whitened block by block: ``T`` with ``Tᵀ B T = I``. The eigenvectors of ``Tᵀ A T`` then give those of the
pencil. One code serves NumPy arrays on the host and JAX arrays in float64 on a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import scipy.linalg

from eigenstream.core import krylov
from eigenstream.core.precision import compiled
from eigenstream.core.ritz import leading

#: A residual of the iteration above this asks for a decomposition, up to these dimensions on the host and on a device.
ROUGH, HOST_LIMIT, DEVICE_LIMIT = 1e-8, 5000, 12000
#: Triangles up to this size are inverted by a solve.
TRIANGLE = 2048
#: Up to this dimension a device decomposes as fast as it iterates.
DEVICE_SMALL = 2048


class Solved(NamedTuple):
    """Eigenvalues, ``(d, k)`` B-orthonormal vectors, the ranks of ``B``'s blocks, and the routine's name."""

    eigenvalues: np.ndarray
    vectors: Any
    ranks: list[int]
    method: str
    #: The largest residual of an iteration in whitened coordinates, relative as in `eigenstream.core.krylov.relative`.
    residual: float = 0.0
    #: An upper bound on the condition of ``B`` scaled to unit diagonal.
    condition: float = 1.0

    @property
    def converged(self) -> bool:
        return self.residual <= ROUGH

    def first(self, k: int) -> Solved:
        return self._replace(eigenvalues=self.eigenvalues[:k], vectors=self.vectors[:, :k])

    def scaled(self, factor: float) -> Solved:
        """The solution for ``factor · B``."""
        return self._replace(eigenvalues=self.eigenvalues / factor, vectors=self.vectors / factor**0.5)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reduced:
    """``sign · Tᵀ A T`` as an operator on ``(r, b)`` arrays; ``T`` has one ``(d, r)`` array for each block of ``B``."""

    operands: Any
    T: list[Any] | None
    #: ``times(operands, V)`` is ``A V`` for the columns of ``V``.
    times: Callable[[Any, Any], Any] = field(metadata={"static": True})
    sign: int = field(metadata={"static": True})

    def __call__(self, Z: Any) -> Any:
        AV = self.sign * self.times(self.operands, self.lifted(Z))
        if self.T is None:
            return AV
        return _stacked([t.T @ part for t, part in zip(self.T, _cut(AV, [len(t) for t in self.T]), strict=True)])

    def lifted(self, Z: Any) -> Any:
        """``T Z``: coordinates to vectors."""
        if self.T is None:
            return Z
        return _stacked([t @ part for t, part in zip(self.T, _cut(Z, [t.shape[1] for t in self.T]), strict=True)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Across:
    """``M Mᵀ`` as an operator, where ``M = T_xᵀ C T_y`` is the covariance of two whitened views."""

    C: Any
    T: list[Any] | None

    def __call__(self, Z: Any) -> Any:
        return self.left(self.right(Z))

    def right(self, Z: Any) -> Any:
        """``Mᵀ Z``."""
        return self.C.T @ Z if self.T is None else self.T[1].T @ (self.C.T @ (self.T[0] @ Z))

    def left(self, Z: Any) -> Any:
        """``M Z``."""
        return self.C @ Z if self.T is None else self.T[0].T @ (self.C @ (self.T[1] @ Z))


def _of_two_views(C: Any, T: list[Any] | None, ranks: list[int], k: int, sign: int) -> Solved:
    """The singular vectors of the covariance of two whitened views, which are the eigenvectors of both together.

    One step of ``M Mᵀ`` counts for two of the operator on both views, on vectors of half the length.
    """
    host = isinstance(C, np.ndarray)
    xp: Any = np if host else jnp
    # The products of a processor wait for memory: one matrix is read faster than three.
    whole = Across(T[0].T @ (C @ T[1]), None) if host and T is not None else Across(C, T)
    found = krylov.largest(whole, ranks[0], k, host)
    Q, R = xp.linalg.qr(whole.right(found.vectors))
    P, rho, W = np.linalg.svd(np.asarray(R).T)
    u, v = found.vectors @ P, Q @ W.T
    rest = np.asarray(xp.linalg.norm(whole.left(v) - u * rho, axis=0))
    pair = (u, sign * v) if T is None else (T[0] @ u, sign * (T[1] @ v))
    residual = float(krylov.relative(rest, rho, rho[0], np))
    return Solved(sign * rho, xp.concatenate(pair) / 2**0.5, ranks, "block Lanczos", residual)


def solve(
    times: Callable[[Any, Any], Any],
    operands: Any,
    B: list[Callable[[], Any]] | None,
    C: Any,
    sizes: list[int],
    k: int,
    which: str,
    cutoff: float,
) -> Solved:
    """Solve ``A v = λ B v`` on the range of ``B``, which may be singular; ``B`` of None is the identity.

    Each block of ``B`` is scaled to unit diagonal, so that its rank does not depend on the features' units. Its
    eigenvalues below ``cutoff``, relative to the largest, count as 0. ``C``: if ``A`` is the covariance ``C`` between
    two views, beside its transpose; else None.
    """
    T, ranks, condition = (None, sizes, 1.0) if B is None else _whitened(B, cutoff)
    found = _solve(times, operands, T, C, ranks, k, which)
    return found._replace(condition=condition)


def _solve(
    times: Callable[[Any, Any], Any],
    operands: Any,
    T: list[Any] | None,
    C: Any,
    ranks: list[int],
    k: int,
    which: str,
) -> Solved:
    """The leading pairs, given the whitening ``T`` of ``B``."""
    rank = sum(ranks)
    count = min(k, rank)
    if not rank:
        return Solved(np.zeros(0), np.zeros((sum(map(len, T or ())), 0)), ranks, "none")
    first = jax.tree.leaves((operands, T))[0]
    host = isinstance(first, np.ndarray)
    small = not host and rank <= DEVICE_SMALL and len(first.devices()) == 1
    reduced = Reduced(operands, T, times, -1 if which == "smallest" else 1)
    found = []
    if which != "magnitude" and not small:
        if C is not None and krylov.fits(min(ranks), count):
            found.append(_of_two_views(C, T, ranks, count, reduced.sign))
        # The squares of small singular values may be below rounding error. Their operator on both views has them.
        if krylov.fits(rank, count) and not any(one.converged for one in found):
            lam, Z, residual = krylov.largest(reduced, rank, count, host)
            vectors = reduced.lifted(Z)
            found.append(Solved(reduced.sign * np.asarray(lam), vectors, ranks, "block Lanczos", residual))
    best = min(found, key=lambda one: one.residual, default=None)
    if best is not None and (best.converged or rank > (HOST_LIMIT if host else DEVICE_LIMIT)):
        return best
    H = reduced(np.eye(rank) if host else jnp.eye(rank))
    H = (H + H.T) / 2
    if host and which != "magnitude" and count < rank:
        lam, R = scipy.linalg.eigh(H, subset_by_index=[rank - count, rank - 1])
    else:
        lam, R = np.linalg.eigh(H) if host else jnp.linalg.eigh(H)
    lam = reduced.sign * np.asarray(lam)
    order = leading(lam, count, which)
    return Solved(lam[order], reduced.lifted(R[:, order]), ranks, "eigh")


def _whitened(B: list[Callable[[], Any]], cutoff: float) -> tuple[list[Any], list[int], float]:
    """For each block ``T`` of full column rank with ``Tᵀ B T = I`` and ``B T Tᵀ B = B``; ranks; the condition."""
    factors, worst = [], 1.0
    for block in B:
        T, bound = _by_cholesky(block())
        # Unless the block is certain to have full rank, its eigenvalues tell.
        factors.append(T if bound * cutoff < 1 else _by_eigh(block(), cutoff))
        worst = max(worst, bound)
    return factors, [T.shape[1] for T in factors], worst


def _scale(block: Any) -> np.ndarray:
    """Factors that give the block a unit diagonal; 0 for constant features."""
    scale = np.sqrt(np.maximum(np.asarray(block.diagonal()), 0))
    alive = scale > np.finfo(np.float64).eps * scale.max(initial=0.0)
    return np.where(alive, 1 / np.where(alive, scale, 1), 0)


def _by_cholesky(block: Any) -> tuple[Any, float]:
    """By the inverse of a Cholesky factor, with a bound on the condition; infinite if there is no such factor."""
    factors = _scale(block)
    try:
        T, bound = (_inverse_factor if isinstance(block, np.ndarray) else _inverse_factor_on_device)(block, factors)
    except scipy.linalg.LinAlgError:
        return None, np.inf
    return T if factors.all() else T[:, factors > 0], float(bound) if np.isfinite(bound) else np.inf


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
        M = _inverse(jax.lax.linalg.cholesky(unit, symmetrize_input=False))
    return (M * factors).T, largest * (M * M).sum()


_inverse_factor_on_device = compiled(_inverse_factor)


def _inverse(L: jax.Array) -> jax.Array:
    """The inverse of a lower triangle, by halves: a device multiplies faster than it solves."""
    n = len(L)
    if n <= TRIANGLE:
        return jax.lax.linalg.triangular_solve(L, jnp.eye(n), left_side=True, lower=True)
    h = n // 2
    A, C = _inverse(L[:h, :h]), _inverse(L[h:, h:])
    return jnp.block([[A, jnp.zeros((h, n - h))], [-C @ (L[h:, :h] @ A), C]])


def _by_eigh(block: Any, cutoff: float) -> Any:
    """By the eigenvectors of the block, without those of eigenvalue 0."""
    factors = _scale(block)
    unit = factors[:, None] * block * factors
    sigma, U = np.linalg.eigh(unit) if isinstance(block, np.ndarray) else jnp.linalg.eigh(unit)
    values = np.asarray(sigma)
    keep = values > cutoff * max(values[-1], 0)
    return factors[:, None] * U[:, keep] / np.sqrt(values[keep])


def _cut(X: Any, sizes: list[int]) -> list[Any]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [X[a:b] for a, b in itertools.pairwise(ends)]


def _stacked(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else jnp.concatenate(parts)

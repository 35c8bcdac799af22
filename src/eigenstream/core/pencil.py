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
from eigenstream.core.ritz import leading

#: A residual of the iteration above this asks for a decomposition, up to these dimensions on the host and on a device.
ROUGH, HOST_LIMIT, DEVICE_LIMIT = 1e-8, 5000, 12000
#: Up to this dimension a device decomposes as fast as it iterates.
DEVICE_SMALL = 2048


class Solved(NamedTuple):
    """Eigenvalues, ``(d, k)`` B-orthonormal vectors, the ranks of ``B``'s blocks, and the routine's name."""

    eigenvalues: np.ndarray
    vectors: Any
    ranks: list[int]
    method: str
    #: The residual of an iteration in whitened coordinates, relative to the largest eigenvalue.
    residual: float = 0.0

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


def solve(
    times: Callable[[Any, Any], Any],
    operands: Any,
    B: list[Any] | None,
    sizes: list[int],
    k: int,
    which: str,
    cutoff: float,
) -> Solved:
    """Solve ``A v = λ B v`` on the range of ``B``, which may be singular; ``B`` of None is the identity.

    Each block of ``B`` is scaled to unit diagonal, so that its rank does not depend on the features' units. Its
    eigenvalues below ``cutoff``, relative to the largest, count as 0.
    """
    T, ranks = (None, sizes) if B is None else _whitened(B, cutoff)
    rank = sum(ranks)
    count = min(k, rank)
    if not rank:
        return Solved(np.zeros(0), np.zeros((sum(sizes), 0)), ranks, "none")
    host = isinstance(jax.tree.leaves((operands, T))[0], np.ndarray)
    reduced = Reduced(operands, T, times, -1 if which == "smallest" else 1)
    if which != "magnitude" and krylov.fits(rank, count) and (host or rank > DEVICE_SMALL):
        found = krylov.largest(reduced, rank, count, host)
        if found.residual <= ROUGH or rank > (HOST_LIMIT if host else DEVICE_LIMIT):
            lam = reduced.sign * np.asarray(found.values)
            return Solved(lam, reduced.lifted(found.vectors), ranks, "block Lanczos", found.residual)
    H = reduced(np.eye(rank) if host else jnp.eye(rank))
    H = (H + H.T) / 2
    if host and which != "magnitude" and count < rank:
        lam, R = scipy.linalg.eigh(H, subset_by_index=[rank - count, rank - 1])
    else:
        lam, R = np.linalg.eigh(H) if host else jnp.linalg.eigh(H)
    lam = reduced.sign * np.asarray(lam)
    order = leading(lam, count, which)
    return Solved(lam[order], reduced.lifted(R[:, order]), ranks, "eigh")


def _whitened(B: list[Any], cutoff: float) -> tuple[list[Any], list[int]]:
    """For each block ``T`` of full column rank with ``Tᵀ B T = I`` and ``B T Tᵀ B = B``, and the ranks."""
    scales = [np.sqrt(np.maximum(np.asarray(block.diagonal()), 0)) for block in B]
    least = np.finfo(np.float64).eps * max(scale.max(initial=0.0) for scale in scales)
    factors = []
    for i, scale in enumerate(scales):
        alive = scale > least
        inverse = np.where(alive, 1 / np.where(alive, scale, 1), 0)
        # Not bound to a name: blocks are freed as they are factored.
        unit, B[i] = _unit(B[i], inverse), None
        factors.append(_by_cholesky(unit, inverse, alive, cutoff) or _by_eigh(unit, inverse, cutoff))
    return [T for T, _ in factors], [rank for _, rank in factors]


def _by_cholesky(unit: Any, inverse: np.ndarray, alive: np.ndarray, cutoff: float) -> tuple[Any, int] | None:
    """By the inverse Cholesky factor ``M``; None unless the block is certain to have full rank."""
    if isinstance(unit, np.ndarray):
        try:
            L = scipy.linalg.cholesky(unit, lower=True, check_finite=False)
        except scipy.linalg.LinAlgError:
            return None
        M = scipy.linalg.lapack.dtrtri(L, lower=1, overwrite_c=1)[0]
    else:
        M = _inverse_factor(unit)
    # 1/λ_min ≤ tr(B⁻¹) = ‖M‖², and λ_max is at most the largest row sum.
    largest = float(abs(unit).sum(1).max())
    if not float((M * M).sum()) * cutoff * largest < 1:
        return None
    T = (M * inverse).T
    return T if alive.all() else T[:, alive], int(alive.sum())


def _by_eigh(unit: Any, inverse: np.ndarray, cutoff: float) -> tuple[Any, int]:
    """By the eigenvectors of the block, without those of eigenvalue 0."""
    dead = inverse == 0
    sigma, U = np.linalg.eigh(unit) if isinstance(unit, np.ndarray) else jnp.linalg.eigh(unit)
    values = np.array(sigma)
    # A constant feature is an eigenvector of its own, of eigenvalue 1.
    constant = np.asarray((U * U * dead[:, None]).sum(0)) > 0.5
    keep = (values > cutoff * max(values[-1], 0)) & ~constant
    T = inverse[:, None] * U[:, keep] / np.sqrt(values[keep])
    return T, int(keep.sum())


def _unit(block: Any, inverse: np.ndarray) -> Any:
    """The block scaled to unit diagonal. Constant features get a diagonal of 1, to be left out later."""
    if isinstance(block, np.ndarray):
        out = inverse[:, None] * block * inverse
        out[np.diag_indices(len(out))] = 1
        return out
    return _unit_on_device(block, inverse)


@jax.jit
def _unit_on_device(block: jax.Array, inverse: jax.Array) -> jax.Array:
    return jnp.fill_diagonal(inverse[:, None] * block * inverse, 1.0, inplace=False)


@jax.jit
def _inverse_factor(unit: jax.Array) -> jax.Array:
    L = jax.lax.linalg.cholesky(unit, symmetrize_input=False)
    return jax.lax.linalg.triangular_solve(L, jnp.eye(len(unit)), left_side=True, lower=True)


def _cut(X: Any, sizes: list[int]) -> list[Any]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [X[a:b] for a, b in itertools.pairwise(ends)]


def _stacked(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else jnp.concatenate(parts)

"""The leading eigenpairs of a pencil of matrices: ``A`` by its products, ``B`` by its diagonal blocks.

``B`` is whitened block by block: ``T`` with ``Tᵀ B T = I``. The eigenvectors of ``Tᵀ A T`` then give those of the
pencil. One code serves NumPy arrays on the host and JAX arrays in float64 on a device. On a mesh the rows of matrices
are sharded, with rows of zeros at the end; vectors are on every device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import scipy.linalg

from eigenstream import distributed
from eigenstream.core import krylov, mesh_cholesky
from eigenstream.core.moments import spans
from eigenstream.core.precision import compiled
from eigenstream.core.ritz import leading
from eigenstream.core.whitening import inverse_triangle, unit_scale, whitened

#: A residual of the iteration above this asks for a decomposition, up to these dimensions on the host and on a device.
ROUGH, HOST_LIMIT, DEVICE_LIMIT = 1e-8, 5000, 12000
#: The largest dimensions that are decomposed as fast as an iteration takes, on a processor and on a device.
HOST_SMALL, DEVICE_SMALL = 3072, 2048
#: Squared correlations of noise above which two views are solved by an inverse; its shift above 1, which exceeds the
#: rounding errors of covariances.
CROWDED, SHIFT = 0.9, 1 + 1e-6
#: Column panels of a product with a triangular factor, and row panels of the lower triangle of a symmetric product.
PANELS = 8


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
    #: The dimensions of the blocks.
    sizes: tuple[int, ...] = field(metadata={"static": True})
    sign: int = field(default=1, metadata={"static": True})

    def __call__(self, Z: Any) -> Any:
        AV = self.sign * self.times(self.operands, self.lifted(Z))
        if self.T is None:
            return AV
        parts = zip(self.T, _cut(AV, self.sizes), strict=True)
        return _stacked([t.T @ _resized(part, len(t)) for t, part in parts])

    def lifted(self, Z: Any) -> Any:
        """``T Z``: coordinates to vectors."""
        if self.T is None:
            return Z
        parts = zip(self.T, _cut(Z, [t.shape[1] for t in self.T]), self.sizes, strict=True)
        return _stacked([_resized(t @ part, size) for t, part, size in parts])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Across:
    """``M Mᵀ`` as an operator, where ``M = T_xᵀ C T_y`` is the covariance of two whitened views."""

    C: Any
    T: list[Any] | None
    #: The dimensions of the views.
    sizes: tuple[int, int] = field(metadata={"static": True})

    def __call__(self, Z: Any) -> Any:
        return self.left(self.right(Z))

    def right(self, Z: Any) -> Any:
        """``Mᵀ Z``."""
        V = self.C.T @ _resized(self.lifted(0, Z), len(self.C))
        return _resized(V, self.sizes[1]) if self.T is None else self.T[1].T @ _resized(V, len(self.T[1]))

    def left(self, Z: Any) -> Any:
        """``M Z``."""
        V = self.C @ _resized(self.lifted(1, Z), self.C.shape[1])
        return _resized(V, self.sizes[0]) if self.T is None else self.T[0].T @ _resized(V, len(self.T[0]))

    def lifted(self, view: int, Z: Any) -> Any:
        """Coordinates of a view to vectors."""
        return Z if self.T is None else _resized(self.T[view] @ Z, self.sizes[view])


def is_small(x: Any, d: int) -> bool:
    """Whether a matrix of dimension ``d`` beside ``x`` is decomposed as fast as an iteration takes."""
    if isinstance(x, np.ndarray):
        return d <= HOST_SMALL
    return d <= DEVICE_SMALL and len(x.devices()) == 1


def _of_two_views(
    C: Any,
    T: list[Any] | None,
    B: list[Callable[[], Any]] | None,
    sizes: tuple[int, int],
    ranks: list[int],
    k: int,
    sign: int,
    n: float,
) -> list[Solved]:
    """The singular vectors of the covariance of two whitened views, which are the eigenvectors of both together.

    One step of ``M Mᵀ`` counts for two of the operator on both views, on vectors of half the length or less. Several
    ways are tried, until one has converged.
    """
    host, spread, crowded = isinstance(C, np.ndarray), mesh_cholesky.is_spread(C), crowd(n, ranks)
    # The view of the smaller rank first; a transpose of sharded rows would be sharded by columns.
    flip = ranks[1] < ranks[0] and not spread
    if flip:
        C, T, B, sizes = C.T, T and T[::-1], B and B[::-1], sizes[::-1]
    d, other = ranks[::-1] if flip else ranks
    whole = Across(C, T, sizes)
    if T is not None and (host or not (spread or crowded)):
        # An iteration reads one matrix faster than three.
        M = (_between if host else _between_on_device)(C, T, *map(_is_triangular, T))
        whole = Across(M, None, (d, other))
    ways: list[tuple[str, Callable[[], Any]]] = []
    if is_small(C, d):
        ways.append(("eigh", partial(_decomposed if host else _decomposed_on_device, whole, d, k)))
    elif krylov.fits(d, k):
        ways.append(("block Lanczos", lambda: krylov.largest(whole, d, k, host).vectors))
    if T is not None and B is not None and krylov.fits(d, k):
        ways.append(("shifted inverse", partial(_inverted, C, T, B[0], sizes, k)))
    found = []
    for name, way in reversed(ways) if crowded else ways:
        left = way()
        if left is not None:
            rho, vectors, rest = (_paired if host else _paired_on_device)(whole, left, Across(C, T, sizes), sign, flip)
            rho, rest = map(distributed.of_first, (rho, rest))
            found.append(Solved(sign * rho, vectors, ranks, name, float(krylov.relative(rest, rho, rho[0], np))))
            if found[-1].converged:
                break
    return found


def crowd(n: float, ranks: list[int]) -> bool:
    """Whether the correlations of ``n`` rows of noise in views of these ranks reach CROWDED (Wachter, 1980)."""
    x, y = (min(r / n, 0.5) for r in ranks)
    return ((x * (1 - y)) ** 0.5 + (y * (1 - x)) ** 0.5) ** 2 > CROWDED


def _inverted(C: Any, T: list[Any], Bx: Callable[[], Any], sizes: tuple[int, int], k: int) -> Any | None:
    """The leading left singular vectors by the inverse of ``σ - M Mᵀ``, with ``σ`` just above the largest correlation.

    Correlations that crowd at 1 have gaps of 10⁻⁶ and less, which the inverse spreads. In features, ``σ - M Mᵀ`` is
    ``S = σ Bx - C By⁻¹ Cᵀ``; with ``Uᵀ S U = I`` the largest eigenvalues of ``Uᵀ Bx U`` are wanted. None if rounding
    errors make ``S`` indefinite.
    """
    host, spread = isinstance(C, np.ndarray), mesh_cholesky.is_spread(C)
    square = spread or T[0].shape[1] == sizes[0]
    # Where Bx is singular, its range takes the place of the features.
    X = Bx() if square else (np if host else jnp).eye(T[0].shape[1])
    try:
        if spread:
            alive = unit_scale(X) > 0
            if alive.sum() > T[0].shape[1]:
                # More than constant features are left out.
                return None
            U, _ = mesh_cholesky.inverse_factor(mesh_cholesky.shifted(X, C, T[1], SHIFT), alive.astype(float))
            U = mesh_cholesky.columns(U, np.flatnonzero(alive))
        else:
            U = (_shifted_factor if host else _shifted_factor_on_device)(X, C, T, square, _is_triangular(T[1]))
    except scipy.linalg.LinAlgError:
        return None
    found = krylov.largest(Reduced(X, [U], _product, (X.shape[1],)), U.shape[1], k, host)
    if not np.isfinite(found.residual):
        return None
    return (_in_whitened if host else _in_whitened_on_device)(X, U, T, found.vectors, square)


def _is_triangular(T: Any) -> bool:
    """Whether a factor is the inverse of a Cholesky factor, or else made of eigenvectors."""
    return T.shape[0] == T.shape[1] and not np.asarray(T[-1, :-1]).any()


def _between(C: Any, T: list[Any], first: bool, second: bool) -> Any:
    """``M = T_xᵀ C T_y``; ``first`` and ``second``: whether these factors are triangular."""
    return _times_factor(_times_factor(C, T[1], second).T, T[0], first).T


def _times_factor(C: Any, T: Any, triangular: bool) -> Any:
    """``C T``, without the products with the zeros of a triangular factor."""
    if not triangular:
        return C @ T
    xp: Any = np if isinstance(C, np.ndarray) else jnp
    return xp.concatenate([C[:, :b] @ T[:b, a:b] for a, b in spans(len(T), PANELS)], 1)


def _shifted_factor(X: Any, C: Any, T: list[Any], square: bool, triangular: bool) -> Any:
    """``U`` with ``Uᵀ S U = I``; not finite, or an error, if ``S`` is indefinite."""
    N = _times_factor(C, T[1], triangular)
    N = N if square else T[0].T @ N
    if isinstance(N, np.ndarray):
        L = scipy.linalg.cholesky(SHIFT * X - N @ N.T, lower=True, overwrite_a=True, check_finite=False)
        return scipy.linalg.lapack.dtrtri(L, lower=1, overwrite_c=1)[0].T
    # Only the lower panels are read.
    S = [jnp.pad(SHIFT * X[a:b, :b] - N[a:b] @ N[:b].T, ((0, 0), (0, len(X) - b))) for a, b in spans(len(X), PANELS)]
    return inverse_triangle(jax.lax.linalg.cholesky(jnp.concatenate(S), symmetrize_input=False)).T


def _in_whitened(X: Any, U: Any, T: list[Any], F: Any, square: bool) -> Any:
    """Vectors ``U F`` in orthonormal whitened coordinates; ``T⁻¹ = Tᵀ Bx`` if ``T`` is square."""
    xp: Any = np if isinstance(X, np.ndarray) else jnp
    a = U @ F
    return xp.linalg.qr(T[0].T @ (X @ _resized(a, X.shape[1])) if square else a)[0]


def _product(matrix: Any, V: Any) -> Any:
    return matrix @ V


def _paired(whole: Across, left: Any, views: Across, sign: int, flip: bool) -> tuple[Any, Any, Any]:
    """Singular values, vectors of both views, and residuals, from the span of the left singular vectors."""
    xp: Any = np if isinstance(left, np.ndarray) else jnp
    Q, R = xp.linalg.qr(whole.right(left))
    P, rho, W = xp.linalg.svd(R.T)
    u, v = left @ P, Q @ W.T
    rest = xp.linalg.norm(whole.left(v) - u * rho, axis=0)
    pair = views.lifted(0, u), sign * views.lifted(1, v)
    return rho, xp.concatenate(pair[::-1] if flip else pair) / 2**0.5, rest


def _decomposed(whole: Across, d: int, k: int) -> Any:
    """The leading left singular vectors by the eigenvectors of ``M Mᵀ``."""
    if isinstance(whole.C, np.ndarray):
        return _top(whole.C @ whole.C.T, k)[1]
    return jnp.linalg.eigh(whole(jnp.eye(d)))[1][:, : -1 - k : -1]


def _formed(reduced: Reduced, rank: int) -> Any:
    H = reduced((np if isinstance(jax.tree.leaves(reduced)[0], np.ndarray) else jnp).eye(rank))
    return (H + H.T) / 2


@partial(compiled, static_argnums=1)
def _spectrum_on_device(reduced: Reduced, rank: int) -> Any:
    return jnp.linalg.eigh(_formed(reduced, rank))


_between_on_device = compiled(_between, static_argnums=(2, 3))
_paired_on_device = compiled(_paired, static_argnums=(3, 4))
_decomposed_on_device = compiled(_decomposed, static_argnums=(1, 2))
_shifted_factor_on_device = compiled(_shifted_factor, static_argnums=(3, 4))
_in_whitened_on_device = compiled(_in_whitened, static_argnums=4)


def _top(H: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` largest eigenvalues of a host matrix, descending, and their vectors."""
    lam, V = scipy.linalg.eigh(H, subset_by_index=[len(H) - k, len(H) - 1], overwrite_a=True, check_finite=False)
    return lam[::-1], V[:, ::-1]


def solve(
    times: Callable[[Any, Any], Any],
    operands: Callable[[], Any],
    B: list[Callable[[], Any]] | None,
    C: Callable[[], Any] | None,
    sizes: list[int],
    k: int,
    which: str,
    cutoff: float,
    n: float,
) -> Solved:
    """Solve ``A v = λ B v`` on the range of ``B``, which may be singular; ``B`` of None is the identity.

    Each block of ``B`` is scaled to unit diagonal, so that its rank does not depend on the features' units. Its
    eigenvalues below ``cutoff``, relative to the largest, count as 0. ``C``: if ``A`` is the covariance ``C`` between
    two views, beside its transpose; else None. Functions form the matrices when they are needed. ``n``: the number of
    rows behind them.
    """
    T, ranks, condition = (None, sizes, 1.0) if B is None else whitened(B, cutoff)
    found = _solve(times, operands, B, T, C, tuple(sizes), ranks, k, which, n)
    return found._replace(condition=condition)


def _solve(
    times: Callable[[Any, Any], Any],
    operands: Callable[[], Any],
    B: list[Callable[[], Any]] | None,
    T: list[Any] | None,
    C: Callable[[], Any] | None,
    sizes: tuple[int, ...],
    ranks: list[int],
    k: int,
    which: str,
    n: float,
) -> Solved:
    """The leading pairs, given the whitening ``T`` of ``B``."""
    rank = sum(ranks)
    count = min(k, rank)
    if not rank:
        return Solved(np.zeros(0), np.zeros((sum(sizes), 0)), ranks, "none")
    sign = -1 if which == "smallest" else 1
    found: list[Solved] = []
    if C is not None and which != "magnitude" and count <= min(ranks):
        found = _of_two_views(C(), T, B, (sizes[0], sizes[1]), ranks, count, sign, n)
        if found and found[-1].converged:
            return found[-1]
    # The squares of small singular values may be below rounding error. Their operator on both views has them.
    reduced = Reduced(operands(), T, times, sizes, sign)
    first = jax.tree.leaves(reduced)[0]
    host = isinstance(first, np.ndarray)
    few = krylov.is_low(n, rank) and not (mesh_cholesky.is_spread(first) and krylov.fits(rank, count))
    if T is None and C is None and which == "largest" and few:
        # The covariance of fewer rows than columns. On a mesh its range would be on every device.
        lam, Z, residual = krylov.of_low_rank(reduced, rank, count, int(n), host)
        found.append(Solved(distributed.fetched(lam), Z, ranks, "range of few rows", residual))
        if found[-1].converged:
            return found[-1]
    if which != "magnitude" and krylov.fits(rank, count) and not (C is None and is_small(first, rank)):
        lam, Z, residual = krylov.largest(reduced, rank, count, host)
        found.append(Solved(sign * distributed.fetched(lam), reduced.lifted(Z), ranks, "block Lanczos", residual))
    best = min(found, key=lambda one: one.residual, default=None)
    if best is not None and (best.converged or rank > (HOST_LIMIT if host else DEVICE_LIMIT)):
        return best
    if host and which != "magnitude" and count < rank:
        lam, R = _top(_formed(reduced, rank), count)
    else:
        lam, R = np.linalg.eigh(_formed(reduced, rank)) if host else _spectrum_on_device(reduced, rank)
    lam = sign * distributed.of_first(lam)
    order = leading(lam, count, which)
    return Solved(lam[order], reduced.lifted(R[:, order]), ranks, "eigh")


def _resized(X: Any, rows: int) -> Any:
    """The first rows, or all and rows of zeros."""
    if len(X) < rows:
        return (np if isinstance(X, np.ndarray) else jnp).pad(X, ((0, rows - len(X)), (0, 0)))
    return X[:rows]


def _cut(X: Any, sizes: Sequence[int]) -> list[Any]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [X[a:b] for a, b in itertools.pairwise(ends)]


def _stacked(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else jnp.concatenate(parts)

"""The largest eigenvalues of a symmetric operator by the block Lanczos method with thick restarts.

The basis is orthogonalised in full. A cycle grows it to BLOCKS blocks, solves the projected problem and keeps the best
KEPT blocks of Ritz vectors. The span then also contains the Krylov space of those vectors. One code serves NumPy and
JAX arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import distributed
from eigenstream.core.precision import compiled

#: Vectors in a block beyond those asked for. A block of at least k finds eigenvalues of any multiplicity.
EXTRA = 8
#: Blocks in a full basis, those kept at a restart, and how many times smaller than the dimension a basis must be.
BLOCKS, KEPT, SMALL = 10, 3, 4
#: The residual of a pair to reach, relative to its Ritz value, or to this share of the largest one.
TOLERANCE, SMALLEST = 1e-10, 1e-6
#: Cycles at most, and cycles without progress before rounding is taken to be the limit.
CYCLES, IDLE = 60, 4
#: A new direction below this, relative to the image that it is part of, is rounding error.
LOST = 1e-12
#: Unit vectors whose Cholesky factor has a diagonal above this lose less than half of the digits by it.
APART = 1e-4


class Leading(NamedTuple):
    """Ritz values, descending, ``(d, k)`` orthonormal vectors, and the largest relative residual."""

    values: Any
    vectors: Any
    residual: float


def fits(d: int, k: int) -> bool:
    """Whether a basis is small against the dimension, so that iterating costs less than a decomposition."""
    return SMALL * BLOCKS * (k + EXTRA) <= d


def is_low(rank: float, d: int) -> bool:
    """Whether the range of an operator of this rank costs less than a decomposition."""
    return SMALL * (rank + EXTRA) <= d


def _expand(operator: Any, Q: Any, AQ: Any, W: Any, step: Any, at: Any) -> tuple[Any, Any, Any]:
    """Append the part of ``W`` that is orthogonal to the basis ``Q``; the next ``W`` is its image."""
    host = isinstance(Q, np.ndarray)
    xp: Any = np if host else jnp
    lengths = xp.sqrt((W * W).sum(0))
    W = W - Q @ (Q.T @ W)
    if host:
        W = _orthonormal(W, Q, lengths.max(), step)
    else:
        # Columns that are far from dependent need no QR factorisation, which is slow on a GPU.
        new = xp.sqrt((W * W).sum(0))
        unit = W / xp.where(new > 0, new, 1)
        L = jnp.linalg.cholesky(unit.T @ unit)
        far = (jnp.diagonal(L).min() > APART) & (new.min() > LOST * lengths.max())
        W = jax.lax.cond(
            far,
            lambda W: jax.lax.linalg.triangular_solve(L, unit, transpose_a=True, lower=True),
            lambda W: _orthonormal(W, Q, lengths.max(), step),
            W,
        )
    # Twice is enough (Kahan and Parlett).
    W = W - Q @ (Q.T @ W)
    W = W @ xp.linalg.inv(xp.linalg.cholesky(W.T @ W)).T
    image = operator(W)
    return _put(Q, W, at), _put(AQ, image, at), image


def _orthonormal(W: Any, Q: Any, size: Any, step: Any) -> Any:
    """Orthonormal columns that span those of ``W``; where these are exhausted, random ones orthogonal to ``Q``."""
    xp: Any = np if isinstance(Q, np.ndarray) else jnp
    W, R = xp.linalg.qr(W)
    lost = xp.abs(xp.diagonal(R)) <= LOST * size
    if xp is np:
        noise = np.random.default_rng(step).normal(size=W.shape) if lost.any() else W
    else:
        noise = jax.random.normal(jax.random.key(step), W.shape)
    W = xp.where(lost, noise, W)
    return xp.linalg.qr(W - Q @ (Q.T @ W))[0]


def _restart(Q: Any, AQ: Any, W: Any, k: int) -> tuple[Any, Any, Any, Any, Any]:
    """Ritz values; the basis and its image reduced to the best Ritz vectors; the next ``W``; the residual."""
    xp = np if isinstance(Q, np.ndarray) else jnp
    H = Q.T @ AQ
    theta, S = xp.linalg.eigh((H + H.T) / 2)
    theta, S = theta[::-1], S[:, ::-1]
    # The residuals of all Ritz vectors lie in the span of this part of the last image.
    W = W - Q @ (Q.T @ W)
    keep = S[:, : KEPT * Q.shape[1] // BLOCKS]
    best, images = Q @ keep, AQ @ keep
    rest = images[:, :k] - best[:, :k] * theta[:k]
    residual = relative(xp.sqrt((rest * rest).sum(0)), theta[:k], xp.abs(theta).max(), xp)
    return theta, _put(xp.zeros_like(Q), best, 0), _put(xp.zeros_like(Q), images, 0), W, residual


def relative(residuals: Any, values: Any, largest: Any, xp: Any) -> Any:
    """The largest residual relative to its value: one large eigenvalue must not hide the errors of small ones."""
    return (residuals / xp.maximum(xp.abs(values), SMALLEST * xp.where(largest > 0, largest, 1))).max()


def _put(X: Any, columns: Any, at: Any) -> Any:
    """``X`` with these columns from ``at`` on; a NumPy array is overwritten."""
    if isinstance(X, np.ndarray):
        X[:, at : at + columns.shape[1]] = columns
        return X
    return jax.lax.dynamic_update_slice(X, columns, (0, at))


_expand_on_device = partial(compiled, donate_argnums=(1, 2))(_expand)
_restart_on_device = partial(compiled, static_argnums=3, donate_argnums=(0, 1))(_restart)


def of_low_rank(operator: Callable[[Any], Any], d: int, k: int, rank: int, on_host: bool) -> Leading:
    """The same for an operator of at most this rank, whose range is that of its products with ``rank`` vectors."""
    start = np.random.default_rng(0).normal(size=(d, rank + EXTRA))
    theta, vectors, residual = (_in_range if on_host else _in_range_on_device)(operator, start, k)
    return Leading(theta, vectors, float(distributed.of_first(residual)))


def _in_range(operator: Any, Q: Any, k: int) -> tuple[Any, Any, Any]:
    xp: Any = np if isinstance(Q, np.ndarray) else jnp
    # Twice, so that small eigenvalues are not lost in the rounding errors of large ones.
    for _ in range(2):
        Q = xp.linalg.qr(operator(Q))[0]
    images = operator(Q)
    H = Q.T @ images
    theta, S = xp.linalg.eigh((H + H.T) / 2)
    theta, S = theta[: -1 - k : -1], S[:, : -1 - k : -1]
    vectors = Q @ S
    rest = images @ S - vectors * theta
    return theta, vectors, relative(xp.sqrt((rest * rest).sum(0)), theta, xp.abs(theta).max(), xp)


_in_range_on_device = compiled(_in_range, static_argnums=2)


def largest(operator: Callable[[Any], Any], d: int, k: int, on_host: bool) -> Leading:
    """The ``k`` largest eigenvalues of an operator on ``(d, b)`` arrays: a function, and for a device also a pytree."""
    b = k + EXTRA
    W = np.random.default_rng(0).normal(size=(d, b))
    # JAX combines NumPy arrays, but not arrays of one process, with arrays that are sharded over several.
    zeros: Any = np.zeros if on_host or distributed.count() > 1 else jnp.zeros
    Q, AQ = zeros((d, BLOCKS * b)), zeros((d, BLOCKS * b))
    expand: Any = _expand if on_host else _expand_on_device
    restart: Any = _restart if on_host else _restart_on_device
    best, idle = np.inf, 0
    for cycle in range(CYCLES):
        for i in range(KEPT if cycle else 0, BLOCKS):
            Q, AQ, W = expand(operator, Q, AQ, W, 1 + BLOCKS * cycle + i, i * b)
        theta, Q, AQ, W, residual = restart(Q, AQ, W, k)
        residual = float(distributed.of_first(residual))
        idle = 0 if residual < 0.9 * best else idle + 1
        best = min(best, residual)
        if residual <= TOLERANCE or idle == IDLE or not np.isfinite(residual):
            break
    return Leading(theta[:k], Q[:, :k], residual)

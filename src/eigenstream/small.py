"""Eigenproblems of small Gram matrices, which may be singular to rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def whitening(G: jax.Array, cutoff: float | None = None, complete: bool = False) -> tuple[jax.Array, jax.Array]:
    """``T`` with ``Tᵀ G T = I`` on the numerical range of ``G``, and how many columns that takes.

    Those past it are 0 or, to make a basis of everything, directions in which ``G`` is too small to tell.
    """
    size = jnp.sqrt(jnp.maximum(jnp.diag(G), 0))
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1), 1 if complete else 0)
    sigma, U = jnp.linalg.eigh((G + G.T) / 2 * inverse * inverse[:, None])
    least = (len(G) * jnp.finfo(G.dtype).eps if cutoff is None else cutoff) * jnp.maximum(sigma[-1], 0)
    keep = sigma > least
    # Of a length that does not grow each time they come by.
    T = U / jnp.sqrt(jnp.where(keep, sigma, 1))
    return (inverse[:, None] * jnp.where(keep | complete, T, 0))[:, ::-1], keep.sum()


def small_eigh(
    GA: jax.Array, GB: jax.Array, cutoff: float | None = None, complete: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Ritz values, descending, and vectors on the numerical range of ``GB``; past it, values are -inf."""
    T, count = whitening(GB, cutoff, complete)
    dropped = jnp.arange(len(GB)) >= count
    inner = jnp.where(dropped | dropped[:, None], 0, T.T @ ((GA + GA.T) / 2) @ T)
    # Directions that were dropped go under the whole spectrum, so that they are chosen last.
    bottom = -2 * jnp.abs(inner).sum(1).max() - 1
    lam, R = jnp.linalg.eigh(inner + jnp.diag(jnp.where(dropped, bottom, 0)))
    return jnp.where(dropped, -jnp.inf, lam[::-1]), (T @ R)[:, ::-1]


def orthogonal(X: jax.Array, C: jax.Array, G: jax.Array, cutoff: float) -> jax.Array:
    """Columns orthonormal in ``G``, and to those of ``C``, that span what ``X`` adds to them; 0 past that."""

    def unit(X: jax.Array) -> jax.Array:
        squares = jnp.maximum((X * (G @ X)).sum(0), 0)
        return jnp.where(squares > 0, X / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)

    X = unit(X)
    X = unit(X - C @ (C.T @ (G @ X)))
    return X @ whitening(X.T @ G @ X, cutoff)[0]


def largest_quotient(GA: jax.Array, GB: jax.Array, cutoff: float) -> jax.Array:
    """The largest Rayleigh quotient among the columns, in magnitude; shares of ``B`` under ``cutoff`` are rounding."""
    quotients = jnp.diag(GA) / jnp.where(jnp.diag(GB) > cutoff * jnp.diag(GB).max(), jnp.diag(GB), jnp.inf)
    return jnp.maximum(jnp.abs(quotients).max(), jnp.finfo(GB.dtype).tiny)

"""Locally optimal block conjugate gradients for ``A v = λ B v``, in JAX, from products alone (Knyazev, 2001)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg


class Search(NamedTuple):
    X: jax.Array
    P: jax.Array
    values: jax.Array
    residuals: jax.Array
    iteration: jax.Array


def small_eigh(GA: jax.Array, GB: jax.Array, cutoff: float | None = None) -> tuple[jax.Array, jax.Array]:
    """Ritz values, descending, and vectors on the numerical range of ``GB``; past it, values are -inf and vectors 0."""
    size = jnp.sqrt(jnp.maximum(jnp.diag(GB), jnp.finfo(GB.dtype).tiny))
    sigma, U = jnp.linalg.eigh((GB + GB.T) / 2 / size / size[:, None])
    keep = sigma > (len(GB) * jnp.finfo(GB.dtype).eps if cutoff is None else cutoff) * sigma[-1]
    T = jnp.where(keep, U / jnp.sqrt(jnp.where(keep, sigma, 1)), 0) / size[:, None]
    inner = T.T @ ((GA + GA.T) / 2) @ T
    # Directions that were dropped go under the whole spectrum, so that they are chosen last.
    bottom = -2 * jnp.abs(inner).sum(1).max() - 1
    inner = inner + jnp.diag(jnp.where(keep, 0, bottom))
    lam, R = jnp.linalg.eigh(inner)
    lam, C = lam[::-1], (T @ R)[:, ::-1]
    dropped = jnp.arange(len(lam)) >= keep.sum()
    return jnp.where(dropped, -jnp.inf, lam), C


def dense(A: jax.Array, B: jax.Array | None, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of dense JAX arrays, by Cholesky and `jax.numpy.linalg.eigh`."""
    if B is None:
        lam, V = jnp.linalg.eigh(A)
        return lam[::-1][:k], V[:, ::-1][:, :k]
    L = jnp.linalg.cholesky(B)
    half = jax.scipy.linalg.solve_triangular(L, A, lower=True)
    inner = jax.scipy.linalg.solve_triangular(L, half.T, lower=True)
    lam, W = jnp.linalg.eigh((inner + inner.T) / 2)
    return lam[::-1][:k], jax.scipy.linalg.solve_triangular(L, W[:, ::-1][:, :k], lower=True, trans=1)


@partial(jax.jit, static_argnames=("k", "max_steps"))
def search(A: Any, B: Any, X: jax.Array, sign: float, k: int, tol: float, max_steps: int) -> Search:
    """Iterate from the columns of ``X`` until the ``k`` leading pairs of ``sign·A`` have residuals under ``tol``."""

    def products(X: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sign * (A @ X), X if B is None else B @ X

    # What A makes of random columns stands for its size, so that a null vector's residual can be small.
    norm_A = (jnp.linalg.norm(products(X)[0], axis=0) / jnp.linalg.norm(X, axis=0)).max()

    def rest(X: jax.Array, lam: jax.Array) -> tuple[jax.Array, jax.Array]:
        AX, BX = products(X)
        R = AX - lam * BX
        size = norm_A * jnp.linalg.norm(X, axis=0) + jnp.abs(lam) * jnp.linalg.norm(BX, axis=0)
        return R, jnp.linalg.norm(R, axis=0) / jnp.where(size > 0, size, 1)

    def ritz(S: jax.Array) -> tuple[jax.Array, jax.Array]:
        AS, BS = products(S)
        return small_eigh(S.T @ AS, S.T @ BS)

    def unit(R: jax.Array) -> jax.Array:
        return R / jnp.maximum(jnp.linalg.norm(R, axis=0), jnp.finfo(R.dtype).tiny)

    m = X.shape[1]

    def body(s: Search) -> Search:
        R, _ = rest(s.X, s.values)
        R = unit(R - s.X @ (s.X.T @ products(R)[1]))
        S = jnp.concatenate([s.X, R, s.P], axis=1)
        lam, C = ritz(S)
        X = S @ C[:, :m]
        return Search(X, unit(S[:, m:] @ C[m:, :m]), lam[:m], rest(X, lam[:m])[1], s.iteration + 1)

    def unfinished(s: Search) -> jax.Array:
        return (s.iteration < max_steps) & (s.residuals[:k] > tol).any()

    lam, C = ritz(X)
    X = X @ C
    start = Search(X, jnp.zeros_like(X), lam, rest(X, lam)[1], jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unfinished, body, start)

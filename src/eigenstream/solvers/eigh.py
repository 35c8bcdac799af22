"""`eigh`: the leading eigenpairs of matrices and operators, by the tool that fits them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax.experimental import sparse as jsparse

from eigenstream.core.ritz import WHICH, leading
from eigenstream.metrics import residuals
from eigenstream.problems.base import Problem
from eigenstream.problems.matrices import Matvec, check_operands, matrices, to_jax
from eigenstream.solvers.direct import EighInfo, solve_on_host
from eigenstream.solvers.game import Game, GameState

#: Dimensions up to this many times the number of players are decomposed.
FEW = 8

__all__ = ["EighInfo", "eigh"]


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
    message = ""
    if any(isinstance(M, jax.Array | jsparse.BCOO | Matvec) for M in (A, B)):
        w, V, method, message = _in_jax(A, B, k, which, tol, max_steps, random_state)
    else:
        w, V, method = solve_on_host(A, B, k, which, tol or 0.0, random_state)
    rest = residuals(V, w, A, B)
    return w, V, EighInfo(method, rest, not message, message or f"{k} pairs by {method}")


def _in_jax(
    A: Any, B: Any, k: int, which: str, tol: float | None, max_steps: int, seed: int
) -> tuple[jax.Array, jax.Array, str, str]:
    d = A.shape[0]
    A, B = to_jax(A), to_jax(B)
    dtype = A.dtype if not isinstance(A, Matvec) or B is None else B.dtype
    solver = Game(extra=max(8, k // 4))
    whole = which == "magnitude" or d <= FEW * solver.players(d, k)
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
    sign = -1 if which == "smallest" else 1
    problem = matrices(A, B).with_sign(sign)
    state = _played(solver, problem, k, jax.random.key(seed), limit, max_steps)
    if bool(state.failed) or not np.isfinite(np.asarray(state.lam[:k])).all():
        raise ValueError(
            "B is not positive definite in this precision, or A or B holds NaN: add a ridge, or remove the NaN"
        )
    worst = float(state.preconditioned_residuals.max())
    message = "" if worst <= limit else f"the residual is {worst:.2g} after {max_steps} steps, not {limit:.2g}"
    return sign * state.lam[:k], state.S[:k].T, "eigenstream.solvers.Game", message


@partial(jax.jit, static_argnames=("solver", "k", "max_steps"))
def _played(solver: Game, problem: Problem, k: int, key: jax.Array, tol: float, max_steps: int) -> GameState:
    """Move the players until the ``k`` leading preconditioned residuals are below ``tol``."""

    def unfinished(state: GameState) -> jax.Array:
        return (
            (state.step < max_steps)
            & ((state.preconditioned_residuals > tol).any() | (state.moves < 2))
            & ~state.failed
        )

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

"""RSG+, Riemannian streaming CCA (Meng, Chakraborty and Singh, 2021), the comparison of the paper's section 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import views
from eigenstream.core.ritz import fix_signs
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.problems.covariance import CCA
from eigenstream.solvers.stochastic import MEMORY, Info


class Factors(NamedTuple):
    """One view's directions ``Q T``: ``Q`` (d, k) on the Stiefel manifold, ``T`` (k, k) a rotation."""

    Q: jax.Array
    T: jax.Array


class RSGState(NamedTuple):
    views: tuple[Factors, Factors]
    memory: Tree
    #: Running covariances (2k, 2k) of the scores of both views.
    covariance: jax.Array
    step: jax.Array
    failed: jax.Array

    @property
    def long(self) -> tuple[str, ...]:
        """None: the factorisations need whole columns on every device."""
        return ()


def qr(M: jax.Array) -> jax.Array:
    """The QR retraction: the orthonormal factor, with signs such that ``R`` has a positive diagonal."""
    Q, R = jnp.linalg.qr(M)
    sign = jnp.sign(jnp.diag(R))
    return Q * jnp.where(sign == 0, 1, sign)


def unit_columns(G: jax.Array) -> jax.Array:
    return G / jnp.maximum(jnp.linalg.norm(G, axis=0), jnp.finfo(G.dtype).tiny)


def towards_span(Q: jax.Array, block: jax.Array) -> jax.Array:
    """The Grassmann logarithm: the tangent at ``Q`` towards the span of the rows of ``block``."""
    k = Q.shape[1]
    U = jnp.linalg.qr(block.T)[0]
    overlap = Q.T @ U
    bump = 1e-6 * jnp.eye(k, dtype=Q.dtype)
    tangent = (U - Q @ overlap) @ jnp.linalg.inv(overlap + bump * jnp.sign(jnp.trace(overlap) + 1e-30))
    left, angle, right = jnp.linalg.svd(tangent, full_matrices=False)
    return (left * jnp.arctan(angle)) @ right


@dataclass(frozen=True, kw_only=True)
class RSGPlus:
    """RSG+: the directions of each view are ``Q T D``, a frame near its principal subspace, a rotation and a scaling.

    Solves two-view CCA with one array a view. A penalty pulls the frames to the principal subspaces of the views, so
    the fixed point is biased unless these contain the canonical directions.

    Parameters
    ----------
    learning_rate : float
        Step of the frames ``Q``.
    rotation_rate : float
        Step of the rotations ``T``.
    principal : float
        Weight of the pull towards the principal subspace.
    warm_steps : int
        Batches for the warm start by Oja's algorithm. The authors take one pass: give the number of batches and
        ``max_epochs=2``.
    warm_rate : float
        Step of the warm start.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> Z = rng.normal(size=(4000, 2))
    >>> X, Y = (np.c_[3 * Z, rng.normal(size=(4000, 3))].astype("f4") for _ in range(2))
    >>> batches = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, 4000, 100)]
    >>> result = es.solve(es.problems.cca(), batches, k=2, solver=es.solvers.RSGPlus())
    >>> bool((result.eigenvalues > 0.9).all())
    True
    """

    learning_rate: float = 0.1
    rotation_rate: float = 0.01
    principal: float = 0.1
    warm_steps: int = 0
    warm_rate: float = 0.01

    whole_spectrum: ClassVar[bool] = False
    has_residual: ClassVar[bool] = False

    def parts(self, problem: Problem) -> None:
        """Batches are not padded."""

    def fewest_rows(self, problem: Problem) -> int:
        return problem.fewest_rows(False)

    def init(self, problem: Problem, batch: Tree, k: int, key: jax.Array) -> RSGState:
        """Random frames."""
        if not (isinstance(problem, CCA) and problem.views == 2 and not problem.ridge):
            raise ValueError("RSGPlus solves two-view CCA without a ridge: choose another solver")
        template = problem.template(batch)
        if any(len(jax.tree.leaves(t)) != 1 or len(jax.tree.leaves(t)[0].shape) != 1 for t in template):
            raise ValueError("RSGPlus takes two flat views: reshape each to (rows, features)")
        views = []
        for q, t in zip(jax.random.split(key, 2), template, strict=True):
            Q = qr(jax.random.normal(q, (t.shape[0], k), t.dtype))
            views.append(Factors(Q, jnp.eye(k, dtype=t.dtype)))
        C = jnp.zeros((2 * k, 2 * k), template[0].dtype)
        x, y = views
        return RSGState((x, y), problem.start(batch), C, jnp.zeros((), jnp.int32), jnp.array(False))

    def step(self, problem: Problem, state: RSGState, batch: Tree) -> tuple[RSGState, Info]:
        """One step: of Oja's algorithm in the first ``warm_steps``, Riemannian afterwards."""
        memory = problem.observe(state.memory, batch)
        x, y = (_dense(view) for view in problem.rows(memory, batch))
        fx, fy = state.views

        def warm() -> tuple[Factors, Factors]:
            return self._oja(fx, x), self._oja(fy, y)

        def descend() -> tuple[Factors, Factors]:
            return self._moved(fx, fy, x, y), self._moved(fy, fx, y, x)

        moved = jax.lax.cond(state.step < self.warm_steps, warm, descend)
        scores = jnp.concatenate([x @ moved[0].Q @ moved[0].T, y @ moved[1].Q @ moved[1].T], axis=1)
        weight = jnp.maximum(1 / (state.step + 1), 1 / MEMORY).astype(scores.dtype)
        C = state.covariance + weight * (scores.T @ scores / len(scores) - state.covariance)
        failed = state.failed | ~(
            jnp.isfinite(C).all() & jnp.isfinite(moved[0].Q).all() & jnp.isfinite(moved[1].Q).all()
        )
        new = RSGState(moved, memory, C, state.step + 1, failed)
        new = jax.tree.map(lambda a, b: jnp.where(failed, a, b), state, new)._replace(failed=failed)
        rho = jnp.abs(_correlations(new.covariance))
        return new, Info(rho, jnp.full_like(rho, jnp.nan))

    def _oja(self, f: Factors, x: jax.Array) -> Factors:
        return f._replace(Q=qr(f.Q + self.warm_rate * x.T @ (x @ f.Q) / len(x)))

    def _moved(self, f: Factors, other: Factors, x: jax.Array, y: jax.Array) -> Factors:
        b, k = len(x), f.Q.shape[1]
        across = x.T @ (y @ other.Q @ other.T) / b
        G = -across @ f.T.T
        blocks = x[: b // k * k].reshape(-1, k, x.shape[1])
        # One after another: XLA has deadlocked on batched SVDs of both views at once.
        G = G - self.principal * jax.lax.map(lambda block: towards_span(f.Q, block), blocks).mean(0)
        G = G - f.Q @ (G.T @ f.Q)
        Q = qr(f.Q - self.learning_rate * unit_columns(G))
        turn = f.T.T @ unit_columns(-f.Q.T @ across)
        return Factors(Q, qr(f.T - self.rotation_rate * f.T @ (turn - turn.T) / 2))

    def eigenpairs(self, problem: Problem, state: RSGState) -> tuple[np.ndarray, Tree]:
        """Correlations of matching scores, largest first, made positive by the sign of the second view."""
        rho = np.asarray(_correlations(state.covariance), np.float64)
        order = np.argsort(-np.abs(rho))
        k = len(rho)
        scale = 1 / np.sqrt(2 * np.maximum(np.diag(np.asarray(state.covariance)), np.finfo(np.float32).tiny))
        vx, vy = ((np.asarray(f.Q @ f.T) * s).T for f, s in zip(state.views, (scale[:k], scale[k:]), strict=True))
        vy = vy * np.where(rho < 0, -1, 1).astype(vy.dtype)[:, None]
        V = (vx[order].astype(vx.dtype), vy[order].astype(vy.dtype))
        return np.abs(rho)[order], fix_signs(V)


def _dense(view: Any) -> jax.Array:
    """The centred rows of a view as a dense array."""
    centred = isinstance(view, views.Centred)
    x = view.rows if centred else view
    if isinstance(x, views.Sparse):
        raise ValueError("RSGPlus takes dense views: give arrays")
    return x - x.mean(0) if centred else x


def _correlations(C: jax.Array) -> jax.Array:
    k = len(C) // 2
    variances = jnp.maximum(jnp.diag(C), jnp.finfo(C.dtype).tiny)
    return jnp.diag(C[:k, k:]) / jnp.sqrt(variances[:k] * variances[k:])

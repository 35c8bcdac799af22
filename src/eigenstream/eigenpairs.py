"""From players to eigenpairs: Rayleigh quotients, Rayleigh-Ritz, order and signs; and the dense solution."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from eigenstream import host, rows, trees
from eigenstream.problems.base import check_finite

__all__ = ["Dense", "fix_signs", "leading", "rayleigh_quotients", "rayleigh_ritz", "solve_dense"]

Tree = Any
WHICH = ("largest", "smallest", "magnitude")


def rayleigh_quotients(problem: Any, batch: Tree, V: Tree) -> np.ndarray:
    """``⟨v, A v⟩ / ⟨v, B v⟩`` of every player on one batch, as large as memory allows.

    Parameters
    ----------
    problem : problem
    batch : as the problem takes it
    V : players
        For instance ``result.eigenvectors``.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> problem = es.problems.pca()
    >>> result = es.solve(problem, [X], k=2)
    >>> bool(abs(es.rayleigh_quotients(problem, X, result.eigenvectors) - result.eigenvalues).max() < 1e-4)
    True
    """
    batch = problem.accept(batch)
    wanted = jax.tree.map(lambda s: math.prod(s.shape), problem.template(batch))
    if jax.tree.map(lambda v: math.prod(np.shape(v)[1:]), V) != wanted:
        raise ValueError(
            "V does not fit the batch: give players, an array (k, ...) for each of a row's, as result.eigenvectors "
            "has them and result.V has not"
        )
    if batch is not None:
        check_finite(batch)
        least = problem.fewest_rows(False)
        if rows.n_rows(batch) < least:
            raise ValueError(f"the batch has too few rows: at least {least} are needed")
        point = problem.pilot(batch)
        batch = host.to_device(batch if point is None else problem.less_pilot(batch, point))
    memory = problem.observe(problem.start(batch), batch) if batch is not None else ()
    [((AV, BV), _)] = problem.estimate(memory, batch, jax.tree.map(jnp.asarray, V), False)
    return np.asarray(trees.dot(V, AV) / trees.dot(V, BV))


def rayleigh_ritz(GA: Any, GB: Any) -> tuple[np.ndarray, np.ndarray]:
    """The best eigenpairs within the players' span, from their Gram matrices with ``A`` and ``B``.

    Returns the Ritz values, descending, and ``W`` such that the rows of ``W V`` are the Ritz vectors.
    """
    GA, GB = (np.asarray((G + G.T) / 2, np.float64) for G in (GA, GB))
    size = np.sqrt(np.maximum(np.diag(GB), np.finfo(np.float64).tiny))
    solved = solve_dense(GA / np.outer(size, size), GB / np.outer(size, size), len(GA), "largest", 1e-10)
    return solved.eigenvalues, (solved.vectors / size[:, None]).T


def fix_signs(V: Tree) -> Tree:
    """Make the entry of largest magnitude of each player positive."""
    matrix = trees.columns(V)
    signs = np.sign(matrix[np.abs(matrix).argmax(0), np.arange(matrix.shape[1])])
    return trees.scale(np.where(signs == 0, 1, signs).astype(matrix.dtype), V)


def leading(eigenvalues: np.ndarray, k: int, which: str) -> np.ndarray:
    """Indices of the ``k`` wanted eigenvalues, the most wanted first."""
    key = {"largest": -eigenvalues, "smallest": eigenvalues, "magnitude": -np.abs(eigenvalues)}[which]
    return np.argsort(key, kind="stable")[:k]


class Dense(NamedTuple):
    """Eigenvalues, ``(d, k)`` B-orthonormal vectors and the numerical ranks of ``B``'s diagonal blocks."""

    eigenvalues: np.ndarray
    vectors: np.ndarray
    ranks: list[int]

    def first(self, k: int) -> Dense:
        """The most wanted ``k`` of the pairs."""
        return Dense(self.eigenvalues[:k], self.vectors[:, :k], self.ranks)


def solve_dense(A: np.ndarray, B: np.ndarray, k: int, which: str, cutoff: float, sizes: Any = None) -> Dense:
    """Solve on the range of ``B``, which may be singular, to float64.

    ``B`` is brought to unit diagonal, so that a feature's unit does not decide whether it counts, and eigenvalues under
    ``cutoff`` are taken for rounding. ``sizes`` are those of blocks that ``B`` may be diagonal in, to be factored each
    alone.
    """
    T, ranks = _whitening(B, cutoff, sizes or [len(B)])
    reduced = T.T @ A @ T
    rank = len(reduced)
    count = min(k, rank)
    if not rank:
        return Dense(np.zeros(0), T, ranks)
    if which == "magnitude":
        lam, R = scipy.linalg.eigh(reduced)
    else:
        bounds = [rank - count, rank - 1] if which == "largest" else [0, count - 1]
        lam, R = scipy.linalg.eigh(reduced, subset_by_index=bounds)
    order = leading(lam, count, which)
    return Dense(lam[order], T @ R[:, order], ranks)


def _whitening(B: np.ndarray, cutoff: float, sizes: list[int]) -> tuple[np.ndarray, list[int]]:
    """``T`` of full column rank with ``Tᵀ B T = I`` and ``B T Tᵀ B = B``, and its rank within each block."""
    scale = np.sqrt(np.maximum(np.diag(B), 0))
    alive = scale > np.finfo(np.float64).eps * scale.max(initial=0.0)
    ends = np.cumsum([0, *sizes])
    blocks = [slice(a, b) for a, b in itertools.pairwise(ends)]
    if np.count_nonzero(B) == np.count_nonzero(scale):
        return (np.eye(len(B)) / np.where(alive, scale, 1))[:, alive], [int(alive[s].sum()) for s in blocks]
    if any(B[s, t].any() for s in blocks for t in blocks if s != t):
        blocks = [slice(0, len(B))]
    factors = []
    for block in blocks:
        inverse = np.where(alive[block], 1 / np.where(alive[block], scale[block], 1), 0)
        sigma, U = scipy.linalg.eigh(inverse[:, None] * B[block, block] * inverse)
        keep = sigma > cutoff * max(sigma[-1], 0)
        factors.append(inverse[:, None] * U[:, keep] / np.sqrt(sigma[keep]))
    return scipy.linalg.block_diag(*factors), [f.shape[1] for f in factors]

"""Rayleigh quotients of players on one batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.types import Tree
from eigenstream.problems.checks import check_finite

__all__ = ["rayleigh_quotients"]


def rayleigh_quotients(problem: Any, batch: Tree, V: Tree) -> np.ndarray:
    """``⟨v, A v⟩ / ⟨v, B v⟩`` of every player on one batch.

    Parameters
    ----------
    problem : problem
    batch : a batch of the problem
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
        cure = "pass result.eigenvectors (leaves of shape (k, ...)), not result.V (a (d, k) matrix)"
        raise ValueError(f"V does not fit the batch: {cure}")
    if batch is not None:
        check_finite(batch)
        least = problem.fewest_rows(False)
        if views.n_rows(batch) < least:
            raise ValueError(f"the batch has too few rows: at least {least} are needed")
        point = problem.pilot(batch)
        batch = host_batches.to_device(batch if point is None else problem.less_pilot(batch, point))
    memory = problem.observe(problem.start(batch), batch) if batch is not None else ()
    [((AV, BV), _)] = problem.estimate(memory, batch, jax.tree.map(jnp.asarray, V), False)
    return np.asarray(players.dot(V, AV) / players.dot(V, BV))

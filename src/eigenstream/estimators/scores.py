"""Variances, correlations and loadings of the scores that eigenvectors give."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from eigenstream.core import host_batches
from eigenstream.core.types import Tree
from eigenstream.estimators.base import flat, projected
from eigenstream.run.result import Result

#: The variance of a score below this, relative to the largest, is rounding error.
CONSTANT = 1e-12


class Measured(NamedTuple):
    """The eigenvectors of several views, and covariances of their scores and features."""

    #: One ``(d, k)`` array per view: the eigenvectors.
    weights: list[np.ndarray]
    #: One ``(d,)`` array per view: the means that are subtracted.
    means: list[np.ndarray]
    #: (views, views, k): covariances of a component's scores in two views.
    across: np.ndarray
    #: (views, k, k): covariances of the scores within each view.
    within: np.ndarray
    #: One ``(d, k)`` array per view: covariances of its features and scores.
    loadings: list[np.ndarray]
    #: (d, k): covariances of the last view's features and the first view's scores.
    towards: np.ndarray

    def variances(self) -> np.ndarray:
        """(views, k): variances of the scores; 0 for a score that is constant to rounding error.

        With a ridge there are such scores, of constant and of duplicate columns.
        """
        found = np.einsum("iik->ik", self.across)
        return np.where(found > CONSTANT * found.max(), found, 0)

    def deviations(self) -> np.ndarray:
        """(views, k): standard deviations of the scores; 1 for a constant score."""
        variances = self.variances()
        return np.sqrt(np.where(variances > 0, variances, 1))

    def components(self, keep: np.ndarray) -> Measured:
        """The same for a part of the components."""
        return Measured(
            [w[:, keep] for w in self.weights],
            self.means,
            self.across[:, :, keep],
            self.within[:, keep][:, :, keep],
            [load[:, keep] for load in self.loadings],
            self.towards[:, keep],
        )

    def scaled(self, scale: np.ndarray) -> Measured:
        """The same for eigenvectors divided by ``scale``, of shape (views, k)."""
        return Measured(
            [w / s for w, s in zip(self.weights, scale, strict=True)],
            self.means,
            self.across / (scale[:, None] * scale),
            self.within / (scale[:, :, None] * scale[:, None]),
            [load / s for load, s in zip(self.loadings, scale, strict=True)],
            self.towards / scale[0],
        )


def measure(estimator: Any, result: Result, again: Iterable[Tree]) -> Measured:
    """Measure by the covariance of an exact solver; for any other solver, read the rows ``again``."""
    assert result.summary is not None
    W = [flat(view) for view in result.eigenvectors]
    means = [flat(view)[:, 0] for view in result.summary.means]
    means = means if estimator.center else [np.zeros_like(mean) for mean in means]
    crossed = estimator._run.engine.cross_covariances()
    if crossed is not None:
        return _from_covariances(crossed, W, means)
    return _from_rows(again, W, means, int(bool(estimator.center)))


def _from_covariances(crossed: list[np.ndarray], W: list[np.ndarray], means: list[np.ndarray]) -> Measured:
    """Measure by the covariances of all features with each view's scores."""
    ends = np.cumsum([0] + [len(w) for w in W])
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    named = list(zip(W, parts, strict=True))
    across = np.array([[np.einsum("ik,ik->k", w, C[p]) for C in crossed] for w, p in named])
    loadings = [np.ascontiguousarray(C[p]) for C, p in zip(crossed, parts, strict=True)]
    within = np.array([w.T @ load for w, load in zip(W, loadings, strict=True)])
    return Measured(W, means, across, within, loadings, crossed[0][parts[-1]])


def _from_rows(batches: Iterable[Tree], W: list[np.ndarray], means: list[np.ndarray], dof: int) -> Measured:
    """Measure on the rows, read once; ``dof`` is 1 if their mean was estimated."""
    n, m, k = 0, len(W), W[0].shape[1]
    total, crossed = np.zeros((m * k, m * k)), [np.zeros((len(w), k + k * (w is W[-1]))) for w in W]
    sums = [np.zeros(found.shape[1]) for found in crossed]
    for batch in batches:
        views = [host_batches.dense_or_csr(view) for view in batch]
        scores = [projected(x, w, mean).astype(np.float64) for x, w, mean in zip(views, W, means, strict=True)]
        n += len(scores[0])
        side_by_side = np.hstack(scores)
        total += side_by_side.T @ side_by_side
        # The last view's features are also needed with the first view's scores.
        beside = [*scores[:-1], np.hstack([scores[-1], scores[0]])]
        for found, sum_, x, T in zip(crossed, sums, views, beside, strict=True):
            found += x.T @ T.astype(x.dtype)
            sum_ += T.sum(0)
    if n <= dof:
        raise ValueError("no rows to measure the components on: give the model more of them")
    blocks = total.reshape(m, k, m, k) / (n - dof)
    within = np.array([blocks[i, :, i] for i in range(m)])
    crossed = [
        (found - np.outer(mean, sum_)) / (n - dof) for found, mean, sum_ in zip(crossed, means, sums, strict=True)
    ]
    loadings = [found[:, :k] for found in crossed]
    return Measured(W, means, np.einsum("ikjk->ijk", blocks), within, loadings, crossed[-1][:, k:])


def correlations(T: np.ndarray, U: np.ndarray, weight: Any = None) -> np.ndarray:
    """Correlations of matching columns; 0 if one is constant."""
    weight = np.ones(len(T)) if weight is None else np.asarray(weight, np.float64)
    T, U = (np.asarray(Z, np.float64) - np.average(Z, 0, weight) for Z in (T, U))
    spread = np.sqrt((weight @ T**2) * (weight @ U**2))
    return np.divide(weight @ (T * U), spread, out=np.zeros_like(spread), where=spread > 0)

"""Principal component analysis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import OneViewMixin, StreamEstimator, estimator, flat, projected, rebuilt
from eigenstream.run.result import Result


@estimator
class PCA(OneViewMixin, StreamEstimator):
    """Principal components, from arrays or streams.

    Parameters
    ----------
    n_components : int, optional
        Number of components. None: all.
    center : {True, False, "running"}
        Whether to subtract the mean; see `eigenstream.problems.pca`.
    whiten : bool
        Whether `transform` scales the components to unit variance.
    which : {"largest", "smallest"}
        Which variances.
    {shared}

    Attributes
    ----------
    components_ : (k, d) array
        Orthonormal rows.
    explained_variance_, explained_variance_ratio_, singular_values_ : (k,) arrays
    mean_ : (d,) array
    noise_variance_ : float
        Mean variance of the other directions.
    n_components_, n_features_in_ : int
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> pca = es.PCA(n_components=2).fit(X)
    >>> pca.explained_variance_.round(1).tolist()
    [8.8, 3.7]
    >>> pca.transform(X).shape
    (1000, 2)
    """

    _: KW_ONLY
    center: bool | str = True
    whiten: bool = False
    which: str = "largest"

    def _problem(self) -> problems.Problem:
        return problems.pca(center=self.center)

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        assert result.summary is not None
        W, mean = flat(result.eigenvectors), flat(result.summary.means)[:, 0]
        n, scatter = float(result.summary.counts[0]), float(result.summary.scatter)
        d, k = W.shape
        total = scatter / (n - 1) if self.center else scatter / n + mean @ mean
        self._set_components(W / np.linalg.norm(W, axis=0), mean)
        self.explained_variance_ = np.maximum(result.eigenvalues, 0)
        self.explained_variance_ratio_ = self.explained_variance_ / total if total > 0 else np.zeros(k)
        self.singular_values_ = np.sqrt(self.explained_variance_ * (n - bool(self.center)))
        rest = max(total - self.explained_variance_.sum(), 0)
        self.noise_variance_ = float(rest / (min(d, n) - k)) if k < min(d, n) else 0.0

    @property
    def loadings_(self) -> np.ndarray:
        """(d, k): components times their standard deviations, the covariances of features with whitened scores."""
        return self.components_.T * np.sqrt(self.explained_variance_)

    def _deviations(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.explained_variance_, np.finfo(np.float64).tiny))

    def transform(self, X: Any) -> np.ndarray:
        """The scores of every row."""
        Z = projected(self._checked_new(X), self.components_.T, self.mean_)
        return Z / self._deviations().astype(Z.dtype) if self.whiten else Z

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows from their scores: the projections of the rows on the components."""
        check_is_fitted(self)
        loadings = self.components_.T * self._deviations() if self.whiten else self.components_.T
        return rebuilt(X, loadings, self.mean_)

    def get_covariance(self) -> np.ndarray:
        """The covariance of the model: that of the components, and ``noise_variance_`` in all other directions."""
        check_is_fitted(self)
        excess = np.maximum(self.explained_variance_ - self.noise_variance_, 0)
        return (self.components_.T * excess) @ self.components_ + self.noise_variance_ * np.eye(self.n_features_in_)

    def get_precision(self) -> np.ndarray:
        """The inverse of `get_covariance`."""
        return np.linalg.inv(self.get_covariance())

    def score_samples(self, X: Any) -> np.ndarray:
        """The log-likelihood of every row under the model of `get_covariance` (Tipping and Bishop, 1999)."""
        X = self._checked_new(X)
        Z = projected(X, self.components_.T, self.mean_)
        d, k = self.n_features_in_, self.n_components_
        # Without noise the density outside the components is 0: a tiny variance keeps the logarithm finite.
        noise = max(self.noise_variance_, np.finfo(np.float64).eps * float(self.explained_variance_.max()))
        variances = np.maximum(self.explained_variance_, noise)
        value = d * np.log(2 * np.pi) + np.log(variances).sum() + (Z**2 / variances).sum(1)
        if k < d:
            centred = (X.toarray() if hasattr(X, "toarray") else X) - self.mean_
            outside = np.maximum((centred**2).sum(1) - (Z**2).sum(1), 0)
            value = value + (d - k) * np.log(noise) + outside / noise
        return -0.5 * value

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log-likelihood of the rows."""
        return float(self.score_samples(X).mean())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

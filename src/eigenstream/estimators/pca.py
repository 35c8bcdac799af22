"""Principal component analysis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, flat, projected
from eigenstream.run.result import Result


@estimator
class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, StreamEstimator):
    """Principal components, from arrays or streams.

    Parameters
    ----------
    n_components : int, optional
        How many; None for all there are.
    center : {True, False, "running"}
        Whether to take off the mean; see `eigenstream.problems.pca`.
    whiten : bool
        Whether `transform` scales the components to unit variance.
    which : {"largest", "smallest"}
        Of which variance.
    {shared}

    Attributes
    ----------
    components_ : (k, d) array
        Orthonormal rows.
    explained_variance_, explained_variance_ratio_, singular_values_ : (k,) arrays
    mean_ : (d,) array
    noise_variance_ : float
        The mean variance of the directions left out.
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

    _single_view = True

    def _problem(self) -> problems.Problem:
        return problems.pca(center=self.center)

    def fit(self, X: Any, y: Any = None) -> PCA:
        """Learn the components of ``X``, an array, memory map or sparse matrix of rows by features."""
        self._forget()
        return self._fit_batches(self._batches(self._checked(X, True, 2)))

    def partial_fit(self, X: Any, y: Any = None) -> PCA:
        """Learn from some more rows, one or many."""
        return self._take(self._checked(X, "_run" not in vars(self), 1))

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        assert result.summary is not None
        W, mean = flat(result.eigenvectors), flat(result.summary.means)[:, 0]
        n, scatter = float(result.summary.counts[0]), float(result.summary.scatter)
        d, k = W.shape
        total = scatter / (n - 1) if self.center else scatter / n + mean @ mean
        self.mean_ = mean if self.center else np.zeros(d)
        self.n_features_in_, self.n_components_ = d, k
        self.components_ = np.ascontiguousarray((W / np.linalg.norm(W, axis=0)).T)
        self.explained_variance_ = np.maximum(result.eigenvalues, 0)
        self.explained_variance_ratio_ = self.explained_variance_ / total if total > 0 else np.zeros(k)
        self.singular_values_ = np.sqrt(self.explained_variance_ * (n - bool(self.center)))
        rest = max(total - self.explained_variance_.sum(), 0)
        self.noise_variance_ = float(rest / (min(d, n) - k)) if k < min(d, n) else 0.0

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[0]

    @property
    def loadings_(self) -> np.ndarray:
        """(d, k): components scaled by their deviations, the covariances of features with whitened scores."""
        return self.components_.T * np.sqrt(self.explained_variance_)

    def _deviations(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.explained_variance_, np.finfo(np.float64).tiny))

    def transform(self, X: Any) -> np.ndarray:
        """The components' scores of every row."""
        check_is_fitted(self)
        Z = projected(self._checked_new(X), self.components_.T, self.mean_)
        return Z / self._deviations().astype(Z.dtype) if self.whiten else Z

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows from their scores, up to what lies outside the components."""
        check_is_fitted(self)
        Z = check_array(X, dtype=[np.float64, np.float32])
        return (Z * self._deviations() if self.whiten else Z) @ self.components_ + self.mean_

    def get_covariance(self) -> np.ndarray:
        """The covariance of the model: the components' part, and ``noise_variance_`` in all other directions."""
        check_is_fitted(self)
        excess = np.maximum(self.explained_variance_ - self.noise_variance_, 0)
        return (self.components_.T * excess) @ self.components_ + self.noise_variance_ * np.eye(self.n_features_in_)

    def get_precision(self) -> np.ndarray:
        """The inverse of `get_covariance`."""
        return np.linalg.inv(self.get_covariance())

    def score_samples(self, X: Any) -> np.ndarray:
        """The log-likelihood of every row under the model of `get_covariance` (Tipping and Bishop, 1999)."""
        check_is_fitted(self)
        X = self._checked_new(X)
        Z = projected(X, self.components_.T, self.mean_)
        d, k = self.n_features_in_, self.n_components_
        # A model without noise gives rows outside its components next to no chance, rather than none at all.
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
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

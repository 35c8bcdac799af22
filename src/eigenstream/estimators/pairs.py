"""Estimators of two views: canonical correlations and partial least squares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import scipy.sparse
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, projected
from eigenstream.estimators.scores import Measured, correlations, measure, variances
from eigenstream.run.result import Result


class PairMixin(ClassNamePrefixFeaturesOutMixin, TransformerMixin):
    """What estimators of two views share: the second view is ``y``, and one predicts the other."""

    _forget: Any
    _fit_batches: Any
    _batches: Any
    _take: Any
    _checked: Any
    _checked_new: Any

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn from two views, arrays, memory maps or sparse matrices with the same rows; ``y`` is the second."""
        self._forget()
        return self._fit_batches(self._batches(*self._both(X, y, True, 2)))

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Learn from some more rows of both views, one or many."""
        return self._take(self._both(X, y, "_run" not in vars(self), 1))

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fit and project: both views if ``y`` has columns, ``X`` alone if it is a single target."""
        self.fit(X, y)
        return self.transform(X) if self.single_target_ else self.transform(X, y)

    def _both(self, X: Any, y: Any, reset: bool, fewest: int) -> tuple[Any, Any]:
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give the second view as y"
            )
        X = self._checked(X, reset, fewest)
        Y = self._second(y, finite=False)
        check_consistent_length(X, Y)
        return X, Y

    def _second(self, y: Any, finite: bool = True) -> Any:
        Y = check_array(
            y, input_name="y", ensure_2d=False, accept_sparse="csr", dtype="numeric", ensure_all_finite=finite
        )
        if not finite:
            self.single_target_ = Y.ndim == 1
        Y = Y[:, None] if Y.ndim == 1 else Y
        if "y_mean_" in vars(self) and len(self.y_mean_) != Y.shape[1]:
            raise ValueError(f"y has {Y.shape[1]} columns, but the second view was fitted with {len(self.y_mean_)}")
        return Y if Y.dtype.kind == "f" or not finite else Y.astype(np.float64)

    def _set(self, W: list[np.ndarray], means: list[np.ndarray], loadings: list[np.ndarray], slopes: Any) -> None:
        """Publish weights and loadings, and the regression of ``y`` on the scores of ``X``: slopes ``(k, dy)``."""
        (self.x_weights_, self.y_weights_), (self.x_mean_, self.y_mean_) = W, means
        self.x_loadings_, self.y_loadings_ = loadings
        self.n_features_in_, self.n_components_ = self.x_weights_.shape
        self.coef_ = (self.x_weights_ @ slopes).T
        self.intercept_ = self.y_mean_ - self.coef_ @ self.x_mean_

    def transform(self, X: Any, y: Any = None) -> Any:
        """Scores of ``X``, or of both views if ``y`` is given; of ``y`` alone if ``X`` is None."""
        check_is_fitted(self)
        y_scores = None if y is None else projected(self._second(y), self.y_weights_, self.y_mean_)
        if X is None and y_scores is not None:
            return y_scores
        x_scores = projected(self._checked_new(X), self.x_weights_, self.x_mean_)
        if y_scores is None:
            return x_scores
        check_consistent_length(x_scores, y_scores)
        return x_scores, y_scores

    def inverse_transform(self, X: Any, y: Any = None) -> Any:
        """Rows from their scores by the loadings, the best linear reconstruction; of both views if ``y`` is given."""
        check_is_fitted(self)
        Z = check_array(X, dtype=[np.float64, np.float32]) @ self.x_loadings_.T + self.x_mean_
        if y is None:
            return Z
        return Z, check_array(y, dtype=[np.float64, np.float32]) @ self.y_loadings_.T + self.y_mean_

    def predict(self, X: Any) -> np.ndarray:
        """The second view from the first, by regression on its scores."""
        check_is_fitted(self)
        Y = projected(self._checked_new(X), self.coef_.T, self.x_mean_) + self.y_mean_
        return Y[:, 0] if vars(self).get("single_target_") else Y

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


def _slopes(measured: Measured, scale: np.ndarray) -> np.ndarray:
    """(k, dy): the least-squares regression of the second view on the first one's scores, divided by ``scale``."""
    return np.linalg.pinv(measured.within[0] / np.outer(scale, scale), hermitian=True) @ (measured.towards / scale).T


@estimator
class CCA(PairMixin, StreamEstimator):
    """Canonical correlation analysis: the directions of two views whose projections correlate most.

    Parameters
    ----------
    n_components : int, optional
        How many; None for all there are, the smaller of the two views' ranks.
    ridge : float
        Added to each view's covariance, relative to its mean eigenvalue: for few rows or nearly dependent columns.
    center : {True, False, "running"}
        Whether to take off the means; see `eigenstream.problems.cca`.
    which : {"largest", "smallest"}
    {shared}

    Attributes
    ----------
    x_weights_, y_weights_ : (dx, k) and (dy, k) arrays
        Scaled so that each view's projections have unit variance.
    correlations_ : (k,) array
        Of the projections, descending.
    x_loadings_, y_loadings_ : (dx, k) and (dy, k) arrays
        Covariances of features with their own view's scores, which reconstruct the view.
    x_mean_, y_mean_ : arrays
    single_target_ : bool
        Whether ``y`` was a vector, and `predict` gives one.
    coef_, intercept_ : (dy, dx) and (dy,) arrays
        The regression behind `predict`.
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(2000, 5))
    >>> Y = X[:, :3] + rng.normal(size=(2000, 3)) * [0.5, 1.0, 2.0]
    >>> cca = es.CCA(n_components=2).fit(X, Y)
    >>> cca.correlations_.round(2).tolist()
    [0.9, 0.72]
    >>> x_scores, y_scores = cca.transform(X, Y)
    >>> round(cca.score(X, Y), 1)
    0.8
    """

    _: KW_ONLY
    ridge: float = 0.0
    center: bool | str = True
    which: str = "largest"

    def _problem(self) -> problems.Problem:
        return problems.cca(center=self.center, ridge=self.ridge)

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        W, means, measured = measure(self, result, again)
        deviations = np.sqrt(variances(measured))
        W = [w / s for w, s in zip(W, deviations, strict=True)]
        loadings = [load / s for load, s in zip(measured.loadings, deviations, strict=True)]
        self.correlations_ = np.clip(measured.across[0, 1] / np.prod(deviations, axis=0), -1, 1)
        self._set(W, means, loadings, _slopes(measured, deviations[0]))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The mean correlation of matching projections of these rows."""
        x_scores, y_scores = self.transform(X, y)
        return float(correlations(x_scores, y_scores, sample_weight).mean())


@estimator
class PLS(PairMixin, StreamEstimator):
    """Partial least squares: the directions of two views whose projections have the largest covariance.

    The singular vectors of the cross-covariance, all from the same matrix, as in scikit-learn's ``PLSSVD``.

    Parameters
    ----------
    n_components : int, optional
        How many; None for all there are, the smaller of the two views' dimensions.
    center : {True, False, "running"}
        Whether to take off the means; see `eigenstream.problems.pls`.
    {shared}

    Attributes
    ----------
    x_weights_, y_weights_ : (dx, k) and (dy, k) arrays
        Of unit length.
    covariances_, correlations_ : (k,) arrays
        Of matching projections.
    x_loadings_, y_loadings_ : (dx, k) and (dy, k) arrays
        The regression of each view on its scores, which reconstructs it.
    x_mean_, y_mean_ : arrays
    single_target_ : bool
        Whether ``y`` was a vector, and `predict` gives one.
    coef_, intercept_ : (dy, dx) and (dy,) arrays
        The regression behind `predict`.
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(2000, 5)) * [3.0, 2.0, 1.0, 1.0, 1.0]
    >>> Y = X[:, :2] + rng.normal(size=(2000, 2))
    >>> pls = es.PLS(n_components=2).fit(X, Y)
    >>> round(pls.score(X, Y), 2)
    0.85
    """

    _: KW_ONLY
    center: bool | str = True

    def _problem(self) -> problems.Problem:
        return problems.pls(center=self.center)

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        W, means, measured = measure(self, result, again)
        lengths = np.array([np.linalg.norm(w, axis=0) for w in W])
        lengths = np.where(lengths > 0, lengths, 1)
        W = [w / s for w, s in zip(W, lengths, strict=True)]
        self.covariances_ = measured.across[0, 1] / np.prod(lengths, axis=0)
        self.correlations_ = measured.across[0, 1] / np.sqrt(np.prod(variances(measured), axis=0))
        within = [G / np.outer(s, s) for G, s in zip(measured.within, lengths, strict=True)]
        loadings = [
            (load / s) @ np.linalg.pinv(G) for load, s, G in zip(measured.loadings, lengths, within, strict=True)
        ]
        self._set(W, means, loadings, _slopes(measured, lengths[0]))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """``R²`` of `predict`, the mean over the columns of ``y``."""
        y = y.toarray() if scipy.sparse.issparse(y) else y
        return float(r2_score(y, self.predict(X), sample_weight=sample_weight))

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
from eigenstream.estimators import dask_rows
from eigenstream.estimators.base import StreamEstimator, estimator, projected, rebuilt, row_options
from eigenstream.estimators.scores import Measured, correlations, measure
from eigenstream.run.result import Result


class PairMixin(ClassNamePrefixFeaturesOutMixin, TransformerMixin):
    """The part that CCA and PLS share: the second view is ``y``, and the first predicts it."""

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn from two views with the same rows; ``y`` is the second.

        Arrays, memory maps or sparse matrices, or two Dask collections.
        """
        self._forget()
        if dask_rows.is_dask(X, y):
            self.single_target_ = getattr(y, "ndim", 2) == 1
            return dask_rows.fit(self, X, y)
        return self._fit_batches(self._batches(*self._both(X, y, 2)))

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Learn from more rows of both views, one or many."""
        return self._take(self._both(X, y, 1))

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fit, and give the scores of both views; of ``X`` alone if ``y`` is a vector."""
        self.fit(X, y)
        return self.transform(X) if self.single_target_ else self.transform(X, y)

    def _both(self, X: Any, y: Any, fewest: int) -> tuple[Any, Any]:
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give the second view as y"
            )
        X = self._checked(X, fewest)
        Y = self._second(y, to_fit=True)
        check_consistent_length(X, Y)
        return X, Y

    def _second(self, y: Any, to_fit: bool = False) -> Any:
        Y = check_array(y, input_name="y", ensure_2d=False, **row_options(to_fit))
        if to_fit:
            self.single_target_ = Y.ndim == 1
        Y = Y[:, None] if Y.ndim == 1 else Y
        if "y_mean_" in vars(self) and len(self.y_mean_) != Y.shape[1]:
            raise ValueError(f"y has {Y.shape[1]} columns, but the second view was fitted with {len(self.y_mean_)}")
        return Y

    def _set(self, measured: Measured, loadings: list[np.ndarray]) -> None:
        """Set weights and loadings, and the least-squares regression of ``y`` on the scores of ``X``."""
        self.x_weights_, self.y_weights_ = measured.weights
        self.x_mean_, self.y_mean_ = measured.means
        self.x_loadings_, self.y_loadings_ = loadings
        self.n_features_in_, self.n_components_ = self.x_weights_.shape
        self.slopes_ = np.linalg.pinv(measured.within[0], hermitian=True) @ measured.towards.T
        self.intercept_ = self.y_mean_ - (self.x_mean_ @ self.x_weights_) @ self.slopes_

    @property
    def coef_(self) -> np.ndarray:
        """(dy, dx): the coefficients of `predict`, formed when they are asked for."""
        # Models of version 0.1 hold them, and no slopes.
        saved = vars(self).get("coef_")
        return (self.x_weights_ @ self.slopes_).T if saved is None else saved

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
        """Rows from their scores, the best linear reconstruction; of both views if ``y`` is given."""
        check_is_fitted(self)
        rows = rebuilt(X, self.x_loadings_, self.x_mean_)
        return rows if y is None else (rows, rebuilt(y, self.y_loadings_, self.y_mean_))

    def predict(self, X: Any) -> np.ndarray:
        """The second view from the first, by regression on its scores."""
        X = self._checked_new(X)
        if "coef_" in vars(self):
            Y = projected(X, self.coef_.T, self.x_mean_) + self.y_mean_
        else:
            Y = projected(X, self.x_weights_, self.x_mean_) @ self.slopes_.astype(X.dtype) + self.y_mean_
        return Y[:, 0] if vars(self).get("single_target_") else Y

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


@estimator
class CCA(PairMixin, StreamEstimator):
    """Canonical correlation analysis: the directions of two views whose scores correlate most.

    Parameters
    ----------
    n_components : int, optional
        Number of components. None: all whose scores vary, the smaller of the two views' ranks.
    ridge : float
        Added to each view's covariance, relative to its mean eigenvalue: for few rows or nearly dependent columns.
    center : {True, False, "running"}
        Whether to subtract the means; see `eigenstream.problems.cca`.
    which : {"largest", "smallest"}
    {shared}

    Attributes
    ----------
    x_weights_, y_weights_ : (dx, k) and (dy, k) arrays
        Scaled so that each view's scores have unit variance.
    correlations_ : (k,) array
        Correlations of matching scores, in the order of ``eigenvalues_``: without a ridge they are equal, descending.
    x_loadings_, y_loadings_ : (dx, k) and (dy, k) arrays
        Covariances of features with their own view's scores, for `inverse_transform`.
    {pair}
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
        measured = measure(self, result, again)
        if self.n_components is None:
            keep = np.all(measured.variances() > 0, axis=0)
            measured = measured.components(keep)
            self.eigenvalues_, self.residuals_ = self.eigenvalues_[keep], self.residuals_[keep]
        measured = measured.scaled(measured.deviations())
        self.correlations_ = np.clip(measured.across[0, 1], -1, 1)
        self._set(measured, measured.loadings)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The mean correlation of matching scores of these rows."""
        x_scores, y_scores = self.transform(X, y)
        return float(correlations(x_scores, y_scores, sample_weight).mean())


@estimator
class PLS(PairMixin, StreamEstimator):
    """Partial least squares: the directions of two views whose scores have the largest covariance.

    They are the singular vectors of the cross-covariance, as in scikit-learn's ``PLSSVD``.

    Parameters
    ----------
    n_components : int, optional
        Number of components. None: all, the smaller of the two views' dimensions.
    center : {True, False, "running"}
        Whether to subtract the means; see `eigenstream.problems.pls`.
    {shared}

    Attributes
    ----------
    x_weights_, y_weights_ : (dx, k) and (dy, k) arrays
        Columns of norm 1.
    covariances_, correlations_ : (k,) arrays
        Covariances and correlations of matching scores.
    x_loadings_, y_loadings_ : (dx, k) and (dy, k) arrays
        Coefficients of the regression of each view on its scores.
    {pair}
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
        measured = measure(self, result, again)
        norms = np.array([np.linalg.norm(w, axis=0) for w in measured.weights])
        measured = measured.scaled(np.where(norms > 0, norms, 1))
        self.covariances_ = measured.across[0, 1]
        self.correlations_ = self.covariances_ / np.prod(measured.deviations(), axis=0)
        parts = zip(measured.loadings, measured.within, strict=True)
        self._set(measured, [load @ np.linalg.pinv(within) for load, within in parts])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """``R²`` of `predict`, the mean over the columns of ``y``."""
        y = y.toarray() if scipy.sparse.issparse(y) else y
        return float(r2_score(y, self.predict(X), sample_weight=sample_weight))

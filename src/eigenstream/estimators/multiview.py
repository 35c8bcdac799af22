"""Canonical correlations of more than two views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, projected
from eigenstream.estimators.scores import correlations, measure, variances
from eigenstream.run.result import Result


@estimator
class MultiviewCCA(TransformerMixin, StreamEstimator):
    """Canonical correlations of two or more views.

    Parameters
    ----------
    n_components : int, optional
        How many; None for all there are.
    ridge : float
        Added to each view's covariance, relative to its mean eigenvalue.
    center : {True, False, "running"}
        Whether to take off the means.
    which : {"largest", "smallest"}
    {shared}

    Attributes
    ----------
    weights_ : list of (d, k) arrays
        One a view, scaled so that its projections have unit variance.
    correlations_ : (k,) array
        The mean correlation over all pairs of views.
    eigenvalues_ : (k,) array
        Of the problem, at most the number of views less one.
    loadings_ : list of (d, k) arrays
        Covariances of features with their own view's scores.
    means_ : list of arrays
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> shared = rng.normal(size=(2000, 1))
    >>> views = [np.c_[shared + rng.normal(size=(2000, 1)), rng.normal(size=(2000, 3))] for _ in range(3)]
    >>> model = es.MultiviewCCA(n_components=1).fit(views)
    >>> [z.shape for z in model.transform(views)]
    [(2000, 1), (2000, 1), (2000, 1)]
    >>> model.correlations_.round(1).tolist()
    [0.5]
    """

    _: KW_ONLY
    ridge: float = 0.0
    center: bool | str = True
    which: str = "largest"

    def _problem(self) -> problems.Problem:
        return problems.multiview(center=self.center, ridge=self.ridge)

    def _views(self, views: Any, finite: bool) -> tuple[Any, ...]:
        if not isinstance(views, list | tuple) or len(views) < 2:
            raise ValueError(f"views is {type(views).__name__}: give a list of two or more arrays with the same rows")
        checked = [check_array(v, accept_sparse="csr", dtype="numeric", ensure_all_finite=finite) for v in views]
        check_consistent_length(*checked)
        widths = tuple(v.shape[1] for v in checked)
        if finite and widths != tuple(len(mean) for mean in self.means_):
            fitted = [len(mean) for mean in self.means_]
            raise ValueError(f"the views have {list(widths)} features, but were fitted with {fitted}")
        return tuple(v if v.dtype.kind == "f" or not finite else v.astype(np.float64) for v in checked)

    def fit(self, views: Any, y: Any = None) -> MultiviewCCA:
        """Learn from a list of views, arrays, memory maps or sparse matrices with the same rows."""
        self._forget()
        return self._fit_batches(self._batches(*self._views(views, finite=False)))

    def partial_fit(self, views: Any, y: Any = None) -> MultiviewCCA:
        """Learn from some more rows of all views, one or many."""
        return self._take(self._views(views, finite=False))

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        W, self.means_, measured = measure(self, result, again)
        deviations = np.sqrt(variances(measured))
        self.weights_ = [w / s for w, s in zip(W, deviations, strict=True)]
        self.loadings_ = [load / s for load, s in zip(measured.loadings, deviations, strict=True)]
        self.n_components_ = W[0].shape[1]
        pairs = np.triu_indices(len(W), 1)
        scaled = measured.across / (deviations[:, None] * deviations[None])
        self.correlations_ = scaled[pairs].mean(0)

    def transform(self, views: Any) -> list[np.ndarray]:
        """The scores of every view."""
        check_is_fitted(self)
        parts = zip(self._views(views, finite=True), self.weights_, self.means_, strict=True)
        return [projected(x, w, mean) for x, w, mean in parts]

    def inverse_transform(self, scores: Any) -> list[np.ndarray]:
        """Every view from its scores by the loadings."""
        check_is_fitted(self)
        parts = zip(scores, self.loadings_, self.means_, strict=True)
        return [check_array(z) @ load.T + mean for z, load, mean in parts]

    def score(self, views: Any, y: Any = None) -> float:
        """The mean correlation of matching projections over all pairs of views and all components."""
        T = self.transform(views)
        return float(np.mean([correlations(T[i], T[j]) for i in range(len(T)) for j in range(i)]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        # A list of views: scikit-learn's generic checks, which pass one array, do not apply.
        tags.input_tags.two_d_array = False
        return tags

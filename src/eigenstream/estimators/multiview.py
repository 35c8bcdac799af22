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
from eigenstream.estimators import dask_rows
from eigenstream.estimators.base import StreamEstimator, estimator, projected, rebuilt, row_options
from eigenstream.estimators.scores import correlations, measure
from eigenstream.run.result import Result


@estimator
class MultiviewCCA(TransformerMixin, StreamEstimator):
    """Canonical correlations of two or more views.

    Parameters
    ----------
    n_components : int, optional
        Number of components. None: all.
    ridge : float
        Added to each view's covariance, relative to its mean eigenvalue.
    center : {True, False, "running"}
        Whether to subtract the means.
    which : {"largest", "smallest"}
    {shared}

    Attributes
    ----------
    weights_ : list of (d, k) arrays
        One per view, scaled so that its scores have unit variance.
    correlations_ : (k,) array
        The mean correlation over all pairs of views.
    eigenvalues_ : (k,) array
        Eigenvalues of the problem, at most the number of views less one.
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

    def _views(self, views: Any, to_fit: bool) -> tuple[Any, ...]:
        if not isinstance(views, list | tuple) or len(views) < 2:
            raise ValueError(f"views is {type(views).__name__}: give a list of two or more arrays with the same rows")
        checked = tuple(check_array(view, **row_options(to_fit)) for view in views)
        check_consistent_length(*checked)
        if not to_fit:
            widths, fitted = [view.shape[1] for view in checked], [len(mean) for mean in self.means_]
            if widths != fitted:
                raise ValueError(f"the views have {widths} features, but were fitted with {fitted}")
        return checked

    def fit(self, views: Any, y: Any = None) -> MultiviewCCA:
        """Learn from a list of views with the same rows: arrays, memory maps, sparse matrices or Dask collections."""
        self._forget()
        if isinstance(views, list | tuple) and dask_rows.is_dask(*views):
            return dask_rows.fit(self, *views)
        return self._fit_batches(self._batches(*self._views(views, to_fit=True)))

    def partial_fit(self, views: Any, y: Any = None) -> MultiviewCCA:
        """Learn from more rows of all views, one or many."""
        return self._take(self._views(views, to_fit=True))

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        measured = measure(self, result, again)
        measured = measured.scaled(measured.deviations())
        self.weights_, self.means_, self.loadings_ = measured.weights, measured.means, measured.loadings
        self.n_components_ = measured.across.shape[2]
        self.correlations_ = measured.across[np.triu_indices(len(self.weights_), 1)].mean(0)

    def transform(self, views: Any) -> list[np.ndarray]:
        """The scores of every view."""
        check_is_fitted(self)
        parts = zip(self._views(views, to_fit=False), self.weights_, self.means_, strict=True)
        return [projected(x, w, mean) for x, w, mean in parts]

    def inverse_transform(self, scores: Any) -> list[np.ndarray]:
        """Every view from its scores and loadings."""
        check_is_fitted(self)
        parts = zip(scores, self.loadings_, self.means_, strict=True)
        return [rebuilt(z, load, mean) for z, load, mean in parts]

    def score(self, views: Any, y: Any = None) -> float:
        """The mean correlation of matching scores over all pairs of views and all components."""
        T = self.transform(views)
        return float(np.mean([correlations(T[i], T[j]) for i in range(len(T)) for j in range(i)]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # The input is a list of views: scikit-learn's generic checks, which pass one array, do not apply.
        tags.input_tags.two_d_array = False
        return tags

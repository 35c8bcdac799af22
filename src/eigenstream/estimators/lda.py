"""Linear discriminant analysis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import log_expit, logsumexp
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_consistent_length, column_or_1d

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators import dask_rows
from eigenstream.estimators.base import StreamEstimator, estimator, flat, projected
from eigenstream.run.result import Result
from eigenstream.streams.batching import Batches


@estimator
class LDA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, StreamEstimator):
    """Linear discriminant analysis: directions that separate classes, and a classifier with one covariance for all.

    Parameters
    ----------
    n_components : int, optional
        Number of discriminants that `transform` gives. None: all. With ``"auto"`` and ``"exact"`` all are solved for
        and `predict` uses all, as in scikit-learn; other solvers find this many.
    ridge : float
        Added to the within-class covariance, relative to its mean eigenvalue.
    priors : (n_classes,) array, optional
        Class probabilities. Default: the class frequencies.
    {shared}

    Attributes
    ----------
    classes_ : array
    scalings_ : (d, k) array
        Scaled so that projections have unit variance within classes.
    means_ : (n_classes, d) array
    xbar_ : (d,) array
        Mean of the class means, weighted by the priors.
    priors_ : (n_classes,) array
    explained_variance_ratio_ : (k,) array
        Share of the variance between classes.
    coef_, intercept_ : arrays
        Linear functions that `predict` compares: one per class, or one for two classes.
    {learned}

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> import eigenstream as es
    >>> X, y = load_iris(return_X_y=True)
    >>> lda = es.LDA().fit(X, y)
    >>> lda.transform(X).shape, lda.score(X, y)
    ((150, 2), 0.98)
    """

    _: KW_ONLY
    ridge: float = 0.0
    priors: Any = None

    def _problem(self) -> problems.Problem:
        if self.priors is not None:
            priors = np.asarray(self.priors, np.float64)
            if priors.shape != self.classes_.shape or (priors < 0).any() or not np.isclose(priors.sum(), 1):
                raise ValueError(f"priors={self.priors!r}: give {len(self.classes_)} numbers of at least 0 with sum 1")
        return problems.lda(len(self.classes_), ridge=self.ridge)

    def _wanted(self) -> int | None:
        most = min(len(self.classes_) - 1, getattr(self, "n_features_in_", len(self.classes_)))
        if self.n_components is not None and not 1 <= self.n_components <= most:
            raise ValueError(
                f"n_components={self.n_components!r}: there are {most} discriminants of {len(self.classes_)} classes; "
                f"give a number from 1 to {most}, or None"
            )
        all_at_once = self.solver in ("auto", "exact") or getattr(self.solver, "whole_spectrum", False)
        return None if all_at_once else self.n_components

    def fit(self, X: Any, y: Any) -> LDA:
        """Learn from rows ``X`` and their classes ``y``; both may be Dask collections."""
        self._forget()
        if dask_rows.is_dask(X, y):
            classes = dask_rows.distinct(y)
            check_classification_targets(classes)
            self._set_classes(classes)
            return dask_rows.fit(self, X, labels=y, number=partial(numbered, self.classes_))
        X = self._checked(X, 2)
        y = self._labels(X, y)
        self._set_classes(y)
        return self._fit_batches(self._batches(X, self._numbered(y)))

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> LDA:
        """Learn from more rows, one or many; the first call must name all ``classes``."""
        first = "_run" not in vars(self)
        X = self._checked(X, 1)
        y = self._labels(X, y)
        if first:
            if classes is None and "solver_" not in vars(self):
                raise ValueError("classes must be given on the first call to partial_fit: all that will ever come")
            self._set_classes(self.classes_ if classes is None else classes)
        elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(f"classes={classes!r} is not the same as on the first call to partial_fit")
        return self._take((X, self._numbered(y)))

    def fit_stream(self, batches: Iterable[Tree], *, classes: Any = None, **options: Any) -> LDA:
        """Learn from an iterable of pairs ``(X, y)``.

        Parameters
        ----------
        batches : iterable
            A list, a generator, `eigenstream.streams.batches` or a PyTorch ``DataLoader``.
        classes : array, optional
            All classes. Default: found in a first pass, which needs an iterable that starts anew each time.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        if isinstance(batches, Iterator) and classes is None:
            raise ValueError("classes must be given for a stream that can be read once only: all that occur in it")
        numbered: Any
        if isinstance(batches, Batches):
            if (count := len(batches.sources)) != 2:
                raise ValueError(f"the batches have {count} sources: LDA takes two, rows and their labels")
            labels = np.asarray(batches.sources[1][: batches.n_rows]).ravel()
            self._set_classes(labels if classes is None else classes)
            numbered = replace(batches, sources=(batches.sources[0], self._numbered(labels)))
        else:
            if classes is None:
                classes = np.concatenate([np.unique(y) for _, y in batches])
            self._set_classes(classes)
            numbered = _Numbered(batches, self)
        return self._fit_batches(iter(numbered) if isinstance(batches, Iterator) else numbered, **options)

    def _labels(self, X: Any, y: Any) -> np.ndarray:
        if y is None:
            raise ValueError("LDA requires y to be passed, but the target y is None: give the class of every row")
        check_classification_targets(y)
        check_consistent_length(X, y)
        return column_or_1d(y, warn=True)

    def _set_classes(self, labels: Any) -> None:
        classes = unique_labels(labels)
        if len(classes) < 2:
            raise ValueError("y holds one class: LDA needs at least two")
        self.classes_ = classes

    def _numbered(self, y: Any) -> np.ndarray:
        return numbered(self.classes_, y)

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        assert result.summary is not None
        counts, means = result.summary.counts, flat(result.summary.means).T
        W = flat(result.eigenvectors)
        k = W.shape[1] if self.n_components is None else min(self.n_components, W.shape[1])
        self.n_features_in_, self.n_components_ = W.shape[0], k
        self.priors_ = counts / counts.sum() if self.priors is None else np.asarray(self.priors, np.float64)
        self.means_, self.xbar_, self.scalings_ = means, self.priors_ @ means, W[:, :k]
        between = np.maximum(self.eigenvalues_, 0)
        self.explained_variance_ratio_ = between[:k] / between.sum() if between.sum() > 0 else np.zeros(k)
        self.eigenvalues_, self.residuals_ = self.eigenvalues_[:k], self.residuals_[:k]
        centres = (means - self.xbar_) @ W
        with np.errstate(divide="ignore"):
            offset = np.log(self.priors_) - 0.5 * (centres**2).sum(1)
        coef = centres @ W.T
        intercept = offset - coef @ self.xbar_
        if len(counts) == 2:
            coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        self.coef_, self.intercept_ = coef, intercept

    def transform(self, X: Any) -> np.ndarray:
        """The discriminants of every row."""
        return projected(self._checked_new(X), self.scalings_, self.xbar_)

    def decision_function(self, X: Any) -> np.ndarray:
        """A linear function per class, largest for the likeliest class; for two classes, the difference of both."""
        X = self._checked_new(X)
        values = projected(X, self.coef_.T, self.xbar_) + (self.intercept_ + self.coef_ @ self.xbar_)
        return values[:, 0] if len(self.classes_) == 2 else values

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of every row."""
        values = self.decision_function(X)
        return self.classes_[(values > 0).astype(int) if values.ndim == 1 else values.argmax(1)]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithms of `predict_proba`."""
        values = self.decision_function(X)
        if values.ndim == 1:
            return np.c_[log_expit(-values), log_expit(values)]
        return values - logsumexp(values, axis=1, keepdims=True)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class."""
        return np.exp(self.predict_log_proba(X))


def numbered(classes: np.ndarray, y: Any) -> np.ndarray:
    """The index of each label in ``classes``."""
    y = np.asarray(y).ravel()
    numbers = np.searchsorted(classes, y)
    known = classes[np.minimum(numbers, len(classes) - 1)] == y
    if not known.all():
        raise ValueError(f"y holds {y[~known][0]!r}, which is not among the classes {classes.tolist()}")
    return numbers


class _Numbered:
    """Batches ``(X, y)`` with the labels as indices of classes; starts anew each time it is iterated."""

    def __init__(self, batches: Iterable[Tree], lda: LDA):
        self.batches, self.lda = batches, lda

    def __iter__(self) -> Iterator[Tree]:
        return ((X, self.lda._numbered(y)) for X, y in self.batches)

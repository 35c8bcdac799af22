"""Linear discriminant analysis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_expit, logsumexp
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, flat, projected
from eigenstream.run.loop import Callback
from eigenstream.run.result import Result
from eigenstream.streams.batching import Batches


@estimator
class LDA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, StreamEstimator):
    """Linear discriminant analysis: directions that separate classes, and a classifier of equal covariances.

    Parameters
    ----------
    n_components : int, optional
        Discriminants that `transform` gives; None for all there are, one fewer than classes. All are solved for, and
        `predict` uses all, as in scikit-learn.
    ridge : float
        Added to the within-class covariance, relative to its mean eigenvalue.
    priors : (n_classes,) array, optional
        Of the classes; their frequencies by default.
    {shared}

    Attributes
    ----------
    classes_ : array
    scalings_ : (d, k) array
        Scaled so that projections have unit variance within classes.
    means_ : (n_classes, d) array
    xbar_ : (d,) array
        The classes' means, weighted by the priors.
    priors_ : (n_classes,) array
    explained_variance_ratio_ : (k,) array
        Of the variance between classes, among the discriminants found.
    coef_, intercept_ : arrays
        The linear functions behind `predict`, one a class, or one for two classes.
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
                many = len(self.classes_)
                raise ValueError(f"priors={self.priors!r}: give {many} numbers of at least 0 that add up to 1")
        return problems.lda(len(self.classes_), ridge=self.ridge)

    def _wanted(self) -> int | None:
        most = min(len(self.classes_) - 1, getattr(self, "n_features_in_", len(self.classes_)))
        if self.n_components is not None and not 1 <= self.n_components <= most:
            raise ValueError(
                f"n_components={self.n_components!r}: there are {most} discriminants of {len(self.classes_)} classes; "
                f"give a number from 1 to {most}, or None"
            )
        return None

    def fit(self, X: Any, y: Any) -> LDA:
        """Learn from rows ``X`` and their classes ``y``."""
        self._forget()
        X = self._checked(X, True, 2)
        y = self._labels(X, y)
        self._set_classes(unique_labels(y))
        return self._fit_batches(self._batches(X, np.searchsorted(self.classes_, y)))

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> LDA:
        """Learn from some more rows, one or many; the first call must name all ``classes``."""
        first = "_run" not in vars(self)
        X = self._checked(X, first, 1)
        y = self._labels(X, y)
        if first:
            if classes is None:
                raise ValueError("classes must be given on the first call to partial_fit: all that will ever come")
            self._set_classes(unique_labels(classes))
        elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(f"classes={classes!r} is not the same as on the first call to partial_fit")
        return self._take((X, self._numbered(y)))

    def fit_stream(
        self,
        batches: Iterable[Tree],
        *,
        classes: Any = None,
        callbacks: Iterable[Callback] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: float = 60.0,
    ) -> LDA:
        """Learn from an iterable of pairs ``(X, y)``.

        Parameters
        ----------
        batches : iterable
            A list, a generator, `eigenstream.streams.batches`, a PyTorch ``DataLoader``.
        classes : array, optional
            All that occur. Left out, a first pass finds them, which needs an iterable that starts anew each time.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        if isinstance(batches, Batches) and len(batches.sources) != 2:
            raise ValueError(f"the batches have {len(batches.sources)} sources: LDA takes two, rows and their labels")
        if classes is None:
            classes = _classes_of(batches)
        self._set_classes(unique_labels(classes))
        numbered: Any = _Numbered(batches, self)
        if isinstance(batches, Batches):
            labels = np.concatenate([self._numbered(y) for y in _labels_in(batches)])
            numbered = Batches((batches.sources[0], labels), batches.batch_size, batches.shuffle, batches.random_state)
        elif isinstance(batches, Iterator):
            numbered = iter(numbered)
        return self._fit_batches(numbered, self._run_folder(folder, resume, checkpoint_every), callbacks)

    def _labels(self, X: Any, y: Any) -> np.ndarray:
        if y is None:
            raise ValueError("LDA requires y to be passed, but the target y is None: give the class of every row")
        check_classification_targets(y)
        check_consistent_length(X, y)
        return column_or_1d(y, warn=True)

    def _set_classes(self, classes: np.ndarray) -> None:
        if len(classes) < 2:
            raise ValueError("y holds one class: LDA needs at least two")
        self.classes_ = classes

    def _numbered(self, y: Any) -> np.ndarray:
        y = np.asarray(y).ravel()
        numbers = np.searchsorted(self.classes_, y)
        known = self.classes_[np.minimum(numbers, len(self.classes_) - 1)] == y
        if not known.all():
            raise ValueError(f"y holds {y[~known][0]!r}, which is not among the classes {self.classes_.tolist()}")
        return numbers

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

    @property
    def _n_features_out(self) -> int:
        return self.scalings_.shape[1]

    def transform(self, X: Any) -> np.ndarray:
        """The discriminants of every row."""
        check_is_fitted(self)
        return projected(self._checked_new(X), self.scalings_, self.xbar_)

    def decision_function(self, X: Any) -> np.ndarray:
        """A linear function for every class, largest for the likeliest; of two classes, their difference."""
        check_is_fitted(self)
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class _Numbered:
    """Batches with classes by their numbers."""

    def __init__(self, batches: Iterable[Tree], lda: LDA):
        self.batches, self.lda = batches, lda

    def __iter__(self) -> Any:
        return ((X, self.lda._numbered(y)) for X, y in self.batches)


def _labels_in(batches: Batches) -> Iterable[np.ndarray]:
    labels = batches.sources[1]
    return (np.asarray(labels[lo : lo + 2**20]).ravel() for lo in range(0, batches.n_rows, 2**20))


def _classes_of(batches: Any) -> np.ndarray:
    if isinstance(batches, Batches):
        labels = _labels_in(batches)
    elif isinstance(batches, Iterator):
        raise ValueError("classes must be given for a stream that can be read once only: all that occur in it")
    else:
        labels = (np.asarray(y).ravel() for _, y in batches)
    return np.unique(np.concatenate([np.unique(part) for part in labels]))

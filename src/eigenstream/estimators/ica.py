"""Independent component analysis."""

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
class ICA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, StreamEstimator):
    """Independent components by excess kurtosis, one generalized eigenproblem (Parra and Sajda, 2003).

    Sources are told apart by their kurtosis: two of the same are found as a mixture.

    Parameters
    ----------
    n_components : int, optional
        How many; None for all there are.
    which : {"magnitude", "largest", "smallest"}
        Which kurtosis comes first: far from a Gaussian's either way, peaked, or flat. A streaming solver needs one of
        the last two.
    center : {True, False, "running"}
        Whether to take off the mean.
    ridge : float
        Added to the covariance, relative to its mean eigenvalue.
    {shared}

    Attributes
    ----------
    components_ : (k, d) array
        The unmixing matrix; sources have unit variance.
    mixing_ : (d, k) array
        Its pseudo-inverse.
    mean_ : (d,) array
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X, S = es.datasets.mixed_signals()
    >>> ica = es.ICA().fit(X)
    >>> found = ica.transform(X)
    >>> bool((abs(np.corrcoef(found.T, S.T)[:3, 3:]).max(1) > 0.98).all())
    True
    """

    _: KW_ONLY
    which: str = "magnitude"
    center: bool | str = True
    ridge: float = 0.0

    _single_view = True

    def _problem(self) -> problems.Problem:
        return problems.ica(center=self.center, ridge=self.ridge)

    def fit(self, X: Any, y: Any = None) -> ICA:
        """Learn the unmixing of ``X``, rows by features."""
        self._forget()
        return self._fit_batches(self._batches(self._checked(X, True, 2)))

    def partial_fit(self, X: Any, y: Any = None) -> ICA:
        """Learn from some more rows, one or many.

        Centred rows take up to 128 features this way, or 16 after `fit`; with ``center=False`` there is no limit.
        """
        run = vars(self).get("_run")
        if run is not None and not run.engine.takes_more_rows:
            raise ValueError(
                "fit took its moments about the mean of its own rows, which more rows would move: call partial_fit on "
                "a new ICA, from the first rows on"
            )
        return self._take(self._checked(X, "_run" not in vars(self), 1))

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        assert result.summary is not None
        W, mean = flat(result.eigenvectors), flat(result.summary.means)[:, 0]
        self.mean_ = mean if self.center else np.zeros_like(mean)
        self.components_ = np.ascontiguousarray(W.T)
        self.mixing_ = np.linalg.pinv(self.components_)
        self.n_features_in_, self.n_components_ = W.shape

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[0]

    def transform(self, X: Any) -> np.ndarray:
        """The sources of every row."""
        check_is_fitted(self)
        return projected(self._checked_new(X), self.components_.T, self.mean_)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows from their sources."""
        check_is_fitted(self)
        return check_array(X, dtype=[np.float64, np.float32]) @ self.mixing_.T + self.mean_

    def score(self, X: Any, y: Any = None) -> float:
        """The mean magnitude of the excess kurtosis of the sources in these rows."""
        S = self.transform(X).astype(np.float64)
        S = S - S.mean(0)
        return float(np.abs((S**4).mean(0) / np.maximum((S**2).mean(0), np.finfo(np.float64).tiny) ** 2 - 3).mean())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

"""Independent component analysis."""

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
class ICA(OneViewMixin, StreamEstimator):
    """Independent components by excess kurtosis, one generalized eigenproblem (Parra and Sajda, 2003).

    Sources of equal kurtosis are not separated. With centred rows `partial_fit` takes up to 128 features, or up to 16
    after `fit`; with ``center=False`` there is no limit.

    Parameters
    ----------
    n_components : int, optional
        Number of components. None: all.
    which : {"magnitude", "largest", "smallest"}
        Which kurtosis comes first: largest magnitude, peaked, or flat. A streaming solver needs one of the last two.
    center : {True, False, "running"}
        Whether to subtract the mean.
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

    def _problem(self) -> problems.Problem:
        return problems.ica(center=self.center, ridge=self.ridge)

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        assert result.summary is not None
        self._set_components(flat(result.eigenvectors), flat(result.summary.means)[:, 0])
        self.mixing_ = np.linalg.pinv(self.components_)

    def transform(self, X: Any) -> np.ndarray:
        """The sources of every row."""
        return projected(self._checked_new(X), self.components_.T, self.mean_)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows from their sources."""
        check_is_fitted(self)
        return rebuilt(X, self.mixing_, self.mean_)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean magnitude of the excess kurtosis of the sources in these rows."""
        S = self.transform(X).astype(np.float64)
        S = S - S.mean(0)
        return float(np.abs((S**4).mean(0) / np.maximum((S**2).mean(0), np.finfo(np.float64).tiny) ** 2 - 3).mean())

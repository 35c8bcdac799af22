"""Which correlations are more than chance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from sklearn.base import clone
from sklearn.utils import check_random_state

from eigenstream.estimators.pairs import CCA, PLS


class PermutationTest(NamedTuple):
    """The outcome of `permutation_test`."""

    #: (k,): correlations of CCA, covariances of PLS.
    statistics: np.ndarray
    #: (k,): the probability of a statistic as large without any relation; never falls from one component to the next.
    p_values: np.ndarray
    #: (n_permutations, k): what chance gave.
    null: np.ndarray


def permutation_test(
    estimator: CCA | PLS, X: Any, y: Any, *, n_permutations: int = 999, random_state: Any = 0
) -> PermutationTest:
    """Test every component of CCA or PLS against rows of ``y`` in random order.

    Each component is tested in what the ones before it leave over, and takes the largest p-value so far, which keeps
    the chance of any false finding at the level of the test (Winkler, Renaud, Smith and Nichols, 2020). Rows must be
    exchangeable: no trend, no blocks. All dimensions of both views are used, in memory.

    Parameters
    ----------
    estimator : CCA or PLS
        Its ``n_components``, ``ridge`` and ``center`` are used; it need not be fitted and is not changed.
    X, y : arrays
        The two views.
    n_permutations : int
        The smallest p-value is one over one more than this.
    random_state : int, RandomState or None

    Returns
    -------
    PermutationTest

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> X, Y = rng.normal(size=(200, 4)), rng.normal(size=(200, 3))
    >>> Y[:, 0] += X[:, 0]
    >>> test = es.permutation_test(es.CCA(), X, Y, n_permutations=199)
    >>> (test.p_values < 0.05).tolist()
    [True, False, False]
    """
    if not isinstance(estimator, CCA | PLS):
        raise ValueError(f"estimator is {type(estimator).__name__}: give a CCA or a PLS")
    if not (isinstance(n_permutations, int | np.integer) and n_permutations >= 1):
        raise ValueError(f"n_permutations={n_permutations!r}: give a whole number of at least 1")
    views = clone(estimator)._both(X, y, True, 2)
    bases = [_basis(view, estimator) for view in views]
    U, statistics, Vt = scipy.linalg.svd(bases[0].T @ bases[1])
    k = min(len(statistics), estimator.n_components or len(statistics))
    # Both views in the coordinates of their components, so that leaving out the first is leaving out columns.
    T, R = bases[0] @ U, bases[1] @ Vt.T
    generator = check_random_state(random_state)
    null = np.empty((n_permutations, k))
    for i in range(n_permutations):
        product = T[generator.permutation(len(T))].T @ R
        null[i] = [np.linalg.norm(product[j:, j:], 2) for j in range(k)]
    chance = (1 + (null >= statistics[:k] * (1 - 1e-12)).sum(0)) / (1 + n_permutations)
    return PermutationTest(statistics[:k], np.maximum.accumulate(chance), null)


def _basis(view: Any, estimator: CCA | PLS) -> np.ndarray:
    """Rows such that the product of two views' is their correlation (CCA) or covariance (PLS)."""
    X = np.asarray(view.toarray() if hasattr(view, "toarray") else view, np.float64)
    X = X - X.mean(0) if estimator.center else X
    X = X / np.sqrt(len(X) - bool(estimator.center))
    if isinstance(estimator, PLS):
        return X
    U, s, _ = scipy.linalg.svd(X, full_matrices=False)
    keep = s > max(X.shape) * np.finfo(np.float64).eps * s[0]
    # With a ridge, whitening by (C + rI) leaves singular directions shrunk rather than of unit length.
    bump = estimator.ridge * (s**2).sum() / X.shape[1]
    return U[:, keep] * (s[keep] / np.sqrt(s[keep] ** 2 + bump))

"""Permutation tests of canonical correlations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from sklearn.base import clone
from sklearn.utils import check_random_state

from eigenstream.core.settings import check_count
from eigenstream.estimators.pairs import CCA, PLS


class PermutationTest(NamedTuple):
    """The result of `permutation_test`."""

    #: (k,): correlations of CCA, covariances of PLS.
    statistics: np.ndarray
    #: (k,): probabilities of a statistic as large if the views are independent; they never decrease.
    p_values: np.ndarray
    #: (n_permutations, k): statistics of the permuted rows.
    null: np.ndarray


def permutation_test(
    estimator: CCA | PLS, X: Any, y: Any, *, n_permutations: int = 999, random_state: Any = 0
) -> PermutationTest:
    """Test every component of CCA or PLS against rows of ``y`` in random order.

    The components before the tested one are removed first. Its p-value is at least that of every component before it,
    which controls the family-wise error rate (Winkler, Renaud, Smith and Nichols, 2020). Rows must be exchangeable: no
    trend, no blocks. Both views are held in memory as dense arrays.

    Parameters
    ----------
    estimator : CCA or PLS
        Gives ``n_components``, ``ridge`` and ``center``. It need not be fitted and is not changed.
    X, y : arrays
        The two views.
    n_permutations : int
        The smallest possible p-value is ``1 / (n_permutations + 1)``.
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
    check_count("n_permutations", n_permutations)
    bases = [_basis(view, estimator) for view in clone(estimator)._both(X, y, 2)]
    U, statistics, Vt = scipy.linalg.svd(bases[0].T @ bases[1])
    k = min(len(statistics), estimator.n_components or len(statistics))
    # In the coordinates of the components, removing the first components is dropping columns.
    T, R = bases[0] @ U, bases[1] @ Vt.T
    generator = check_random_state(random_state)
    null = np.empty((n_permutations, k))
    for i in range(n_permutations):
        product = T[generator.permutation(len(T))].T @ R
        null[i] = [np.linalg.norm(product[j:, j:], 2) for j in range(k)]
    chance = (1 + (null >= statistics[:k] * (1 - 1e-12)).sum(0)) / (1 + n_permutations)
    return PermutationTest(statistics[:k], np.maximum.accumulate(chance), null)


def _basis(view: Any, estimator: CCA | PLS) -> np.ndarray:
    """Scaled rows: the product of two views is their correlation after whitening (CCA) or their covariance (PLS)."""
    X = np.asarray(view.toarray() if hasattr(view, "toarray") else view, np.float64)
    X = X - X.mean(0) if estimator.center else X
    X = X / np.sqrt(len(X) - bool(estimator.center))
    if isinstance(estimator, PLS):
        return X
    U, s, _ = scipy.linalg.svd(X, full_matrices=False)
    keep = s > max(X.shape) * np.finfo(np.float64).eps * s[0]
    # Whitening by C + ridge · I shrinks the singular directions.
    ridge = estimator.ridge * (s**2).sum() / X.shape[1]
    return U[:, keep] * (s[keep] / np.sqrt(s[keep] ** 2 + ridge))

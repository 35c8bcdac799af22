"""Problems for `eigenstream.solve`: each function returns a definition of ``A`` and ``B``."""

from __future__ import annotations

from typing import Any

from eigenstream.problems.base import Problem, Products
from eigenstream.problems.checks import check_options
from eigenstream.problems.covariance import CCA, PCA, PLS
from eigenstream.problems.graphs import Edges, laplacian_pair
from eigenstream.problems.ica import ICA
from eigenstream.problems.lda import LDA
from eigenstream.problems.matrices import Matrices, check_operands, matrices

__all__ = ["Problem", "Products", "cca", "ica", "laplacian", "lda", "matrices", "multiview", "pca", "pls"]


def pca(*, center: bool | str = True, ridge: float = 0.0) -> PCA:
    """Principal components: ``A`` is the covariance, ``B`` the identity. A batch is ``X``.

    Parameters
    ----------
    center : {True, False, "running"}
        True: centre each batch by its own mean and divide by ``b - 1``, which is unbiased. ``"running"``: centre by
        the running mean, as the paper does. False: the rows are centred already.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> es.solve(es.problems.pca(), [X], k=1).eigenvalues.round(1).tolist()
    [8.8]
    """
    return PCA(center, ridge)


def cca(*, center: bool | str = True, ridge: float = 0.0) -> CCA:
    """Canonical correlations of two views. A batch is ``(X, Y)``; the eigenvalues are the correlations.

    Parameters
    ----------
    center : {True, False, "running"}
        As for `pca`.
    ridge : float
        Added to the covariance of each view, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3))
    >>> Y = X @ [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    >>> es.solve(es.problems.cca(), [(X, Y)], k=2).eigenvalues.round(6).tolist()
    [1.0, 1.0]
    """
    return CCA(2, center, ridge)


def multiview(*, center: bool | str = True, ridge: float = 0.0) -> CCA:
    """Canonical correlations of two or more views. A batch is ``(X1, X2, ...)``.

    The largest possible eigenvalue is the number of views minus 1.

    Parameters
    ----------
    center, ridge
        As for `cca`.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 2))
    >>> es.solve(es.problems.multiview(), [(X, X, X)], k=1).eigenvalues.round(6).tolist()
    [2.0]
    """
    return CCA(None, center, ridge)


def pls(*, center: bool | str = True, ridge: float = 0.0) -> PLS:
    """Partial least squares: the directions of two views with the largest covariance. A batch is ``(X, Y)``.

    Parameters
    ----------
    center, ridge
        As for `pca`.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 2)) * [2.0, 1.0]
    >>> es.solve(es.problems.pls(), [(X, X)], k=1).eigenvalues.round(1).tolist()
    [4.2]
    """
    return PLS(center, ridge)


def lda(n_classes: int, *, ridge: float = 0.0) -> LDA:
    """Linear discriminants. A batch is ``(X, labels)``, labels whole numbers below ``n_classes``.

    Parameters
    ----------
    n_classes : int
        The number of classes; there are at most ``n_classes - 1`` discriminants.
    ridge : float
        Added to the within-class covariance, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> y = np.arange(1000) % 2
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) + 6 * y[:, None] * [1, 0, 0]
    >>> es.solve(es.problems.lda(2), [(X, y)], k=1).eigenvalues.round(0).tolist()
    [9.0]
    """
    return LDA(n_classes, ridge)


def ica(*, center: bool | str = True, ridge: float = 0.0) -> ICA:
    """Independent components by excess kurtosis. A batch is ``X``.

    Parameters
    ----------
    center : {True, False, "running"}
        True or ``"running"``: a stream is centred by its running mean (a fourth moment about a batch's own mean is
        biased), an exact solution by the mean of all rows. False: the rows are centred already.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> S = np.random.default_rng(0).uniform(-1, 1, size=(4000, 2)) * [3.0, 1.0]
    >>> es.solve(es.problems.ica(), [S], k=1, which="smallest").eigenvalues.round(0).tolist()
    [-4.0]
    """
    return ICA(center, ridge)


def laplacian(
    graph: Any = None,
    *,
    normalized: bool = True,
    n_nodes: int | None = None,
    n_edges: int | None = None,
    ridge: float = 0.0,
) -> Matrices | Edges:
    """Graph Laplacian: ``L v = λ D v`` (normalised) or ``L v = λ v``.

    Parameters
    ----------
    graph : array or scipy.sparse matrix, optional
        The symmetric adjacency. Default: a stream of edges, with batches ``(sources, targets)`` or ``(sources,
        targets, weights)`` and each undirected edge once.
    normalized : bool
        True: ``B`` is the diagonal matrix of degrees. False: ``B`` is the identity.
    n_nodes : int
        The number of nodes, for a stream of edges.
    n_edges : int
        The number of edges in the graph, for a stream of edges with ``normalized=False``.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> ring = np.roll(np.eye(6), 1, axis=1)
    >>> problem = es.problems.laplacian(ring + ring.T)
    >>> abs(es.solve(problem, None, k=2, which="smallest").eigenvalues.round(3)).tolist()
    [0.0, 0.5]
    """
    if graph is not None:
        check_options(False, ridge)
        W = check_operands(graph, None, None).A
        if W.min() < 0:
            raise ValueError("graph has negative weights: a Laplacian needs weights of at least 0")
        return matrices(*laplacian_pair(W, normalized, ridge))
    if n_nodes is None:
        raise ValueError("give graph, a symmetric adjacency, or n_nodes and a stream of edges")
    return Edges(n_nodes, normalized, n_edges, ridge)

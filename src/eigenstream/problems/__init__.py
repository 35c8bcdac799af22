"""Problems for `eigenstream.solve`: definitions of ``A`` and ``B``."""

from __future__ import annotations

from typing import Any

from eigenstream.problems.base import Problem, Products
from eigenstream.problems.checks import check_options
from eigenstream.problems.covariance import CCA
from eigenstream.problems.covariance import PCA as pca
from eigenstream.problems.covariance import PLS as pls
from eigenstream.problems.graphs import Edges, laplacian_pair
from eigenstream.problems.ica import ICA as ica
from eigenstream.problems.lda import LDA as lda
from eigenstream.problems.matrices import Matrices, check_operands, matrices

__all__ = ["Problem", "Products", "cca", "ica", "laplacian", "lda", "matrices", "multiview", "pca", "pls"]


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

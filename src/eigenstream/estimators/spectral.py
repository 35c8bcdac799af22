"""Embeddings and clusters by the Laplacian of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.base import ClusterMixin
from sklearn.cluster import KMeans
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.neighbors import kneighbors_graph
from sklearn.utils.validation import validate_data

from eigenstream import problems
from eigenstream.core.memory import free_bytes
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, flat
from eigenstream.run.result import Result


class GraphMixin:
    """The part that estimators of a graph share: the Laplacian of rows, of a matrix or of a stream of edges."""

    which = "smallest"

    def fit(self: Any, X: Any, y: Any = None) -> Any:
        """Learn from rows by features, or from a symmetric matrix of weights if ``affinity="precomputed"``."""
        self._forget()
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        self.affinity_matrix_ = self._affinity(X)
        return self._fit_graph(problems.laplacian(self.affinity_matrix_, ridge=self.ridge), X.shape[0], None)

    def fit_stream(self: Any, batches: Iterable[Tree], *, n_nodes: int | None = None, **options: Any) -> Any:
        """Learn from a stream of edges, each undirected edge once.

        Parameters
        ----------
        batches : iterable
            Tuples ``(sources, targets)`` or ``(sources, targets, weights)`` of arrays.
        n_nodes : int, optional
            Number of nodes. Default: found in a first pass, which needs an iterable that starts anew.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        if n_nodes is None:
            if isinstance(batches, Iterator):
                raise ValueError("n_nodes must be given for a stream that can be read once only")
            n_nodes = 1 + max((max(np.max(i), np.max(j)) for i, j, *_ in batches), default=-1)
        n_nodes = int(n_nodes)
        return self._fit_graph(problems.laplacian(n_nodes=n_nodes, ridge=self.ridge), n_nodes, batches, **options)

    def _problem(self: Any) -> problems.Problem:
        """The problem of a stream of edges, after it was fitted."""
        return problems.laplacian(n_nodes=len(self.embedding_), ridge=self.ridge)

    def _fit_graph(self: Any, problem: problems.Problem, nodes: int, batches: Any, **options: Any) -> Any:
        budget = free_bytes() / 2 if self.memory_budget is None else self.memory_budget
        if self._wanted() is None and 6 * 8 * nodes**2 > budget:
            raise ValueError(f"n_components=None: all {nodes} components do not fit memory_budget; give a number")
        try:
            return self._fit_batches(batches, problem=problem, **options)
        finally:
            # The run holds the graph, which can be large. Only the summed edges of a stream are kept, to be merged.
            if batches is None or ("_run" in vars(self) and not self._run.engine.sums_rows):
                vars(self).pop("_run", None)

    def _affinity(self: Any, X: Any) -> Any:
        if X.shape[0] == X.shape[1] and self.affinity != "precomputed":
            warnings.warn('X is square: if it is a graph, give affinity="precomputed"', stacklevel=3)
        if self.affinity == "precomputed":
            if X.shape[0] != X.shape[1]:
                raise ValueError(f'affinity="precomputed", but X has shape {X.shape}: give a square symmetric matrix')
            return X
        if self.affinity == "nearest_neighbors":
            n = X.shape[0]
            neighbors = max(n // 10, 2) if self.n_neighbors is None else min(self.n_neighbors, n)
            graph = kneighbors_graph(X, neighbors, include_self=True)
            return (graph + graph.T) / 2
        if not (callable(self.affinity) or isinstance(self.affinity, str)):
            raise ValueError(
                f"affinity={self.affinity!r}: give 'nearest_neighbors', 'precomputed', a kernel's name or a function"
            )
        gamma = 1 / X.shape[1] if self.gamma is None else self.gamma
        options = {} if callable(self.affinity) else {"filter_params": True, "gamma": gamma}
        return pairwise_kernels(X, metric=self.affinity, **options)

    def __sklearn_tags__(self: Any) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.pairwise = self.affinity == "precomputed"
        return tags


@estimator
class SpectralEmbedding(GraphMixin, StreamEstimator):
    """Laplacian eigenmaps: coordinates of nodes by the eigenvectors of ``L v = λ D v`` with the smallest eigenvalues.

    Parameters
    ----------
    n_components : int, optional
        Number of eigenvectors, without the constant one. None: all.
    {graph}
    {shared}

    Attributes
    ----------
    embedding_ : (n, k) array
    eigenvalues_ : (k,) array
        Between 0, once for each connected part, and 2.
    affinity_matrix_ : (n, n) array or sparse matrix
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> ring = np.roll(np.eye(8), 1, axis=1)
    >>> model = es.SpectralEmbedding(n_components=2, affinity="precomputed").fit(ring + ring.T)
    >>> np.hypot(*model.embedding_.T).round(3).tolist() == [0.354] * 8  # a circle
    True
    """

    _: KW_ONLY
    affinity: Any = "nearest_neighbors"
    gamma: float | None = None
    n_neighbors: int | None = None
    ridge: float = 0.0
    batch_size: int = 1000

    def _wanted(self) -> int | None:
        return None if self.n_components is None else self.n_components + 1

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        self.embedding_ = flat(result.eigenvectors)[:, 1:]
        self.eigenvalues_ = self.eigenvalues_[1:]
        self.residuals_ = self.residuals_[1:]

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit, and give ``embedding_``."""
        return self.fit(X).embedding_


@estimator
class SpectralClustering(GraphMixin, ClusterMixin, StreamEstimator):
    """Clusters of nodes: k-means on the eigenvectors of ``L v = λ D v`` with the smallest eigenvalues.

    Parameters
    ----------
    n_clusters : int
    n_components : int, optional
        Number of eigenvectors, with the constant one. Default: ``n_clusters``, as in scikit-learn.
    {graph}
    n_init : int
        Number of starts of k-means; the best result is kept.
    {shared}

    Attributes
    ----------
    labels_ : (n,) array
    embedding_ : (n, k) array
        The points that k-means clusters.
    affinity_matrix_ : (n, n) array or sparse matrix
    {learned}

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(60, 2)) * 0.3 + np.repeat([[0, 0], [5, 5]], 30, axis=0)
    >>> labels = es.SpectralClustering(n_clusters=2).fit_predict(X)
    >>> len(set(labels[:30])), len(set(labels[30:])), bool(labels[0] != labels[-1])
    (1, 1, True)
    """

    n_clusters: int = 8
    _: KW_ONLY
    n_components: int | None = None
    affinity: Any = "rbf"
    gamma: float | None = 1.0
    n_neighbors: int | None = 10
    n_init: int = 10
    ridge: float = 0.0
    batch_size: int = 1000

    def _wanted(self) -> int | None:
        return self.n_clusters if self.n_components is None else self.n_components

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        self.embedding_ = flat(result.eigenvectors)
        means = KMeans(self.n_clusters, n_init=self.n_init, random_state=self._seed())
        self.labels_ = means.fit_predict(self.embedding_)

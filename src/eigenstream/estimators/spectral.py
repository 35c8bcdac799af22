"""Embeddings and clusters from a graph's Laplacian."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import ClusterMixin
from sklearn.cluster import KMeans
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.neighbors import kneighbors_graph
from sklearn.utils.validation import validate_data

from eigenstream import problems
from eigenstream.core.types import Tree
from eigenstream.estimators.base import StreamEstimator, estimator, flat
from eigenstream.run.loop import Callback
from eigenstream.run.result import Result


class GraphMixin:
    """What estimators of a graph share: rows, a matrix or a stream of edges become its Laplacian."""

    affinity: Any
    gamma: float | None
    n_neighbors: int | None
    ridge: float
    memory_budget: float
    which = "smallest"
    _fit_batches: Any
    _forget: Any
    _run_folder: Any
    _posed: Any
    _wanted: Any
    _run: Any

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn from rows by features, or from a symmetric matrix of weights if ``affinity="precomputed"``."""
        self._forget()
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        self.affinity_matrix_ = self._affinity(X)
        return self._posing(problems.laplacian(self.affinity_matrix_, ridge=self.ridge), None)

    def fit_stream(
        self,
        batches: Iterable[Tree],
        *,
        n_nodes: int | None = None,
        callbacks: Iterable[Callback] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: float = 60.0,
    ) -> Any:
        """Learn from a stream of edges, each undirected edge once.

        Parameters
        ----------
        batches : iterable
            Tuples ``(sources, targets)`` or ``(sources, targets, weights)`` of arrays.
        n_nodes : int, optional
            The number of nodes. Left out, a first pass finds the largest, which needs an iterable that starts anew.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        if n_nodes is None:
            if isinstance(batches, Iterator):
                raise ValueError("n_nodes must be given for a stream that can be read once only")
            n_nodes = 1 + max((max(np.max(i), np.max(j)) for i, j, *_ in batches), default=-1)
        problem = problems.laplacian(n_nodes=int(n_nodes), ridge=self.ridge)
        return self._posing(problem, batches, self._run_folder(folder, resume, checkpoint_every), callbacks)

    def _posing(self, problem: Any, batches: Any, *options: Any) -> Any:
        nodes = problem.A.shape[0] if batches is None else problem.n_nodes
        if self._wanted() is None and 6 * 8 * nodes**2 > self.memory_budget:
            raise ValueError(
                f"n_components=None: all components of {nodes} nodes do not fit memory_budget; give a number"
            )
        self._posed = problem
        try:
            return self._fit_batches(batches, *options)
        finally:
            # The graph can be large, and nothing goes on from it.
            del self._posed
            vars(self).pop("_run", None)

    def _problem(self) -> problems.Problem:
        return self._posed

    def _affinity(self, X: Any) -> Any:
        if X.shape[0] == X.shape[1] and self.affinity != "precomputed":
            warnings.warn('X is square: if it is a graph, give affinity="precomputed"', stacklevel=3)
        if self.affinity == "precomputed":
            if X.shape[0] != X.shape[1]:
                raise ValueError(f'affinity="precomputed", but X has shape {X.shape}: give a square symmetric matrix')
            return X
        if self.affinity == "nearest_neighbors":
            n = X.shape[0]
            # Each row is its own first neighbour.
            neighbours = max(n // 10, 2) if self.n_neighbors is None else min(self.n_neighbors, n)
            graph = kneighbors_graph(X, neighbours, include_self=True)
            return (graph + graph.T) / 2
        if not (callable(self.affinity) or isinstance(self.affinity, str)):
            raise ValueError(
                f"affinity={self.affinity!r}: give 'nearest_neighbors', 'precomputed', a kernel's name or a function"
            )
        gamma = 1 / X.shape[1] if self.gamma is None else self.gamma
        options = {} if callable(self.affinity) else {"filter_params": True, "gamma": gamma}
        return pairwise_kernels(X, metric=self.affinity, **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.sparse = True
        tags.input_tags.pairwise = self.affinity == "precomputed"
        return tags


@estimator
class SpectralEmbedding(GraphMixin, StreamEstimator):
    """Laplacian eigenmaps: nodes placed by the eigenvectors of ``L v = λ D v`` with the smallest eigenvalues.

    Parameters
    ----------
    n_components : int, optional
        How many, the constant one not counted; None for all there are.
    affinity : {"nearest_neighbors", "rbf", "precomputed"}, another kernel of scikit-learn's, or a function
        How rows become a graph; ``"precomputed"``: ``X`` is its symmetric matrix of weights, dense or sparse.
    gamma : float, optional
        Of the kernel; one over the number of features by default.
    n_neighbors : int, optional
        Of the nearest neighbours; a tenth of the rows by default.
    ridge : float
        Added to the degrees, relative to their mean: needed if a node has no edges.
    {shared}

    Attributes
    ----------
    embedding_ : (n, k) array
    eigenvalues_ : (k,) array
        From 0, of one connected piece each, up to 2.
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
        """Fit and give ``embedding_``."""
        return self.fit(X).embedding_


@estimator
class SpectralClustering(GraphMixin, ClusterMixin, StreamEstimator):
    """Clusters of nodes: k-means on the eigenvectors of ``L v = λ D v`` with the smallest eigenvalues.

    Parameters
    ----------
    n_clusters : int
    n_components : int, optional
        Eigenvectors, the constant one counted; ``n_clusters`` by default, as in scikit-learn.
    affinity : {"rbf", "nearest_neighbors", "precomputed"}, another kernel of scikit-learn's, or a function
        How rows become a graph; ``"precomputed"``: ``X`` is its symmetric matrix of weights, dense or sparse.
    gamma : float
        Of the kernel.
    n_neighbors : int
        Of the nearest neighbours.
    n_init : int
        Starts of k-means, of which the best is kept.
    ridge : float
        Added to the degrees, relative to their mean: needed if a node has no edges.
    {shared}

    Attributes
    ----------
    labels_ : (n,) array
    embedding_ : (n, k) array
        What k-means saw.
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

"""Graph Laplacians from a stream of weighted edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from scipy.sparse import csgraph

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.matrices import Operands
from eigenstream.problems.statistics import Statistics


@jax.tree_util.register_static
@dataclass(frozen=True)
class Edges(Problem):
    """``A = Σ w (e_i - e_j)(e_i - e_j)ᵀ``; ``B`` is the diagonal of degrees if normalised, else the identity.

    A batch estimates the mean over edges. If ``B`` holds the degrees, the eigenvalues do not depend on the number of
    edges. If ``B = I``, they are proportional to it, and the estimate is multiplied by ``n_edges``.
    """

    n_nodes: int
    normalized: bool = True
    n_edges: int | None = None
    ridge: float = 0.0
    #: Take degrees from all edges so far instead of one batch.
    running: bool = False
    positive = diagonal_only = True
    has_rows = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.normalized and self.n_edges is None:
            raise ValueError("n_edges is needed for the plain Laplacian of a stream: its eigenvalues grow with it")

    @property
    def orthonormal(self) -> bool:  # type: ignore[override]
        return not self.normalized

    def accept(self, batch: Tree) -> Tree:
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise ValueError(
                "a batch of edges is a tuple of arrays, (sources, targets) or (sources, targets, weights): "
                "give tuple(edges.T) for an array with one edge a row"
            )
        i, j = (np.asarray(end) for end in batch[:2])
        w = np.asarray(batch[2] if len(batch) == 3 else np.ones(len(i)))
        if not (i.shape == j.shape == w.shape and i.ndim == 1 and len(i)):
            raise ValueError(f"edges have shapes {i.shape}, {j.shape}, {w.shape}: give equal lengths, at least 1")
        for name, end in (("sources", i), ("targets", j)):
            if end.dtype.kind not in "iu" or end.min() < 0 or end.max() >= self.n_nodes:
                raise ValueError(f"{name} must be whole numbers from 0 to n_nodes - 1 = {self.n_nodes - 1}")
        if w.dtype.kind not in "biuf" or not (np.isfinite(w).all() and (w >= 0).all()):
            raise ValueError("weights must be finite and not negative: a Laplacian has no negative edges")
        w = w if w.dtype.kind == "f" else w.astype(np.float32)
        return i.astype(np.int32), j.astype(np.int32), w

    def template(self, batch: Tree) -> Tree:
        return jax.ShapeDtypeStruct((self.n_nodes,), jax.dtypes.canonicalize_dtype(batch[2].dtype))

    def blank(self, template: Tree) -> Tree:
        node = np.zeros(1, np.int32)
        return node, node, np.zeros(1, template.dtype)

    def split(self, batch: Tree) -> tuple[Tree, Any]:
        """An edge has no features."""
        return (), batch

    def join(self, rows: Tree, labels: Any) -> Tree:
        return labels

    def start(self, batch: Tree) -> Tree:
        zero = jnp.zeros(self.n_nodes, jax.dtypes.canonicalize_dtype(batch[2].dtype))
        return views.Mean(zero, jnp.zeros((), jnp.int32)) if self.running else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        if not self.running:
            return memory
        b = batch[2].shape[0]
        count = memory.rows + b
        return views.Mean(memory.mean + b / count * (self._degrees(batch) - memory.mean), count)

    def rows(self, memory: Tree, *parts: Tree) -> Tree:
        (batch,) = parts
        return (*batch, memory.mean if self.running else self._degrees(batch))

    def _weights(self, batch: Tree) -> tuple[Any, Any, Any]:
        i, j, w = batch
        return i, j, jnp.where(i == j, 0, w) * ((self.n_edges or 1) / w.shape[0])

    def _degrees(self, batch: Tree) -> jax.Array:
        i, j, w = self._weights(batch)
        return jnp.zeros(self.n_nodes, w.dtype).at[i].add(w).at[j].add(w)

    def products(self, x: Tree, V: Tree) -> Products:
        *batch, degrees = x
        i, j, w = self._weights(batch)
        neighbours = jnp.zeros_like(V).at[:, i].add(w * V[:, j]).at[:, j].add(w * V[:, i])
        return Products(degrees * V - neighbours, self._metric(degrees) * V)

    def _metric(self, degrees: jax.Array) -> jax.Array:
        degrees = degrees if self.normalized else jnp.ones_like(degrees)
        return players.ridged(jnp.ones_like(degrees), degrees, self.ridge, degrees.mean())

    def for_game(self) -> Edges:
        return replace(self, running=True)

    def diagonal(self, memory: Tree, batch: Tree) -> jax.Array:
        return self._metric(self._degrees(batch))

    def statistics_bytes(self, d: int, shards: int = 1) -> float:
        return 0

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        W = scipy.sparse.csr_matrix((self.n_nodes, self.n_nodes))
        return EdgeStatistics(self, self.template(batch), W.data, W.indices, W.indptr, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EdgeStatistics(Statistics):
    """The summed adjacency in CSR format."""

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    count: int

    def adjacency(self) -> Any:
        n = self.problem.n_nodes
        return scipy.sparse.csr_matrix((self.data, self.indices, self.indptr), shape=(n, n))

    def add(self, batch: Tree) -> EdgeStatistics:
        (i, j, w), W = batch, self.adjacency()
        W = W + scipy.sparse.coo_matrix((w.astype(np.float64), (i, j)), shape=W.shape).tocsr()
        return replace(self, data=W.data, indices=W.indices, indptr=W.indptr, count=self.count + len(i))

    def merged(self, other: EdgeStatistics) -> EdgeStatistics:
        W = self.adjacency() + other.adjacency()
        return replace(self, data=W.data, indices=W.indices, indptr=W.indptr, count=self.count + other.count)

    def operands(self) -> Operands:
        # The sums are over all edges: they are the graph's own unless n_edges asks for another number of edges.
        scale = 1.0 if self.problem.n_edges is None else self.problem.n_edges / self.count
        W = self.adjacency()
        return laplacian_pair((W + W.T) * scale, self.problem.normalized, self.problem.ridge)


def laplacian_pair(W: Any, normalized: bool, ridge: float) -> Operands:
    """``L = D - W`` of a symmetric adjacency, dense or sparse, and ``D`` for the normalised problem."""
    L, degrees = csgraph.laplacian(W.astype(np.float64), return_diag=True)
    degrees = degrees if normalized else np.ones_like(degrees)
    degrees = players.ridged(np.ones_like(degrees), degrees, ridge, degrees.mean())
    if not (degrees > 0).all():
        lonely = np.flatnonzero(degrees <= 0)[:5].tolist()
        raise ValueError(
            f"nodes {lonely} have no edges, so B is singular: number nodes from 0, drop them, or give a ridge"
        )
    return Operands(L, scipy.sparse.diags_array(degrees).tocsr() if normalized or ridge else None)

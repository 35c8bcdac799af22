"""What is known of the rows beside the eigenvectors: how many, where they lie and how far they spread."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from eigenstream import trees
from eigenstream.moments import Moments, means_of_groups

Tree = Any


class Summary(NamedTuple):
    """Counts, means and total scatter of rows by group, in float64 on the host."""

    #: (g,) rows of each group; one group where rows have no labels.
    counts: np.ndarray
    #: The groups' means: a tree like one row, with leaves ``(g, ...)``.
    means: Tree
    #: The sum of squared distances of all rows from their groups' means.
    scatter: np.ndarray

    @classmethod
    def empty(cls, template: Tree, groups: int = 1) -> Summary:
        means = jax.tree.map(lambda leaf: np.zeros((groups, *leaf.shape)), template)
        return cls(np.zeros(groups), means, np.zeros(()))

    @classmethod
    def of_moments(cls, moments: Moments, template: Tree) -> Summary:
        means = trees.rows(moments.group_means().T, template)
        return cls(moments.counts, means, np.trace(moments.scatter))

    @classmethod
    def of_one_group(cls, n: float, mean: np.ndarray, scatter: float, template: Tree) -> Summary:
        return cls(np.array([n], np.float64), trees.rows(mean[:, None], template), np.asarray(scatter))

    def add(self, x: Tree, labels: np.ndarray | None = None) -> Summary:
        """This summary with more rows, wherever they live, each of the group its label names.

        The scatter is followed where there is one group.
        """
        leaves, structure = jax.tree.flatten(x, is_leaf=scipy.sparse.issparse)
        found = [_means(leaf, labels, len(self.counts)) for leaf in leaves]
        arrived = found[0][0]
        counts = self.counts + arrived
        share = (arrived / np.maximum(counts, 1))[:, None]
        old = jax.tree.leaves(self.means)
        gaps = [mean - m.reshape(mean.shape) for (_, mean), m in zip(found, old, strict=True)]
        means = [m + (share * gap).reshape(m.shape) for gap, m in zip(gaps, old, strict=True)]
        scatter = np.asarray(np.nan)
        if labels is None:
            b, n = arrived[0], self.counts[0]
            within = sum(_square(leaf) - b * np.vdot(mean, mean) for leaf, (_, mean) in zip(leaves, found, strict=True))
            scatter = self.scatter + within + n * b / (n + b) * sum(np.vdot(gap, gap) for gap in gaps)
        return Summary(counts, jax.tree.unflatten(structure, means), scatter)

    @staticmethod
    def joined(parts: list[Summary]) -> Summary:
        """The summary of rows that were summed in several places."""
        first, *others = parts
        for other in others:
            counts = first.counts + other.counts
            share = other.counts / np.maximum(counts, 1)
            both = zip(jax.tree.leaves(first.means), jax.tree.leaves(other.means), strict=True)
            gaps = [(b - a).reshape(len(counts), -1) for a, b in both]
            weight = first.counts * share
            scatter = first.scatter + other.scatter + sum((weight[:, None] * gap**2).sum() for gap in gaps)
            means = [
                m + (share[:, None] * gap).reshape(m.shape)
                for m, gap in zip(jax.tree.leaves(first.means), gaps, strict=True)
            ]
            first = Summary(counts, jax.tree.unflatten(jax.tree.structure(first.means), means), np.asarray(scatter))
        return first

    def less(self, point: Tree | None) -> Summary:
        """The summary of the rows before ``point`` was taken off them."""
        return self if point is None else self._replace(means=jax.tree.map(np.add, self.means, point))


def _means(leaf: Any, labels: np.ndarray | None, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and means ``(g, d)`` of the groups of a leaf's rows; of one group on a device, taken there."""
    b = leaf.shape[0]
    if isinstance(leaf, jax.Array) and labels is None:
        # As a product, which a CPU does several times faster than a sum down columns.
        sums = jnp.matmul(jnp.ones((1, b), leaf.dtype), leaf.reshape(b, -1), precision="highest")
        return np.array([b], np.float64), np.asarray(sums, np.float64) / b
    return means_of_groups(leaf if scipy.sparse.issparse(leaf) else np.asarray(leaf).reshape(b, -1), labels, groups)


def _square(leaf: Any) -> float:
    """The sum of the squares of all entries."""
    values = leaf.data if scipy.sparse.issparse(leaf) else leaf
    return float(jnp.vdot(values, values) if isinstance(leaf, jax.Array) else np.vdot(values, values))

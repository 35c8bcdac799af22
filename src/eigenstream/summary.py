"""What is known of the rows beside the eigenvectors: how many, where they lie and how far they spread."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from eigenstream import trees
from eigenstream.moments import Moments
from eigenstream.rows import n_rows

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

    def add(self, batch: Tree) -> Summary:
        """This summary of one group with more rows, wherever they live."""
        b, n = n_rows(batch), float(self.counts[0])
        leaves, structure = jax.tree.flatten(batch, is_leaf=scipy.sparse.issparse)
        moments = [_mean_and_square(leaf) for leaf in leaves]
        old = jax.tree.leaves(self.means)
        gaps = [mean.reshape(m.shape) - m for (mean, _), m in zip(moments, old, strict=True)]
        within = sum(square - b * np.vdot(mean, mean) for mean, square in moments)
        between = n * b / (n + b) * sum(np.vdot(gap, gap) for gap in gaps)
        means = [m + b / (n + b) * gap for m, gap in zip(old, gaps, strict=True)]
        return Summary(self.counts + b, jax.tree.unflatten(structure, means), self.scatter + within + between)

    def add_labelled(self, x: Tree, labels: np.ndarray) -> Summary:
        """This summary with more rows, each of the group its label names; their scatter is not followed."""
        member = np.zeros((len(self.counts), len(labels)))
        member[labels, np.arange(len(labels))] = 1
        arrived = member.sum(1)
        counts = self.counts + arrived

        def one(leaf: Any, mean: np.ndarray) -> np.ndarray:
            sums = np.asarray(
                member @ (leaf if scipy.sparse.issparse(leaf) else np.asarray(leaf).reshape(len(labels), -1))
            )
            gaps = sums - arrived[:, None] * mean.reshape(len(counts), -1)
            return mean + (gaps / np.maximum(counts, 1)[:, None]).reshape(mean.shape)

        means = jax.tree.map(one, x, self.means, is_leaf=scipy.sparse.issparse)
        return Summary(counts, means, np.asarray(np.nan))

    def less(self, point: Tree | None) -> Summary:
        """The summary of the rows before ``point`` was taken off them."""
        return self if point is None else self._replace(means=jax.tree.map(np.add, self.means, point))


def _mean_and_square(x: Any) -> tuple[np.ndarray, float]:
    """A leaf's mean row and the sum of the squares of all its entries."""
    b = x.shape[0]
    if scipy.sparse.issparse(x):
        return np.asarray(x.sum(0, dtype=np.float64)).ravel() / b, float(np.vdot(x.data, x.data))
    flat = x.reshape(b, -1)
    if isinstance(x, jax.Array):
        # As a product, which a CPU does several times faster than a sum down columns.
        sums, square = jnp.matmul(jnp.ones((1, b), x.dtype), flat, precision="highest"), jnp.vdot(flat, flat)
    else:
        sums, square = np.ones((1, b), x.dtype) @ flat, np.vdot(flat, flat)
    return np.asarray(sums, np.float64)[0] / b, float(square)

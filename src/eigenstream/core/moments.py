"""First and second moments of rows, by group, in float64 on the host.

A pilot (the mean of the first block, if it is far from zero) is subtracted from every row. Each block is then centred
by its own mean, multiplied, and merged in float64 (the pairwise update of Chan, Golub and LeVeque). Products and means
therefore see numbers of the size of the deviations. Products are in float64, or in the rows' dtype if one or two bits
may be lost.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from eigenstream.core import players
from eigenstream.core.types import Tree

#: The fewest rows in a block.
BLOCK_ROWS = 4096
#: Numbers in a block: 32 MB of float32, enough for a matrix product at full speed.
BLOCK_NUMBERS = 2**23


def block_rows(d: int) -> int:
    """The number of rows of ``d`` features in a block: few enough for accurate float32 sums."""
    return max(BLOCK_ROWS, min(2**15, BLOCK_NUMBERS // d))


def blocks(parts: list[Any], labels: np.ndarray | None = None) -> Iterator[tuple[list[Any], np.ndarray | None]]:
    """Blocks of `block_rows` rows or a little more, whose columns are in ``parts``, with their labels."""
    n, d = parts[0].shape[0], sum(part.shape[1] for part in parts)
    count = max(1, n // block_rows(d))
    for start, stop in itertools.pairwise(n * i // count for i in range(count + 1)):
        yield [part[start:stop] for part in parts], None if labels is None else labels[start:stop]


class Moments(NamedTuple):
    """Counts ``(g,)`` of groups, their means ``(g, d)`` minus the pilot, and the scatter ``(d, d)`` about the means."""

    counts: np.ndarray
    means: np.ndarray
    scatter: np.ndarray
    #: A point near the rows, set by the first block; all sums are relative to it.
    pilot: np.ndarray

    @classmethod
    def empty(cls, d: int, groups: int = 1) -> Moments:
        return cls(np.zeros(groups), np.zeros((groups, d)), np.zeros((d, d)), np.zeros(d))

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    def add(self, rows: Any, labels: np.ndarray | None = None, wide: bool = True) -> Moments:
        """The moments with more rows: a matrix, or dense matrices side by side. ``wide``: multiply in float64."""
        total = self
        for block, group in blocks(rows if isinstance(rows, list) else [rows], labels):
            total = total._with_block(block, group, wide)
        return total

    def _with_block(self, parts: list[Any], group: np.ndarray | None, wide: bool) -> Moments:
        if scipy.sparse.issparse(parts[0]):
            return self._merged(_sparse_moments(parts[0], group, len(self.counts), self.pilot), self.pilot)
        pilot = self.pilot if self.counts.any() else np.concatenate([_far_mean(x) for x in parts])
        known = np.diag(self.scatter)
        return self._merged(_dense_moments(parts, group, len(self.counts), pilot, known, wide), pilot)

    def _merged(self, block: Block, pilot: np.ndarray) -> Moments:
        total = self.counts + block.counts
        share = np.divide(block.counts, total, out=np.zeros_like(total), where=total > 0)
        delta = block.means - self.means
        gap = delta * np.sqrt(self.counts * share)[:, None]
        scatter = block.product
        scatter += self.scatter
        # Chan et al.: subtract the block's own mean term, add the term between old and new means.
        plus, minus = gap[gap.any(1)], block.excess[block.excess.any(1)]
        if len(plus) or len(minus):
            scatter += np.concatenate([plus, -minus]).T @ np.concatenate([plus, minus])
        return Moments(total, self.means + share[:, None] * delta, scatter, pilot)

    def faded(self, factor: float) -> Moments:
        """The moments with every row weighted by ``factor``."""
        return self._replace(counts=factor * self.counts, scatter=factor * self.scatter)

    def covariance(self) -> np.ndarray:
        """The unbiased covariance about the group means."""
        return self.scatter / (self.n - len(self.counts))

    def group_means(self) -> np.ndarray:
        """The group means ``(g, d)``, pilot included; 0 for a group without rows."""
        return np.where(self.counts[:, None] > 0, self.means + self.pilot, 0)

    def second_moment(self) -> np.ndarray:
        """``E[x xᵀ]`` about zero."""
        means = self.group_means()
        return (self.scatter + (means * self.counts[:, None]).T @ means) / self.n


def _far_mean(x: np.ndarray) -> np.ndarray:
    """The mean, or 0 if it is within a standard deviation of 0 in every feature: then no subtraction is needed."""
    mean = x.mean(0, dtype=np.float64).astype(x.dtype).astype(np.float64)
    variance = np.einsum("ij,ij->j", x, x, dtype=np.float64) / len(x) - mean**2
    return np.zeros_like(mean) if (mean**2 <= variance).all() else mean


def means_of_groups(x: Any, group: np.ndarray | None, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts ``(g,)`` and means ``(g, d)`` of the groups."""
    if group is None:
        counts = np.array([x.shape[0]], np.float64)
        # A product, because NumPy's sum in another dtype is slow.
        sums = np.asarray(_ones(x.shape[0], x.dtype) @ x).astype(np.float64)
    else:
        n = len(group)
        counts = np.bincount(group, minlength=groups).astype(np.float64)
        member = scipy.sparse.csr_matrix((np.ones(n), (group, np.arange(n))), shape=(groups, n))
        sums = member @ x.astype(np.float64)
        sums = sums.toarray() if scipy.sparse.issparse(sums) else sums
    return counts, sums / np.maximum(counts, 1)[:, None]


@lru_cache(maxsize=4)
def _ones(n: int, dtype: np.dtype) -> np.ndarray:
    return np.ones((1, n), dtype)


class Block(NamedTuple):
    """Counts and means, minus the pilot, of the groups in a block; its scatter is ``product - excessᵀ excess``."""

    counts: np.ndarray
    means: np.ndarray
    product: np.ndarray
    excess: np.ndarray


def _sparse_moments(x: Any, group: np.ndarray | None, groups: int, pilot: np.ndarray) -> Block:
    x = x.astype(np.float64)
    counts, means = means_of_groups(x, group, groups)
    raw = (x.T @ x).toarray()
    scatter = raw - (means * counts[:, None]).T @ means
    # Sparse rows are not centred before the product, so a constant feature leaves a rounding error: set it to 0.
    constant = np.diag(scatter) <= 1e-11 * np.diag(raw)
    scatter[constant], scatter[:, constant] = 0, 0
    return Block(counts, means - pilot, scatter, np.zeros((0, x.shape[1])))


def _dense_moments(
    parts: list[np.ndarray], group: np.ndarray | None, groups: int, pilot: np.ndarray, known: np.ndarray, wide: bool
) -> Block:
    """Moments of dense rows; ``known``: the diagonal of the scatter before them."""
    cuts = np.cumsum([x.shape[1] for x in parts])[:-1]
    points = np.split(pilot, cuts)
    dtypes = [np.dtype(np.float64) if wide else x.dtype for x in parts]
    near = [
        _less(x, point, dtype, i) if point.any() or dtype != x.dtype else x
        for i, (x, point, dtype) in enumerate(zip(parts, points, dtypes, strict=True))
    ]
    both = [means_of_groups(x, group, groups) for x in near]
    counts, means = both[0][0], np.concatenate([mean for _, mean in both], axis=1)
    if group is None:
        product = _product(near)
        offset = counts[0] * means[0] ** 2
        # If the pilot is within a standard deviation of the mean, correct the product instead of centring the rows:
        # this loses one or two bits and saves a pass.
        if (2 * offset <= np.diag(product) + known).all():
            return Block(counts, means, product, np.sqrt(counts)[:, None] * means)
    rounded = [mean.astype(x.dtype) for x, mean in zip(near, np.split(means, cuts, axis=1), strict=True)]
    deviations = [x - (m if group is None else m[group]) for x, m in zip(near, rounded, strict=True)]
    # Correct in float64 for the rounding of the means.
    rest = (means - np.concatenate(rounded, axis=1)) * np.sqrt(counts)[:, None]
    return Block(counts, means, _product(deviations), rest)


def _product(parts: list[np.ndarray]) -> np.ndarray:
    """``XᵀX`` in float64 of rows whose columns are in parts, without concatenating them."""
    if len(parts) == 1:
        return (parts[0].T @ parts[0]).astype(np.float64)
    ends = np.cumsum([0] + [x.shape[1] for x in parts])
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    out = np.empty((ends[-1], ends[-1]))
    for i, (x, s) in enumerate(zip(parts, spans, strict=True)):
        for y, t in zip(parts[i:], spans[i:], strict=True):
            out[s, t] = x.T @ y
            out[t, s] = out[s, t].T
    return out


_scratch = threading.local()


def _less(x: np.ndarray, point: np.ndarray, dtype: np.dtype, slot: int) -> np.ndarray:
    """``x - point`` in a buffer of this thread, which the next call overwrites: allocating pages is slow."""
    kept = vars(_scratch).setdefault("kept", {})
    needed = x.size * dtype.itemsize
    if slot not in kept or len(kept[slot]) < needed:
        kept[slot] = np.empty(needed, np.uint8)
    out = kept[slot][:needed].view(dtype).reshape(x.shape)
    if not point.any():
        np.copyto(out, x)
        return out
    return np.subtract(x, point.astype(dtype), out=out)


class Summary(NamedTuple):
    """Counts, means and total scatter of rows by group, in float64 on the host."""

    #: The number of rows of each group, ``(g,)``; one group if rows have no labels.
    counts: np.ndarray
    #: The group means: a tree like one row, with leaves ``(g, ...)``.
    means: Tree
    #: The sum of squared distances of all rows from their group means.
    scatter: np.ndarray

    @classmethod
    def empty(cls, template: Tree, groups: int = 1) -> Summary:
        means = jax.tree.map(lambda leaf: np.zeros((groups, *leaf.shape)), template)
        return cls(np.zeros(groups), means, np.zeros(()))

    @classmethod
    def of_moments(cls, moments: Moments, template: Tree) -> Summary:
        means = players.from_matrix(moments.group_means().T, template)
        return cls(moments.counts, means, np.trace(moments.scatter))

    @classmethod
    def of_one_group(cls, n: float, mean: np.ndarray, scatter: float, template: Tree) -> Summary:
        return cls(np.array([n], np.float64), players.from_matrix(mean[:, None], template), np.asarray(scatter))

    def add(self, x: Tree, labels: np.ndarray | None = None) -> Summary:
        """The summary with more rows, from the host or a device. With labels the scatter is not computed (NaN)."""
        leaves, structure = jax.tree.flatten(x, is_leaf=scipy.sparse.issparse)
        found = [_leaf_means(leaf, labels, len(self.counts)) for leaf in leaves]
        counts, scatter = found[0][0], np.nan
        if labels is None:
            squares = zip(map(_square, leaves), found, strict=True)
            scatter = sum(square - counts[0] * np.vdot(mean, mean) for square, (_, mean) in squares)
        means = jax.tree.unflatten(structure, [mean for _, mean in found])
        return self._merged(Summary(counts, means, np.asarray(scatter)))

    def _merged(self, other: Summary) -> Summary:
        """The pairwise update of Chan, Golub and LeVeque."""
        counts = self.counts + other.counts
        gaps = jax.tree.map(lambda a, b: (b.reshape(a.shape) - a).reshape(len(a), -1), self.means, other.means)
        share = (other.counts / np.maximum(counts, 1))[:, None]
        means = jax.tree.map(lambda m, gap: m + (share * gap).reshape(m.shape), self.means, gaps)
        weight = self.counts * other.counts / np.maximum(counts, 1)
        between = (weight * sum(np.vecdot(gap, gap) for gap in jax.tree.leaves(gaps))).sum()
        return Summary(counts, means, np.asarray(self.scatter + other.scatter + between))

    @staticmethod
    def joined(parts: list[Summary]) -> Summary:
        """The summary of rows that several processes summed."""
        return reduce(Summary._merged, parts)

    def less(self, point: Tree | None) -> Summary:
        """The summary of the rows before ``point`` was subtracted."""
        return self if point is None else self._replace(means=jax.tree.map(np.add, self.means, point))


def _leaf_means(leaf: Any, labels: np.ndarray | None, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and means ``(g, d)`` of the groups in a leaf; computed on the device for one group there."""
    b = leaf.shape[0]
    if isinstance(leaf, jax.Array) and labels is None:
        # A product, because XLA sums columns slowly on a CPU.
        sums = jnp.matmul(jnp.ones((1, b), leaf.dtype), leaf.reshape(b, -1), precision="highest")
        return np.array([b], np.float64), np.asarray(sums, np.float64) / b
    return means_of_groups(leaf if scipy.sparse.issparse(leaf) else np.asarray(leaf).reshape(b, -1), labels, groups)


def _square(leaf: Any) -> float:
    values = leaf.data if scipy.sparse.issparse(leaf) else leaf
    return float(jnp.vdot(values, values) if isinstance(leaf, jax.Array) else np.vdot(values, values))

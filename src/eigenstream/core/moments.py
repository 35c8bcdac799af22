"""First and second moments of rows, by group, in float64 on the host.

A pilot (the mean of the first block, in features that are far from zero) is subtracted from every row. Each block is
then centred by its own mean, multiplied, and merged (the pairwise update of Chan, Golub and LeVeque). Products and
means therefore see numbers of the size of the deviations. `eigenstream.core.device_moments` does the same on a device.
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
import scipy.linalg.blas
import scipy.sparse

from eigenstream.core import players
from eigenstream.core.types import Tree

#: Rows that small batches are joined to.
BLOCK_ROWS = 4096
#: Numbers in a block, 16 MB of float64, and its fewest rows: enough for a matrix product at full speed, and few enough
#: for the processor's cache.
BLOCK_NUMBERS, LEAST_ROWS = 2**21, 2048
#: Numbers that are read at once, 128 MB of float32, and the fewest and most rows. Fewer rows would leave a device
#: little to multiply, more rows nothing to copy meanwhile.
READ_NUMBERS, FEWEST, MOST = 2**25, 2**12, 2**15
#: Rows of a matrix that are mirrored at once.
MIRRORED = 512


def block_rows(d: int) -> int:
    """The number of rows of ``d`` features in a block."""
    return max(LEAST_ROWS, min(MOST, BLOCK_NUMBERS // d))


def rows_to_read(d: int) -> int:
    """The number of rows of ``d`` features to read at once, a power of two, wherever they are summed."""
    return 1 << (max(FEWEST, min(MOST, READ_NUMBERS // d)).bit_length() - 1)


def blocks(parts: list[Any], labels: np.ndarray | None = None) -> Iterator[tuple[list[Any], np.ndarray | None]]:
    """Blocks of `block_rows` rows or a little more, whose columns are in ``parts``, with their labels."""
    n, d = parts[0].shape[0], sum(part.shape[1] for part in parts)
    count = max(1, n // block_rows(d))
    for start, stop in itertools.pairwise(n * i // count for i in range(count + 1)):
        yield [part[start:stop] for part in parts], None if labels is None else labels[start:stop]


class NotFinite(ValueError):
    """Rows that are not finite, or too large to sum. They were not added."""

    def __init__(self, batch: Any):
        super().__init__("the rows hold NaN or infinity, or numbers too large to sum")
        self.batch = batch


class Moments(NamedTuple):
    """Counts ``(g,)`` of groups, their means ``(g, d)`` minus the pilot, and the scatter ``(d, d)`` about the means."""

    counts: np.ndarray
    means: np.ndarray
    #: In column order. Only its upper triangle is used.
    scatter: np.ndarray
    #: A point near the rows, set by the first block; all sums are relative to it.
    pilot: np.ndarray

    @classmethod
    def empty(cls, d: int, groups: int = 1) -> Moments:
        return cls(np.zeros(groups), np.zeros((groups, d)), np.zeros((d, d), order="F"), np.zeros(d))

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    def add(self, rows: Any, labels: np.ndarray | None = None, batch: Any = None) -> Moments:
        """The moments with more rows: a matrix, or dense matrices side by side. Overwrites the scatter of ``self``.

        ``batch``: what an error names.
        """
        total = self
        for block, group in blocks(rows if isinstance(rows, list) else [rows], labels):
            sparse = scipy.sparse.issparse(block[0])
            with np.errstate(invalid="ignore", over="ignore"):
                after = total._with_sparse(block[0], group) if sparse else total._with(block, group)
            if after is None:
                raise NotFinite(batch)
            total = after
        return total

    def _with(self, parts: list[np.ndarray], group: np.ndarray | None) -> Moments | None:
        """The moments with a block of dense rows; None if it is not finite."""
        b, groups = len(parts[0]), len(self.counts)
        Z = _scratch_rows(b + groups, sum(x.shape[1] for x in parts))
        x = Z[:b]
        np.concatenate(parts, axis=1, out=x, casting="same_kind")
        point = self.pilot if self.counts.any() else pilot(x)
        if point.any():
            x -= point
        counts, means = means_of_groups(x, group, groups)
        if not np.isfinite(means).all():
            return None
        x -= means if group is None else means[group]
        total, after, Z[b:] = self._united(counts, means)
        return Moments(total, after, _added(self.scatter, Z), point)

    def _with_sparse(self, x: Any, group: np.ndarray | None) -> Moments | None:
        counts, means, scatter = _sparse_moments(x, group, len(self.counts))
        if not np.isfinite(means).all():
            return None
        total, after, gaps = self._united(counts, means - self.pilot)
        scatter += self.scatter
        return Moments(total, after, _added(np.asfortranarray(scatter), gaps), self.pilot)

    def _united(self, counts: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts and means with those of more rows; rows whose products are the scatter between both means."""
        total = self.counts + counts
        share = np.divide(counts, total, out=np.zeros_like(total), where=total > 0)[:, None]
        delta = means - self.means
        return total, self.means + share * delta, delta * np.sqrt(self.counts[:, None] * share)

    def merged(self, other: Moments) -> Moments:
        """The moments of the rows of both, in memory of their own."""
        if not (self.counts.any() and other.counts.any()):
            rows = self if self.counts.any() else other
            return rows._replace(scatter=rows.scatter.copy(order="F"))
        # The difference of the pilots first: both are near the rows, so it is small and loses no digit.
        total, after, gaps = self._united(other.counts, other.means + (other.pilot - self.pilot))
        return Moments(total, after, _added(self.scatter + other.scatter, gaps), self.pilot)

    def faded(self, factor: float) -> Moments:
        """The moments with every row weighted by ``factor``."""
        return self._replace(counts=factor * self.counts, scatter=factor * self.scatter)

    def on_host(self) -> Moments:
        return self

    def group_means(self) -> np.ndarray:
        """The group means ``(g, d)``, pilot included; 0 for a group without rows."""
        return np.where(self.counts[:, None] > 0, self.means + self.pilot, 0)

    def total_scatter(self) -> float:
        """The sum of squared distances of all rows from their group means."""
        return float(np.trace(self.scatter))

    def panel(self, start: int, stop: int, divisor: float, about_zero: bool = False) -> np.ndarray:
        """Rows ``start`` to ``stop`` of the scatter about the means, or about zero, over ``divisor``."""
        out = np.empty((stop - start, len(self.pilot)))
        centres = np.sqrt(self.counts)[:, None] * self.group_means()
        for lo in range(start, stop, MIRRORED):
            hi = min(stop, lo + MIRRORED)
            rows = out[lo - start : hi - start]
            rows[:, :lo], rows[:, hi:] = self.scatter[:lo, lo:hi].T, self.scatter[lo:hi, hi:]
            corner = np.triu(self.scatter[lo:hi, lo:hi])
            rows[:, lo:hi] = corner + np.triu(corner, 1).T
            if about_zero:
                rows += centres[:, lo:hi].T @ centres
            rows /= divisor
        return out


def pilot(x: np.ndarray) -> np.ndarray:
    """The means of features that lie ten standard deviations or more from 0, and 0 for the others."""
    mean = x.mean(0, dtype=np.float64).astype(x.dtype).astype(np.float64)
    variance = np.einsum("ij,ij->j", x, x, dtype=np.float64) / len(x) - mean**2
    return np.where(mean**2 > 100 * variance, mean, 0)


def _added(scatter: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """``scatter + ZᵀZ`` in the memory of ``scatter``: the upper triangle."""
    if not scatter.flags.f_contiguous:
        scatter = np.asfortranarray(scatter)
    return scipy.linalg.blas.dsyrk(1.0, Z.T, beta=1.0, c=scatter, overwrite_c=True)


def means_of_groups(x: Any, group: np.ndarray | None, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts ``(g,)`` and means ``(g, d)`` of the groups."""
    if group is None:
        counts = np.array([x.shape[0]], np.float64)
        if scipy.sparse.issparse(x):
            sums = np.asarray(x.sum(0, dtype=np.float64)).reshape(1, -1)
        elif x.dtype == np.float64:
            # SciPy's product, like those of the scatter: NumPy's threads would compete with SciPy's.
            sums = scipy.linalg.blas.dgemv(1.0, x.T, _ones(x.shape[0], x.dtype))[None]
        else:
            # A product, because NumPy's sum in another dtype is slow.
            sums = (_ones(x.shape[0], x.dtype) @ x)[None].astype(np.float64)
    else:
        n = len(group)
        counts = np.bincount(group, minlength=groups).astype(np.float64)
        member = scipy.sparse.csr_matrix((np.ones(n), (group, np.arange(n))), shape=(groups, n))
        sums = member @ x.astype(np.float64)
        sums = sums.toarray() if scipy.sparse.issparse(sums) else sums
    return counts, sums / np.maximum(counts, 1)[:, None]


@lru_cache(maxsize=4)
def _ones(n: int, dtype: np.dtype) -> np.ndarray:
    return np.ones(n, dtype)


def _sparse_moments(x: Any, group: np.ndarray | None, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, means and scatter of sparse rows."""
    x = x.astype(np.float64)
    counts, means = means_of_groups(x, group, groups)
    raw = (x.T @ x).toarray()
    scatter = raw - (means * counts[:, None]).T @ means
    # Sparse rows are not centred before the product, so a constant feature leaves a rounding error: set it to 0.
    constant = np.diag(scatter) <= 1e-11 * np.diag(raw)
    scatter[constant], scatter[:, constant] = 0, 0
    return counts, means, scatter


_scratch = threading.local()


def _scratch_rows(n: int, d: int) -> np.ndarray:
    """An ``(n, d)`` array in memory of this thread, which the next call overwrites: allocating pages is slow."""
    kept = vars(_scratch).get("kept")
    if kept is None or len(kept) < n * d:
        kept = _scratch.kept = np.empty(n * d)
    return kept[: n * d].reshape(n, d)


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
        return cls(moments.counts, means, np.asarray(moments.total_scatter()))

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

"""First and second moments of rows, by group, in float64 on the host.

A pilot (the mean of the first block, in features that are far from zero) is subtracted from every row. Blocks are
merged by the pairwise update of Chan, Golub and LeVeque, ``S + S' + N b / (N + b) (m' - m)(m' - m)ᵀ``, where ``N`` rows
have mean ``m`` and scatter ``S`` and ``b`` more have ``m'`` and ``S'``. The products of the block's rows minus
``m' - √(N / (N + b)) (m' - m)`` are the last two terms together. Products and means therefore see numbers of the size
of the deviations. `eigenstream.core.device_moments` does the same on a device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
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
#: Numbers in a block whose means and squares alone are summed, 1 MB of float64.
CACHED_NUMBERS = 2**17
#: Rows of a matrix that are mirrored at once.
MIRRORED = 512


def block_rows(d: int) -> int:
    """The number of rows of ``d`` features in a block."""
    return max(LEAST_ROWS, min(MOST, BLOCK_NUMBERS // d))


def rows_to_read(d: int) -> int:
    """The number of rows of ``d`` features to read at once, a power of two, wherever they are summed."""
    return 1 << (max(FEWEST, min(MOST, READ_NUMBERS // d)).bit_length() - 1)


def blocks(
    parts: list[Any], labels: np.ndarray | None = None, rows: int | None = None
) -> Iterator[tuple[list[Any], np.ndarray | None]]:
    """Blocks of ``rows`` rows, or `block_rows`, or a little more, whose columns are in ``parts``, with their labels."""
    n, d = parts[0].shape[0], sum(part.shape[1] for part in parts)
    count = max(1, n // (block_rows(d) if rows is None else rows))
    for start, stop in itertools.pairwise(n * i // count for i in range(count + 1)):
        yield [part[start:stop] for part in parts], None if labels is None else labels[start:stop]


def spans(n: int, parts: int) -> list[tuple[int, int]]:
    """First and last indices of about equal parts of ``n``."""
    width = -(-n // parts)
    return [(a, min(n, a + width)) for a in range(0, n, width)]


class NotFinite(ValueError):
    """Rows that are not finite, or too large to sum. They were not added."""

    def __init__(self, batch: Any):
        super().__init__("the rows hold NaN or infinity, or numbers too large to sum")
        self.batch = batch


class Moments(NamedTuple):
    """Counts ``(g,)`` of groups, their means ``(g, d)`` minus the pilot, and the scatter ``(d, d)`` about the means."""

    counts: np.ndarray
    means: np.ndarray
    #: In column order. Only its upper triangle is used. Of shape (): its trace alone.
    scatter: np.ndarray
    #: A point near the rows, set by the first block; all sums are relative to it.
    pilot: np.ndarray

    @classmethod
    def empty(cls, d: int, groups: int = 1, trace_alone: bool = False) -> Moments:
        scatter = np.zeros(()) if trace_alone else np.zeros((d, d), order="F")
        return cls(np.zeros(groups), np.zeros((groups, d)), scatter, np.zeros(d))

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    def add(self, rows: Any, labels: np.ndarray | None = None, batch: Any = None) -> Moments:
        """The moments with more rows: a matrix, or dense matrices side by side. Overwrites the scatter of ``self``.

        For the trace alone, some of several matrices may be sparse. ``batch``: what an error names.
        """
        total = self
        parts, size = rows if isinstance(rows, list) else [rows], None
        if len(parts) > 1 and any(map(scipy.sparse.issparse, parts)):
            return self._with_each(parts, labels, batch)
        if not self.scatter.ndim:
            # Without a matrix product, small blocks of dense rows stay in the processor's cache.
            cached = labels is None and not scipy.sparse.issparse(parts[0])
            size = max(16, CACHED_NUMBERS // len(self.pilot)) if cached else max(1, parts[0].shape[0])
        for block, group in blocks(parts, labels, size):
            sparse = scipy.sparse.issparse(block[0])
            with np.errstate(invalid="ignore", over="ignore"):
                after = total._with_sparse(block[0], group) if sparse else total._with(block, group)
            if after is None:
                raise NotFinite(batch)
            total = after
        return total

    def _with_each(self, parts: list[Any], labels: np.ndarray | None, batch: Any) -> Moments:
        """The moments with more rows, each part on its own: the trace of the scatter is a sum over parts."""
        ends = itertools.accumulate((part.shape[1] for part in parts), initial=0)
        each = [
            Moments(self.counts, self.means[:, lo:hi], np.zeros(()), self.pilot[lo:hi]).add(part, labels, batch)
            for part, (lo, hi) in zip(parts, itertools.pairwise(ends), strict=True)
        ]
        counts, means, scatters, pilots = zip(*each, strict=True)
        return Moments(counts[0], np.hstack(means), np.asarray(self.scatter + sum(scatters)), np.concatenate(pilots))

    def _with(self, parts: list[np.ndarray], group: np.ndarray | None) -> Moments | None:
        """The moments with a block of dense rows; None if it is not finite."""
        x = _scratch_rows(len(parts[0]), sum(x.shape[1] for x in parts))
        np.concatenate(parts, axis=1, out=x, casting="same_kind")
        point = self.pilot if self.counts.any() else pilot(x)
        if point.any():
            x -= point
        counts, means = means_of_groups(x, group, len(self.counts))
        if not np.isfinite(means).all():
            return None
        total, after, _ = self._united(counts, means)
        centres = means - np.sqrt(self.counts / np.maximum(total, 1))[:, None] * (means - self.means)
        x -= centres if group is None else centres[group]
        return Moments(total, after, _added(self.scatter, x), point)

    def _with_sparse(self, x: Any, group: np.ndarray | None) -> Moments | None:
        x = x.astype(np.float64)
        counts, means = means_of_groups(x, group, len(self.counts))
        if not np.isfinite(means).all():
            return None
        weighted = means * counts[:, None]
        if self.scatter.ndim:
            scatter = _sparse_scatter(x, weighted.T @ means)
        else:
            scatter = np.asarray(x.data @ x.data - (weighted * means).sum())
        total, after, gaps = self._united(counts, means - self.pilot)
        return Moments(total, after, _added(scatter + self.scatter, gaps), self.pilot)

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
        return float(np.trace(self.scatter) if self.scatter.ndim else self.scatter)

    def panel(
        self, start: int, stop: int, divisor: float, about_zero: bool = False, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Rows ``start`` to ``stop`` of the scatter about the means, or about zero, over ``divisor``."""
        first, last = columns or (0, len(self.pilot))
        out = np.empty((stop - start, last - first))
        centres = np.sqrt(self.counts)[:, None] * self.group_means()
        for lo in range(start, stop, MIRRORED):
            hi = min(stop, lo + MIRRORED)
            corner = np.triu(self.scatter[lo:hi, lo:hi])
            corner += np.triu(corner, 1).T
            rows = np.hstack([self.scatter[:lo, lo:hi].T, corner, self.scatter[lo:hi, hi:]])[:, first:last]
            if about_zero:
                rows += centres[:, lo:hi].T @ centres[:, first:last]
            np.divide(rows, divisor, out=out[lo - start : hi - start])
        return out


def pilot(x: np.ndarray) -> np.ndarray:
    """The means of features that lie ten standard deviations or more from 0, and 0 for the others."""
    mean = x.mean(0, dtype=np.float64).astype(x.dtype).astype(np.float64)
    variance = np.einsum("ij,ij->j", x, x, dtype=np.float64) / len(x) - mean**2
    return np.where(mean**2 > 100 * variance, mean, 0)


def _added(scatter: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """``scatter + ZᵀZ`` in the memory of ``scatter``: the upper triangle; or the trace."""
    if not scatter.ndim:
        return np.asarray(scatter + np.vdot(Z, Z))
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


def _sparse_scatter(x: Any, of_means: np.ndarray) -> np.ndarray:
    """The scatter of sparse rows, given that of their means about zero."""
    raw = (x.T @ x).toarray()
    scatter = raw - of_means
    # Sparse rows are not centred before the product, so a constant feature leaves a rounding error: set it to 0.
    constant = np.diag(scatter) <= 1e-11 * np.diag(raw)
    scatter[constant], scatter[:, constant] = 0, 0
    return scatter


_scratch = threading.local()


def _scratch_rows(n: int, d: int) -> np.ndarray:
    """An ``(n, d)`` array in memory of this thread, which the next call overwrites: allocating pages is slow."""
    kept = vars(_scratch).get("kept")
    if kept is None or len(kept) < n * d:
        kept = _scratch.kept = np.empty(n * d)
    return kept[: n * d].reshape(n, d)


class Summary(NamedTuple):
    """Counts, means and total scatter of rows by group."""

    #: The number of rows of each group, ``(g,)``; one group if rows have no labels.
    counts: np.ndarray
    #: The group means: a tree like one row, with leaves ``(g, ...)``.
    means: Tree
    #: The sum of squared distances of all rows from their group means.
    scatter: np.ndarray

    @classmethod
    def of(cls, moments: Moments, template: Tree) -> Summary:
        means = players.from_matrix(moments.group_means().T, template)
        return cls(moments.counts, means, np.asarray(moments.total_scatter()))

    def moments(self) -> Moments:
        """The inverse: moments with the trace of the scatter alone."""
        means = players.to_matrix(self.means).T
        return Moments(self.counts, means, np.asarray(self.scatter), np.zeros(means.shape[1]))

    def less(self, point: Tree | None) -> Summary:
        """The summary of the rows before ``point`` was subtracted."""
        return self if point is None else self._replace(means=jax.tree.map(np.add, self.means, point))

"""Sums that lose nothing: first and second moments of rows, by group, in float64 on the host.

A pilot, the mean of the first block, is taken off every row; a block is then centred by its own mean, multiplied in the
precision of the rows, and merged with what came before in float64 (Chan, Golub and LeVeque's pairwise update). Products
and means therefore see numbers of the size of the deviations, wherever the data lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

#: Rows multiplied at a time: enough to keep a matrix product busy, few enough that float32 sums stay exact to rounding.
BLOCK_ROWS = 4096


def blocks(batches: list[Any], labels: list[np.ndarray] | None = None) -> Iterator[tuple[Any, np.ndarray]]:
    """Regroup rows and their labels into blocks of `BLOCK_ROWS` rows or a little more, each all sparse or all dense."""
    labels = [np.zeros(b.shape[0], np.intp) for b in batches] if labels is None else labels
    pending: list[tuple[Any, np.ndarray]] = []
    for batch, names in zip(batches, labels, strict=True):
        n = batch.shape[0]
        for start, stop in itertools.pairwise(np.linspace(0, n, max(1, n // BLOCK_ROWS) + 1).astype(int)):
            piece = batch[start:stop], names[start:stop]
            full = sum(p.shape[0] for p, _ in pending) >= BLOCK_ROWS
            if pending and (full or scipy.sparse.issparse(piece[0]) != scipy.sparse.issparse(pending[0][0])):
                yield _joined([p for p, _ in pending]), np.concatenate([n for _, n in pending])
                pending = []
            pending.append(piece)
    if pending:
        yield _joined([p for p, _ in pending]), np.concatenate([n for _, n in pending])


def _joined(pieces: list[Any]) -> Any:
    if scipy.sparse.issparse(pieces[0]):
        return scipy.sparse.vstack(pieces, format="csr")
    return np.concatenate(pieces) if len(pieces) > 1 else np.asarray(pieces[0])


class Moments(NamedTuple):
    """Counts ``(g,)`` of groups, their means ``(g, d)`` less a pilot, and the scatter ``(d, d)`` about them."""

    counts: np.ndarray
    means: np.ndarray
    scatter: np.ndarray
    #: A point near the rows, the first block's mean: what follows is summed relative to it.
    pilot: np.ndarray | None = None

    @classmethod
    def empty(cls, d: int, groups: int = 1) -> Moments:
        return cls(np.zeros(groups), np.zeros((groups, d)), np.zeros((d, d)))

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    def add(self, batches: list[Any], labels: list[np.ndarray] | None = None) -> Moments:
        """These moments with more rows; each row belongs to the group its label names."""
        total = self
        for block, group in blocks(batches, labels):
            total = total._with_block(block, group)
        return total

    def _with_block(self, x: Any, group: np.ndarray) -> Moments:
        pilot = self.pilot
        if scipy.sparse.issparse(x):
            pilot = np.zeros(x.shape[1]) if pilot is None else pilot
            return self._merged(_sparse_moments(x, group, len(self.counts), pilot), pilot)
        if pilot is None:
            pilot = x.mean(0, dtype=np.float64).astype(x.dtype).astype(np.float64)
        return self._merged(_dense_moments(x, group, len(self.counts), pilot, np.diag(self.scatter)), pilot)

    def _merged(self, block: tuple[np.ndarray, ...], pilot: np.ndarray) -> Moments:
        counts, means, scatter = block
        total = self.counts + counts
        share = np.divide(counts, total, out=np.zeros_like(total), where=total > 0)
        delta = means - self.means
        gap = delta * np.sqrt(self.counts * share)[:, None]
        scatter = self.scatter + scatter
        if gap.any():
            scatter += gap.T @ gap
        return Moments(total, self.means + share[:, None] * delta, scatter, pilot)

    def covariance(self) -> np.ndarray:
        """The unbiased covariance about the groups' means."""
        return self.scatter / (self.n - len(self.counts))

    def second_moment(self) -> np.ndarray:
        """``E[x xᵀ]`` about zero."""
        means = self.means + self.pilot
        return (self.scatter + (means * self.counts[:, None]).T @ means) / self.n


def _group_means(x: Any, group: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    counts = np.bincount(group, minlength=groups).astype(np.float64)
    if groups == 1:
        # As a product: NumPy's sum in another type than the rows' is slower than all the rest.
        sums = np.asarray(np.ones((1, x.shape[0]), x.dtype) @ x).astype(np.float64)
    else:
        n = len(group)
        member = scipy.sparse.csr_matrix((np.ones(n), (group, np.arange(n))), shape=(groups, n))
        sums = member @ x.astype(np.float64)
        sums = sums.toarray() if scipy.sparse.issparse(sums) else sums
    return counts, sums / np.maximum(counts, 1)[:, None]


def _sparse_moments(x: Any, group: np.ndarray, groups: int, pilot: np.ndarray) -> tuple[np.ndarray, ...]:
    x = x.astype(np.float64)
    counts, means = _group_means(x, group, groups)
    raw = (x.T @ x).toarray()
    scatter = raw - (means * counts[:, None]).T @ means
    # Sparse rows are not centred before they are multiplied, so what is left of a constant feature is rounding.
    constant = np.diag(scatter) <= 1e-11 * np.diag(raw)
    scatter[constant], scatter[:, constant] = 0, 0
    return counts, means - pilot, scatter


def _dense_moments(
    x: np.ndarray, group: np.ndarray, groups: int, pilot: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Moments of dense rows, multiplied in their own precision once centred; ``known``: the variation before them."""
    near = x - pilot.astype(x.dtype)
    counts, means = _group_means(near, group, groups)
    if groups == 1:
        product = (near.T @ near).astype(np.float64)
        offset = counts[0] * means[0] ** 2
        # Where the pilot is within a deviation of the block's mean, taking the mean off the product costs a bit or two
        # of the rows' precision and saves a second pass.
        if (2 * offset <= np.diag(product) + known).all():
            return counts, means, product - counts[0] * np.outer(means[0], means[0])
    rounded = means.astype(x.dtype)
    deviations = near - (rounded if groups == 1 else rounded[group])
    # What rounding the means left in the deviations is taken off in float64.
    rest = (means - rounded) * np.sqrt(counts)[:, None]
    return counts, means, (deviations.T @ deviations).astype(np.float64) - rest.T @ rest

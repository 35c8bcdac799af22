"""Scale down rows so large that a few of them would dominate the covariance."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse

from eigenstream.core import views
from eigenstream.core.types import Tree
from eigenstream.distributed import gather_rows
from eigenstream.problems.checks import check_finite

#: A warning names at most this many rows.
NAMED = 10


class Outliers:
    """Scales down rows whose energy (squared norm) in any view exceeds ``limit`` times the mean so far.

    `tame` does so on the host; on an accelerator `eigenstream.run.intake` does.
    """

    def __init__(self, limit: float):
        self.limit = limit
        #: Mean energy of each view over the ``seen`` rows.
        self.energies = np.zeros(0)
        #: Rows seen and rows scaled down; the indices of the first of these are in ``named``.
        self.seen = self.count = 0
        self.named: list[int] = []

    def tame(self, x: Tree, start: int = 0, total: int | None = None) -> Tree:
        """Check that rows are finite, and scale those above the limit down to it; device arrays are only checked.

        If ``x`` is one process's part of ``total`` rows, all processes compute the same limits.
        """
        leaves = views.leaves(x)
        on_host = all(isinstance(leaf, np.ndarray) or scipy.sparse.issparse(leaf) for leaf in leaves)
        if self.limit == np.inf or not on_host or not leaves:
            check_finite(x)
            return x
        energies = np.stack([_energies(leaf) for leaf in leaves])
        # Finite energies imply finite rows. Others may have overflowed, so they are computed again in float64.
        if not np.isfinite(energies).all():
            check_finite(x)
            energies = np.stack([_energies(leaf.astype(np.float64)) for leaf in leaves])
        b = energies.shape[1]
        energies = gather_rows(energies, start, b if total is None else total)
        if not len(self.energies):
            # The first batch starts from its median, which holds if fewer than half of its rows are outliers.
            self.energies = np.median(energies, axis=1)
        limits = np.where(self.energies > 0, self.limit * self.energies, np.inf)
        excess = (energies / limits[:, None]).max(0)
        if (excess > 1).any():
            self.note(self.seen, excess > 1)
            factor = 1 / np.sqrt(np.maximum(excess, 1))
            x = views.map_leaves(lambda leaf: _scaled(leaf, factor[start : start + b]), x)
            energies = energies * factor**2
        b = energies.shape[1]
        self.energies = self.energies + b / (self.seen + b) * (energies.mean(1) - self.energies)
        self.seen += b
        return x

    def note(self, before: int, scaled: np.ndarray) -> None:
        """Count and name the rows scaled down among those that follow the first ``before``."""
        where = np.flatnonzero(scaled)
        self.named += (before + where[: NAMED - len(self.named)]).tolist()
        self.count += len(where)

    def report(self) -> str:
        """A description of the rows scaled down; empty if there were none."""
        if not self.count:
            return ""
        more = ", ..." if self.count > len(self.named) else ""
        return (
            f"{self.count} of {self.seen} rows have over {self.limit:g} times the mean squared norm and were scaled "
            f"down to that: rows {', '.join(map(str, self.named))}{more}"
        )

    def warn(self) -> None:
        if self.count:
            warnings.warn(f"{self.report()}; es.solvers.Game(outlier=None) takes rows as they are", stacklevel=2)


def _energies(leaf: Any) -> np.ndarray:
    if scipy.sparse.issparse(leaf):
        return np.asarray(leaf.multiply(leaf).sum(1), np.float64).ravel()
    flat = leaf.reshape(len(leaf), -1)
    return np.einsum("ij,ij->i", flat, flat).astype(np.float64)


def _scaled(leaf: Any, factor: np.ndarray) -> Any:
    if scipy.sparse.issparse(leaf):
        return scipy.sparse.diags_array(factor.astype(leaf.dtype)).tocsr() @ leaf
    return leaf * factor.astype(leaf.dtype).reshape((-1,) + (1,) * (leaf.ndim - 1))

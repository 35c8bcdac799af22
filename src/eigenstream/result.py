"""What a run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eigenstream import trees
from eigenstream.summary import Summary

__all__ = ["Result"]

Tree = Any


@dataclass(frozen=True)
class Result:
    """Eigenpairs, and how they were come by."""

    #: (k,): the most wanted first; of an iterative solver, in the order of its players.
    eigenvalues: np.ndarray
    #: Players: a pytree like one row of the data, with leaves ``(k, ...)``.
    eigenvectors: Tree = field(repr=False)
    #: Whether the answer is exact, or its residual fell under ``tol``.
    converged: bool
    #: Why the run stopped, in words.
    message: str
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)``; of a streaming solver on its last batches, sampling noise included; of
    #: `eigenstream.solvers.Game` over all rows, in the norm of its preconditioner, relative to the largest eigenvalue.
    residuals: np.ndarray = field(repr=False)
    n_iter: int
    n_samples_seen: int
    solver: Any
    #: One record for every look at the run: step, epoch, rows, seconds and, of a streaming solver, eigenvalues and
    #: residual.
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: The solver's last state.
    state: Any = field(default=None, repr=False)
    #: Counts and means of the rows; of a streaming solver only where they were asked for.
    summary: Summary | None = field(default=None, repr=False)
    #: Of `eigenstream.solvers.Game`: eigenvalues on rows before they were learned from, those of early players among
    #: them, and their standard errors.
    heldout: np.ndarray | None = field(default=None, repr=False)
    heldout_error: np.ndarray | None = field(default=None, repr=False)

    @property
    def V(self) -> np.ndarray:
        """The eigenvectors as columns, ``(d, k)``, views below one another, as `eigenstream.eigh` gives them."""
        return trees.columns(self.eigenvectors)

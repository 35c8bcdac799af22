"""What a run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from eigenstream.core import players
from eigenstream.core.moments import Summary
from eigenstream.core.types import Tree

__all__ = ["Result", "Status"]


class Status(StrEnum):
    """How a run ended."""

    #: Exact sums were solved.
    SOLVED = "solved"
    #: The residual, or the game's estimated shortfall, is small enough.
    CONVERGED = "converged"
    #: The stream or the steps ended first.
    NOT_CONVERGED = "not converged"
    #: A callback returned True.
    STOPPED = "stopped"
    #: Ctrl-C; the result is that of the rows read so far.
    INTERRUPTED = "interrupted"
    #: A step was not finite; the result is the last finite state.
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """Eigenpairs, and how the run that found them ended."""

    #: (k,): the most wanted first; of an iterative solver, in the order of its players.
    eigenvalues: np.ndarray
    #: Players: a pytree like one row of the data, with leaves ``(k, ...)``.
    eigenvectors: Tree = field(repr=False)
    #: Whether the answer is exact, its residual fell below ``tol``, or the game's estimated shortfall is below 1%.
    converged: bool
    #: The end of the run in words; `status` is the same for programs.
    message: str
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)`` of each pair. A streaming solver measures it on its last batch,
    #: sampling noise included; `eigenstream.solvers.Game` by its tracked products.
    residuals: np.ndarray = field(repr=False)
    n_iter: int
    n_samples_seen: int
    solver: Any
    #: Snapshots of the run: step, epoch, rows, seconds and, of a streaming solver, eigenvalues and residual; of the
    #: game also its estimated shortfall.
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: The solver's last state.
    state: Any = field(default=None, repr=False)
    #: Counts and means of the rows; of a streaming solver only if they were asked for.
    summary: Summary | None = field(default=None, repr=False)
    #: Of `eigenstream.solvers.Game`: eigenvalues measured on each batch before it was learned from, and their standard
    #: errors.
    heldout: np.ndarray | None = field(default=None, repr=False)
    heldout_error: np.ndarray | None = field(default=None, repr=False)
    #: Of the game: by how much the sum of the eigenvalues is estimated to fall short of its limit, relative to it, and
    #: the part of each pair's preconditioned residual that sampling noise alone would cause.
    shortfall: float | None = None
    noise_floors: np.ndarray | None = field(default=None, repr=False)
    status: Status = Status.SOLVED

    @property
    def V(self) -> np.ndarray:
        """The eigenvectors as columns, ``(d, k)``, one view below the other, as `eigenstream.eigh` gives them."""
        return players.to_matrix(self.eigenvectors)

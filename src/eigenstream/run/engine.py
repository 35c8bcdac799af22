"""The contract between the loop and a solver under way.

`Engine` is what the loop asks for, `Setup` what it gives and `Ending` what it gets back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from eigenstream.core.moments import Summary
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.run.placement import Placement
from eigenstream.run.result import Status

#: Steps between two snapshots of a running solver.
SNAPSHOT_EVERY = 50


class Setup(NamedTuple):
    """What every engine starts from."""

    problem: Problem
    solver: Any
    #: How many eigenpairs; None for all.
    k: int | None
    #: The first batch, for shapes.
    first: Tree
    which: str = "largest"
    #: Whether the stream can be read more than once.
    repeatable: bool = False
    seed: int = 0
    #: Whether counts and means of the rows are wanted, as an estimator does.
    summarise: bool = False
    placement: Placement = Placement()
    #: Bytes that a solver may take for sums or rows; None: half of what is free.
    memory_budget: float | None = None
    #: Whether rows may be kept until the stream ends, and whether they need not be, since they can be read from memory
    #: or a file again.
    keep_rows: bool = False
    rereads: bool = False


class Stop(NamedTuple):
    """Why a run ended before its stream did."""

    status: Status
    message: str


class Ending(NamedTuple):
    """An engine's part of a `Result`, under the same names."""

    eigenvalues: np.ndarray
    eigenvectors: Tree
    residuals: np.ndarray
    converged: bool
    status: Status
    message: str
    state: Any
    n_samples_seen: int
    heldout: np.ndarray | None = None
    heldout_error: np.ndarray | None = None
    shortfall: float | None = None
    noise_floors: np.ndarray | None = None


class Engine(Protocol):
    """A solver under way. The loop gives it batches in order and asks for nothing but this.

    Engines inherit the defaults below: nothing is kept, nothing fails, a snapshot is due every SNAPSHOT_EVERY steps.
    """

    #: The solver's state: sums or players.
    state: Any
    #: Whether rows are summed: their order and the size of batches do not matter, and ``tol``, ``max_epochs`` and
    #: ``max_steps`` do not apply.
    sums_rows: bool
    #: The entry of a snapshot that ``tol`` bounds, in snapshots that have it; empty if none has.
    criterion: str
    #: The fewest rows that can be learned from at once.
    fewest_rows: int
    #: Of an engine that sums rows: the rows to read at once, whether nobody writes to them later, and the range of
    #: rows of a batch that this process sums (None: all).
    block_rows: int = 0
    rows_stay: bool = False
    share: Callable[[int], tuple[int, int]] | None = None

    def take(self, batch: Tree, start: int, total: int) -> int:
        """Learn from an accepted batch, this process's rows from ``start`` on of ``total``; return the steps taken."""

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        """The eigenpairs after ``n_rows`` rows; ``source`` describes in words what was read."""

    def next_pass(self, epoch: int, max_epochs: int | None) -> bool:
        """Prepare to read the stream again; False if the solver is done. None: as often as it needs."""

    def saveable(self) -> list[Any] | None:
        """The arrays of a checkpoint; None while rows are queued that it would lose."""

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        """Continue from the arrays of a checkpoint made in this epoch."""

    def summary(self) -> Summary | None:
        """Counts and means of the rows, in their own coordinates."""

    @property
    def failed(self) -> bool:
        """Whether a step was not finite. The state is then the last finite one."""
        return False

    @property
    def takes_more_rows(self) -> bool:
        """Whether rows can still be added after the end of a stream."""
        return True

    @property
    def examines_on_device(self) -> bool:
        """Whether rows are checked and summed on the device, so that the host need not read them."""
        return False

    def converted(self, batch: Tree) -> Tree:
        """An accepted host batch as it is copied to the device."""
        return batch

    def revisit(self, batch: Tree) -> None:
        """After a resume, keep what is needed of a batch that was learned from before; do not learn from it again."""
        return

    def flush(self) -> None:
        """Learn from the queued rows."""
        return

    def reopen(self) -> None:
        """Continue a finished run with new rows."""
        return

    def snapshot_due(self, steps: int) -> bool:
        """Whether there is something new to report after this many steps."""
        return steps <= SNAPSHOT_EVERY // 10 or steps % SNAPSHOT_EVERY == 0

    def snapshot(self) -> dict[str, Any]:
        """Eigenvalues and residual so far, if they are known."""
        return {}

    def cross_covariances(self) -> list[np.ndarray] | None:
        """For each view the covariance ``(d, k)`` of all features with its last scores; None if it was not summed."""
        return None


def check_enough_rows(n: int, least: int, problem: Problem, k: int | None) -> None:
    """Refuse to solve from too few rows."""
    if n < least:
        raise ValueError(f"the stream held too few rows: at least {least} are needed")
    if problem.has_rows and n < (k or 1):
        raise ValueError(f"the stream held {n} rows, fewer than k={k}: give more rows, or a smaller k")


def like_fresh(fresh: Any, saved: np.ndarray | None) -> Any:
    """A saved array in the place of a fresh one, without its padding; numbers stay numbers."""
    if saved is None:
        return fresh
    if isinstance(fresh, int | float) and np.ndim(fresh) == 0:
        return saved.item()
    if saved.ndim != np.ndim(fresh) or any(a < b for a, b in zip(saved.shape, np.shape(fresh), strict=True)):
        raise ValueError("the checkpoint was written by another version: start the run anew")
    return saved[tuple(slice(n) for n in np.shape(fresh))]

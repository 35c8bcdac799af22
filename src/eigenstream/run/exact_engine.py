"""The exact solver under way: rows in, sums, one solution at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import jax
import numpy as np

from eigenstream import distributed
from eigenstream.core import host_batches, players, views
from eigenstream.core.device_moments import AHEAD, DeviceMoments
from eigenstream.core.moments import Summary, rows_to_read
from eigenstream.core.types import Tree
from eigenstream.run.engine import Ending, Engine, Setup, Stop, check_enough_rows, like_fresh
from eigenstream.run.result import Status
from eigenstream.solvers.exact import report_not_finite
from eigenstream.streams.blocks import Blocks


class ExactEngine(Engine):
    """Adds the moments of all rows and solves once at the end.

    On a mesh the devices share the rows and the sums. Several processes without a mesh each sum their own rows, and
    their sums are merged when they are read.
    """

    sums_rows = True
    criterion = ""

    def __init__(self, setup: Setup):
        self.problem, self.solver, self.which = setup.problem, setup.solver, setup.which
        self.placement, mesh = setup.placement, setup.placement.mesh
        self._d = players.size(self.problem.template(setup.first)) if self.problem.has_rows else 1
        with name_memory(self._d):
            self.state: Any = self.solver.init(self.problem, setup.first, setup.k, setup.repeatable, mesh)
        self.fewest_rows = self.problem.fewest_rows(False)
        self.passes = 1
        sums = getattr(self.state.statistics, "moments", None)
        self.block_rows = rows_to_read(self._d)
        self._blocks = Blocks(self.block_rows, AHEAD + 2, on_device=True) if self._on_device else Blocks()
        several = distributed.count() > 1 and sums is not None
        #: Whether processes take part in one program, or else whether each sums its own rows.
        self._together = several and self._on_device and mesh is not None
        self._apart = several and not self._together
        if self._together and self.solver.half_life is not None:
            raise ValueError("half_life: exact sums that processes share on a mesh do not fade; leave out mesh")
        if self._apart:
            self.share = distributed.share
        elif self._together and self.placement.shares_rows:
            self.share = self.placement.share
        self._crossed: list[np.ndarray] | None = None
        #: The sums of all processes, until more rows come.
        self._whole: Any = None

    @property
    def _on_device(self) -> bool:
        return isinstance(getattr(self.state.statistics, "moments", None), DeviceMoments)

    def take(self, batch: Tree, start: int, total: int) -> int:
        self._whole = None
        for block, how in self._blocks_of(batch, start, total):
            with name_memory(self._d):
                self.state = self.solver.step(self.problem, self.state, block, **how)
        return 1

    def _blocks_of(self, batch: Tree, start: int, total: int) -> list[tuple[Tree, dict[str, Any]]]:
        """What to sum now, and how to bring it to a device."""
        if self._together:
            # All processes run one program on a batch, so batches are not joined.
            return [(batch, {"start": start, "total": total})]
        if self._apart and total == views.n_rows(batch):
            batch = host_batches.rows_between(batch, *distributed.share(total))
        if not views.n_rows(batch):
            return []
        if not self._on_device:
            return [(block, {}) for block in ([batch] if self.rows_stay else self._blocks.add(batch))]
        if self.rows_stay:
            return [(batch, {"stays": True})]
        given = views.leaves(batch)
        # Rows that were joined are in memory that is not written to again before they are summed.
        blocks = self._blocks.add(batch)
        own = [all(x is not y for x, y in zip(views.leaves(block), given, strict=True)) for block in blocks]
        return [(block, {"stays": stays}) for block, stays in zip(blocks, own, strict=True)]

    def flush(self) -> None:
        if self._blocks.waiting:
            with name_memory(self._d):
                self.state = self.solver.step(self.problem, self.state, self._blocks.rest())

    def reopen(self) -> None:
        # A caller may overwrite the rows that it gives to partial_fit.
        self.rows_stay = False

    def _statistics(self) -> Any:
        """The sums of all processes."""
        if not self._apart:
            return self.state.statistics
        if self._whole is None:
            self.flush()
            leaves, structure = jax.tree.flatten(self.state.statistics.on_host())
            parts = [jax.tree.unflatten(structure, own) for own in distributed.gather_all(leaves)]
            self._whole = reduce(lambda a, b: a.merged(b), parts)
        return self._whole

    def flushed(self) -> ExactEngine:
        """An engine with the same rows, none of them queued. This one does not change."""
        if not self._blocks.waiting:
            return self
        other = copy.copy(self)
        # Sums are added to in place.
        other.state, other._blocks = copy.deepcopy(self.state), copy.copy(self._blocks)
        other.flush()
        return other

    def next_pass(self, epoch: int, max_epochs: int | None) -> bool:
        self.flush()
        after = self.solver.next_pass(self.state)
        if after is None:
            return False
        self.state, self.passes = after, self.passes + 1
        return True

    @property
    def takes_more_rows(self) -> bool:
        # A second pass sums about the mean of the first, which more rows would move.
        return self.passes == 1

    def saveable(self) -> list[Any] | None:
        if self._blocks.waiting and not self._apart:
            return None
        with report_not_finite():
            return [*jax.tree.leaves(self._statistics().on_host()), self.state.epsilon]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        for _ in range(epoch):
            self.next_pass(0, 0)
        fresh, structure = jax.tree.flatten(self.state.statistics.on_host())
        # Empty sums of edges have no entries yet: there is no size to compare with.
        leaves = [like_fresh(x if np.size(x) else arrays.get(i, x), arrays.get(i)) for i, x in enumerate(fresh)]
        statistics = jax.tree.unflatten(structure, leaves)
        if self._apart and not distributed.is_first():
            # The saved sums are of all processes: only the first continues from them.
            statistics = self.state.statistics
        elif self._on_device:
            statistics = statistics.on_device(self.placement.mesh)
        self.state = self.state._replace(statistics=statistics, epsilon=float(arrays[len(fresh)]))

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self.flush()
        if not hasattr(self.state.statistics, "operands"):
            raise ValueError("the run ended in the first of two passes: nothing can be solved yet; let it run on")
        with report_not_finite(), name_memory(self._d):
            return self._solved(n_rows, stop)

    def _solved(self, n_rows: int, stop: Stop | None) -> Ending:
        state = self.state._replace(statistics=self._statistics())
        summary = self.summary()
        # Faded sums have lost the number of rows.
        n = n_rows if summary is None or self.solver.half_life is not None else int(summary.counts.sum())
        check_enough_rows(n, self.fewest_rows, self.problem, self.state.k)
        solved, V, info, self._crossed = self.solver.solve(self.problem, state, self.which, n)
        message = info.message
        if n:
            message += f" from {n} rows in {self.passes} pass{'es' * (self.passes > 1)}"
        d, rank = players.size(self.state.template), sum(solved.ranks)
        if stop is not None:
            message = stop.message
        if rank < d:
            message += f"; B has rank {rank} of {d}, and the solution lies in its range"
        if len(solved.ranks) > 1 and n <= rank and not self.problem.ridge and not self.problem.orthonormal:
            message += (
                f"; {n} rows of {rank} independent columns always have correlations of 1: give a ridge or more rows"
            )
        status = stop.status if stop else Status.SOLVED if info.converged else Status.NOT_CONVERGED
        converged = status is Status.SOLVED
        return Ending(solved.eigenvalues, V, info.residuals, converged, status, message, self.state, n)

    def summary(self) -> Summary | None:
        return self._statistics().summary()

    def cross_covariances(self) -> list[np.ndarray] | None:
        return self._crossed


@contextmanager
def name_memory(d: int) -> Iterator[None]:
    """Name the sizes and the way out when a device runs out of memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"exact sums of {d} features take {8e-9 * d * d:.2g} GB and their solution about twice as much again, more "
            "than is free: give fewer columns, a smaller memory_budget, devices that share the features as in "
            'mesh="feature=8", or solver="game"'
        ) from error

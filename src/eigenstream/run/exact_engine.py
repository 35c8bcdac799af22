"""The exact solver under way: rows in, sums, one solution at the end."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from eigenstream.core import players
from eigenstream.core.moments import Summary
from eigenstream.core.types import Tree
from eigenstream.run.engine import Ending, Engine, Setup, Stop, check_enough_rows, like_fresh
from eigenstream.run.result import Status
from eigenstream.streams.blocks import Blocks


class ExactEngine(Engine):
    """Adds the moments of all rows and solves once at the end."""

    sums_rows = True
    criterion = ""

    def __init__(self, setup: Setup):
        self.problem, self.solver, self.which = setup.problem, setup.solver, setup.which
        self.state: Any = self.solver.init(self.problem, setup.first, setup.k, setup.repeatable)
        self.fewest_rows = self.problem.fewest_rows(False)
        self.passes = 1
        self._blocks = Blocks()

    def take(self, batch: Tree, start: int, total: int) -> int:
        for block in self._blocks.add(batch):
            self.state = self.solver.step(self.problem, self.state, block)
        return 1

    def flush(self) -> None:
        if self._blocks.waiting:
            self.state = self.solver.step(self.problem, self.state, self._blocks.rest())

    def next_pass(self, epoch: int, max_epochs: int) -> bool:
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
        return None if self._blocks.waiting else [*jax.tree.leaves(self.state.statistics), self.state.epsilon]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        for _ in range(epoch):
            self.next_pass(0, 0)
        fresh, structure = jax.tree.flatten(self.state.statistics)
        leaves = [like_fresh(x, arrays.get(i)) for i, x in enumerate(fresh)]
        statistics = jax.tree.unflatten(structure, leaves)
        self.state = self.state._replace(statistics=statistics, epsilon=float(arrays[len(fresh)]))

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self.flush()
        if not hasattr(self.state.statistics, "operands"):
            raise ValueError("the run ended in the first of two passes: nothing can be solved yet; let it run on")
        summary = self.summary()
        # Faded sums have lost the number of rows.
        n = n_rows if summary is None or self.solver.half_life is not None else int(summary.counts.sum())
        check_enough_rows(n, self.fewest_rows, self.problem, self.state.k)
        solved, V, info = self.solver.solve(self.problem, self.state, self.which, n)
        message = info.message if not n else f"solved exactly from {n} rows in {self.passes} pass"
        message += "es" * (self.passes > 1)
        d, rank = players.size(self.state.template), sum(solved.ranks)
        if stop is not None:
            message = stop.message
        if rank < d:
            message += f"; B has rank {rank} of {d}, and the solution lies in its range"
        status = stop.status if stop else Status.SOLVED if info.converged else Status.NOT_CONVERGED
        converged = status is Status.SOLVED
        return Ending(solved.eigenvalues, V, info.residuals, converged, status, message, self.state, n)

    def summary(self) -> Summary | None:
        return self.solver.summary(self.state)

    def covariance(self) -> np.ndarray | None:
        return self.solver.covariance(self.state)

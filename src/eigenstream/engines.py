"""Solvers under way behind one face: sums that are solved once, and players that take a step with every batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import distributed, host, rows, trees
from eigenstream.placement import Placement, on_host, placed, saved
from eigenstream.problems.base import Negated, Problem, check_finite, view_sizes
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.stochastic import Info, Stochastic
from eigenstream.streams.blocks import Blocks
from eigenstream.summary import Summary

Tree = Any

#: Steps between two looks at a running solver: its progress, its residual and whether it failed.
LOOK_EVERY = 50
#: The residual at which players on given matrices have converged, in float32.
NOISELESS = 1e-4
#: A residual that a player reaches only while it is nowhere near an eigenvector.
FAR = 0.9


class Solving:
    """Statistics under way to an exact solution."""

    #: Whether a step went wrong for good, and whether rows are kept and not looked at before the end.
    failed = keeps_all = False
    #: Eigenvalues on rows that were not learned from, and their errors.
    heldout: tuple[Any, Any] = (None, None)

    def __init__(self, problem: Problem, solver: Exact, k: int | None, which: str, first: Tree, repeatable: bool):
        self.problem, self.solver, self.which = problem, solver, which
        self.state: Any = solver.init(problem, first, k, repeatable)
        self.passes = 1
        self._blocks = Blocks()

    def prepare(self, batch: Tree, start: int = 0, total: int | None = None) -> Tree:
        """A host batch, or a part of it, as `step` takes it. Whether it is finite shows in the sums."""
        return batch

    def remember(self, batch: Tree) -> None:
        """Nothing of a batch is needed once it is summed."""

    def step(self, batch: Tree) -> None:
        for block in self._blocks.add(batch):
            self.state = self.solver.step(self.problem, self.state, block)

    def settle(self) -> None:
        """Sum the rows that wait to fill a block."""
        if self._blocks.waiting:
            self.state = self.solver.step(self.problem, self.state, self._blocks.rest())

    def go_on(self) -> None:
        """Sums take new rows at any time."""

    def worth_a_look(self, steps: int) -> bool:
        return steps <= LOOK_EVERY // 10 or steps % LOOK_EVERY == 0

    def how_far(self, source: str) -> str:
        """The end says it."""
        return ""

    def look(self) -> dict[str, Any]:
        """Nothing is known before the end."""
        return {}

    def next_pass(self, epoch: int, max_epochs: int) -> bool:
        """Get ready to read the batches again, if the solution needs that."""
        self.settle()
        after = self.solver.next_pass(self.state)
        if after is None:
            return False
        self.state, self.passes = after, self.passes + 1
        return True

    def saveable(self) -> list[Any] | None:
        """The arrays of a checkpoint; None while rows wait to fill a block."""
        return None if self._blocks.waiting else [*jax.tree.leaves(self.state.statistics), self.state.epsilon]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        for _ in range(epoch):
            self.next_pass(0, 0)
        fresh, structure = jax.tree.flatten(self.state.statistics)
        leaves = [_like(x, arrays.get(i)) for i, x in enumerate(fresh)]
        statistics = jax.tree.unflatten(structure, leaves)
        self.state = self.state._replace(statistics=statistics, epsilon=float(arrays[len(fresh)]))

    def fewest_rows(self) -> int:
        return self.problem.fewest_rows(False)

    def has_begun(self) -> bool:
        return True

    def rows(self, read: int) -> int:
        """Rows behind the solution, of all that were read."""
        self.settle()
        if not hasattr(self.state.statistics, "operands"):
            raise ValueError("the run ended in the first of two passes: nothing can be solved yet; let it run on")
        summary = self.solver.summary(self.state)
        # Sums that fade have forgotten how many rows they were.
        return read if summary is None or self.solver.half_life is not None else int(summary.counts.sum())

    def end(self, n: int, stopped: str) -> tuple[np.ndarray, Tree, np.ndarray, bool, str]:
        """Eigenvalues, players, residuals, whether they are the whole answer, and what happened in words."""
        solved, V, info = self.solver.solve(self.problem, self.state, self.which, n)
        d, rank = trees.size(self.state.template), sum(solved.ranks)
        message = stopped or (
            info.message if not n else f"solved exactly from {n} rows in {self.passes} pass" + "es" * (self.passes > 1)
        )
        if rank < d:
            message += f"; B has rank {rank} of {d}, and the solution lies in its range"
        return solved.eigenvalues, V, info.residuals, info.converged and not stopped, message

    @property
    def settled(self) -> Any:
        """The state behind the result."""
        return self.state

    def summary(self) -> Summary | None:
        return self.solver.summary(self.state)


# The state is the loop's own: its memory serves the next.
@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _step(solver: Any, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.step(problem, state, batch)


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def _steps_without_data(solver: Any, problem: Problem, state: Any, count: int) -> Any:
    def body(state: Any, _: None) -> Any:
        return placed(type(solver).step)(solver, problem, state, None)

    state, infos = jax.lax.scan(body, state, None, length=count)
    return state, jax.tree.map(lambda x: x[-1], infos)


class Playing:
    """An iterative solver under way."""

    #: Eigenvalues on rows that were not learned from, and their errors.
    heldout: tuple[Any, Any] = (None, None)

    def __init__(
        self,
        problem: Problem,
        solver: Any,
        k: int | None,
        which: str,
        first: Tree,
        seed: int,
        sums: bool,
        place: Placement,
    ):
        if which == "magnitude":
            raise ValueError(
                'which="magnitude" needs the whole spectrum: take solver="exact", or which="largest" or "smallest"'
            )
        self.problem: Problem = problem if which == "largest" else Negated(problem)
        self.solver, self.sign = solver, 1 if which == "largest" else -1
        template = problem.template(first)
        count = problem.most_components(view_sizes(template)) if k is None else k
        self._count = count
        state = jax.tree.map(jnp.copy, solver.init(self.problem, first, count, jax.random.key(seed)))
        self.place = place
        self.problem = self.place.everywhere(self.problem)
        self.template, self.state = template, self.place.state(state, template)
        self.pilot = None if problem.noiseless else problem.pilot(first)
        self.sums = self.problem.start_summary(template) if sums else None
        self.info: Any = None
        self.least = solver.fewest_rows(self.problem)
        self.before: Tree = None
        #: Rows in the first batch.
        self._usual = 0 if problem.noiseless else rows.n_rows(first)

    @property
    def failed(self) -> bool:
        return bool(self.state.failed)

    def prepare(self, batch: Tree, start: int = 0, total: int | None = None) -> Tree | None:
        """A checked batch on the device, of which this process may have a part; None while too few rows are there.

        A batch that is too small for a step, as the last of a stream may be, is filled up with the last rows before it.
        """
        check_finite(batch)
        total = rows.n_rows(batch) if total is None else total
        self._summarise(self._near(batch), total)
        if total == rows.n_rows(batch):
            batch = self.remember(batch)
            total = rows.n_rows(batch)
        if total < self.least:
            return None
        near = self._near(batch)
        near = self._filled(near) if total == rows.n_rows(near) else near
        batch = self.place.batch(near, start, total)
        jax.block_until_ready(batch)
        return batch

    def _filled(self, batch: Tree) -> Tree:
        """A batch of another size than the first filled up to it, or to a power of two: all are one program."""
        b = rows.n_rows(batch)
        parts = self.solver.parts(self.problem) if isinstance(self.solver, Stochastic) else None
        if b == self._usual or parts is None or not all(isinstance(x, np.ndarray) for x in rows.leaves(batch)):
            return batch
        wanted = self._usual if b < self._usual else 1 << (b - 1).bit_length()
        return host.filled(batch, parts, -(-wanted // parts) * parts)

    def _summarise(self, near: Tree, total: int) -> None:
        """Take rows into the means that an estimator asks for; those that several processes have, by one of them."""
        mine = self.place.speaks_for_its_rows if rows.n_rows(near) < total else distributed.is_first()
        if self.sums is not None and mine:
            self.sums = self.problem.summarise(self.sums, near)

    def _near(self, batch: Tree) -> Tree:
        return batch if self.pilot is None else self.problem.less_pilot(batch, self.pilot)

    def remember(self, batch: Tree) -> Tree:
        """Keep the last rows in case the next batch is too small; this one, filled up if it is."""
        if rows.n_rows(batch) < self.least and self.before is not None:
            batch = host.join(self.before, batch)
        self.before = host.last(batch, self.least)
        return batch

    def step(self, batch: Tree) -> None:
        step = _steps_without_data if self.problem.noiseless else _step
        self.state, self.info = self.place.run(step, self.solver, self.problem, self.state, batch)

    def go_on(self) -> None:
        """From here on rows are new."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "state": on_host(self.state)}

    def worth_a_look(self, steps: int) -> bool:
        return self.problem.noiseless or steps <= LOOK_EVERY // 10 or steps % LOOK_EVERY == 0

    def how_far(self, source: str) -> str:
        """How the run ended, where nothing stopped it."""
        worst = float(np.max(np.asarray(self.info.residuals)))
        noise = "" if self.problem.noiseless else " on the last batch, sampling noise included"
        return f"stopped after {source}, with a residual of {worst:.2g}{noise}"

    def look(self) -> dict[str, Any]:
        if self.info is None:
            return {}
        worst = float(np.max(np.asarray(self.info.residuals)))
        return {"eigenvalues": self.sign * np.asarray(self.info.eigenvalues), "residual": worst}

    def next_pass(self, epoch: int, max_epochs: int) -> bool:
        self.before = None
        return epoch + 1 < max_epochs and not self.problem.noiseless

    def _kept(self) -> Any:
        sums = None if self.sums is None else Summary.joined(distributed.of_all(self.sums))
        return saved(self.state), on_host(self.info), self.pilot, sums

    def saveable(self) -> list[Any] | None:
        return None if self.info is None else jax.tree.leaves(self._kept())

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        blank = Info(jnp.zeros(self._count), jnp.zeros(self._count))
        template = (on_host(self.state), self.info or blank, self.pilot, self.sums)
        fresh, structure = jax.tree.flatten(template)
        leaves = [_like(x, arrays.get(i)) for i, x in enumerate(fresh)]
        state, info, self.pilot, self.sums = jax.tree.unflatten(structure, leaves)
        if self.sums is not None and not distributed.is_first():
            # What was summed is one process's to bring in.
            self.sums = self.problem.start_summary(self.template)
        state, self.info = jax.tree.map(jnp.asarray, (state, info))
        self.state = self.place.state(state, self.template)

    def fewest_rows(self) -> int:
        return self.least

    def has_begun(self) -> bool:
        """Whether a step was taken: a stream may hold too few rows for one, however often it is read."""
        return self.info is not None

    def rows(self, read: int) -> int:
        return read

    def end(self, n: int, stopped: str) -> tuple[np.ndarray, Tree, np.ndarray, bool, str]:
        lam, V = self.solver.eigenpairs(self.problem, on_host(self.state))
        rest = np.asarray(self.info.residuals)
        message = stopped
        if self.failed:
            message = (
                f"a step near number {int(self.state.step)} was not finite; this is the last finite state: lower "
                "learning_rate, or look for NaN in the data"
            )
        elif rest.max() > FAR and self.sign > 0:
            message += (
                "; near 1, so these are no eigenvectors: lower learning_rate, scale the features alike or use Adam"
            )
        return self.sign * np.asarray(lam), V, rest, False, message

    @property
    def keeps_all(self) -> bool:
        """Whether rows are kept and not looked at before the end."""
        return False

    @property
    def settled(self) -> Any:
        """The state behind the result."""
        return on_host(self.state)

    def summary(self) -> Summary | None:
        """In the rows' own coordinates."""
        return None if self.sums is None else Summary.joined(distributed.of_all(self.sums)).less(self.pilot)


def _like(fresh: Any, saved: np.ndarray | None) -> Any:
    """A saved array in the place of a fresh one, less what it was filled up with; numbers stay numbers."""
    if saved is None:
        return fresh
    if isinstance(fresh, int | float) and np.ndim(fresh) == 0:
        return saved.item()
    if saved.ndim != np.ndim(fresh) or any(a < b for a, b in zip(saved.shape, np.shape(fresh), strict=True)):
        raise ValueError("the checkpoint was written by another version: start the run anew")
    return saved[tuple(slice(n) for n in np.shape(fresh))]

"""An iterative solver under way: one step with every batch."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import distributed
from eigenstream.core import host_batches, views
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.transfer import Picked, pick
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import check_finite, view_sizes
from eigenstream.run.engine import Ending, Engine, Setup, Stop, check_enough_rows, like_fresh
from eigenstream.run.intake import UNDER_WAY, Intake, is_dense, on_accelerator
from eigenstream.run.outliers import Outliers
from eigenstream.run.placement import for_checkpoint, on_host, placed
from eigenstream.run.result import Status
from eigenstream.solvers.stochastic import Info

#: A residual above this means that a player is not near any eigenvector.
FAR = 0.9


# The state is donated: its memory serves the next one.
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


class SteppingEngine(Engine):
    """An iterative solver that takes one step with every batch."""

    sums_rows = False

    def __init__(self, setup: Setup):
        if setup.which == "magnitude":
            raise ValueError(
                'which="magnitude" needs the whole spectrum: take solver="exact", or which="largest" or "smallest"'
            )
        self.sign = 1 if setup.which == "largest" else -1
        problem, solver, first = setup.problem.with_sign(self.sign), setup.solver, setup.first
        template = problem.template(first)
        #: The number asked for, None for all, and the number of players.
        self._asked = setup.k
        self._k = problem.most_components(view_sizes(template)) if setup.k is None else setup.k
        state = jax.tree.map(jnp.copy, solver.init(problem, first, self._k, jax.random.key(setup.seed)))
        self.solver, self.placement = solver, setup.placement
        self.problem: Problem = self.placement.replicate(problem)
        self.template, self.state = template, self.placement.state(state, template)
        self.pilot = None if problem.noiseless else problem.pilot(first)
        #: Counts, means and total scatter of the rows less the pilot.
        self.sums = problem.no_rows(template) if setup.summarise else None
        self.info: Any = None
        self.criterion = "residual" if solver.has_residual else ""
        self.fewest_rows = solver.fewest_rows(problem)
        self._repeatable = setup.repeatable
        self.outliers = Outliers(getattr(solver, "outlier", None) or np.inf)
        #: Examines dense rows on an accelerator; None if the host does.
        self.intake: Intake | None = None
        if not problem.noiseless and self.placement.mesh is None and distributed.count() == 1:
            self.intake = Intake(self.outliers, self.sums is not None) if on_accelerator(self.state) else None
        self._use_pilot()
        #: The last rows, to fill up a batch that is too small for a step.
        self._before: Tree = None
        #: Rows in the first batch.
        self._usual = 0 if problem.noiseless else views.n_rows(first)

    @property
    def failed(self) -> bool:
        return bool(self.state.failed)

    def take(self, batch: Tree, start: int, total: int) -> int:
        if self.problem.noiseless:
            run, batch, count = _steps_without_data, total, total
        else:
            batch = self._prepared(batch, start, total)
            if batch is None:
                return 0
            run, count = _step, 1
        self.state, self.info = self.placement.run(run, self.solver, self.problem, self.state, batch)
        return count

    def _prepared(self, batch: Tree, start: int, total: int) -> Tree | None:
        """A checked batch on the device; None while there are too few rows for a step.

        A batch that is too small, as the last of a stream may be, is filled up with the last rows before it.
        """
        if self.intake is not None and is_dense(batch) and views.n_rows(batch) == self._usual >= self.fewest_rows:
            self._before = batch if isinstance(batch, Picked) else host_batches.last(batch, self.fewest_rows)
            rows = self.placement.batch(host_batches.join(self.converted(batch)))
            if not isinstance(batch, Picked):
                # The stream may reuse its memory.
                jax.block_until_ready(rows)
            return self._taken_in(rows, [self._usual])
        batch = _fetched(batch)
        check_finite(batch)
        self._summarise(self._near(batch), total)
        if total == views.n_rows(batch):
            batch = self._filled_up(batch)
            total = views.n_rows(batch)
        if total < self.fewest_rows:
            return None
        near = self._near(batch)
        near = self._padded(near) if total == views.n_rows(near) else near
        batch = self.placement.batch(near, start, total)
        jax.block_until_ready(batch)
        return batch

    def _padded(self, batch: Tree) -> Tree:
        """Pad a batch of another size than the first to that size or a power of two, so that few programs compile."""
        b = views.n_rows(batch)
        parts = self.solver.parts(self.problem)
        if b == self._usual or parts is None or not all(isinstance(x, np.ndarray) for x in views.leaves(batch)):
            return batch
        wanted = self._usual if b < self._usual else 1 << (b - 1).bit_length()
        return host_batches.filled(batch, parts, -(-wanted // parts) * parts)

    def _summarise(self, near: Tree, total: int) -> None:
        """Add rows to the summary, in one of the processes that hold them."""
        mine = self.placement.is_first_with_its_rows if views.n_rows(near) < total else distributed.is_first()
        if self.sums is not None and mine:
            rows, labels = self.problem.split(near)
            self.sums = self.sums.add(host_batches.parts(rows), labels)

    def _use_pilot(self) -> None:
        # JAX would round float64 rows before the pilot is subtracted, so the host subtracts it.
        self._wide = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(self.pilot))
        self._point = None if self._wide else jax.tree.map(jnp.asarray, self.pilot)

    @property
    def examines_on_device(self) -> bool:
        # A batch of another size than the first is padded on the host, which would subtract the pilot twice.
        return self.intake is not None and not self._wide

    def converted(self, batch: Tree) -> Tree:
        return self._near(batch) if self._wide else batch

    def _taken_in(self, rows: Tree, sizes: list[int], start: int = 0) -> Tree:
        """Device rows, examined: those from ``start`` on of batches with these sizes."""
        assert self.intake is not None
        rows = self.intake.add(rows, self._point, sizes, start)
        self._settle(UNDER_WAY)
        return rows

    def _settle(self, left: int = 0) -> None:
        """Read what the device found in rows; raises if they are not finite."""
        for moments in self.intake.settled(left) if self.intake is not None else ():
            assert self.sums is not None
            self.sums = self.sums.merged(moments)

    def _near(self, batch: Tree) -> Tree:
        """The rows less the pilot."""
        return batch if self.pilot is None else self.problem.less_pilot(batch, self.pilot)

    def _filled_up(self, batch: Tree) -> Tree:
        if views.n_rows(batch) < self.fewest_rows and self._before is not None:
            batch = host_batches.join(host_batches.last(_fetched(self._before), self.fewest_rows), batch)
        self._before = host_batches.last(batch, self.fewest_rows)
        return batch

    def revisit(self, batch: Tree) -> None:
        self._filled_up(_fetched(batch))

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**vars(self), "state": on_host(self.state), "_before": _fetched(self._before)}

    def snapshot_due(self, steps: int) -> bool:
        return self.problem.noiseless or super().snapshot_due(steps)

    def snapshot(self) -> dict[str, Any]:
        if self.info is None:
            return {}
        self._settle()
        worst = float(np.max(np.asarray(self.info.residuals)))
        return {"eigenvalues": self.sign * np.asarray(self.info.eigenvalues), "residual": worst}

    def next_pass(self, epoch: int, max_epochs: int | None) -> bool:
        self._before = None
        return epoch + 1 < (max_epochs or 1) and not self.problem.noiseless

    def _summary(self) -> Summary | None:
        """The summary of the rows of all processes, less the pilot."""
        if self.sums is None:
            return None
        return Summary.of(reduce(Moments.merged, distributed.gather_all(self.sums)), self.template)

    def _kept_state(self) -> Any:
        return for_checkpoint(self.state), on_host(self.info), self.pilot, self._summary()

    def saveable(self) -> list[Any] | None:
        if self.info is None:
            return None
        self._settle()
        return jax.tree.leaves(self._kept_state())

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        blank = Info(jnp.zeros(self._k), jnp.zeros(self._k))
        template = (on_host(self.state), self.info or blank, self.pilot, self._summary())
        fresh, structure = jax.tree.flatten(template)
        leaves = [like_fresh(x, arrays.get(i)) for i, x in enumerate(fresh)]
        state, info, self.pilot, summary = jax.tree.unflatten(structure, leaves)
        self._use_pilot()
        # The saved sums are of all processes: only the first continues from them.
        if summary is not None and distributed.is_first():
            self.sums = summary.moments()
        state, self.info = jax.tree.map(jnp.asarray, (state, info))
        self.state = self.placement.state(state, self.template)

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self._settle()
        check_enough_rows(n_rows if self.info is not None else -1, self.fewest_rows, self.problem, self._asked)
        lam, V = self.solver.eigenpairs(self.problem, on_host(self.state))
        residuals = np.asarray(self.info.residuals)
        noise = "" if self.problem.noiseless else " on the last batch, sampling noise included"
        message = f"stopped after {source}, with a residual of {residuals.max():.2g}{noise}"
        status = Status.NOT_CONVERGED
        if stop is not None:
            status, message = stop
        if self.failed:
            status = Status.FAILED
            message = (
                f"a step near number {int(self.state.step)} was not finite; this is the last finite state: lower "
                "learning_rate, or look for NaN in the data"
            )
        elif residuals.max() > FAR and self.sign > 0:
            message += (
                "; a residual near 1 means that these are no eigenvectors: lower learning_rate, standardise features, "
                "or use Adam"
            )
        converged, state = status is Status.CONVERGED, on_host(self.state)
        return Ending(self.sign * np.asarray(lam), V, residuals, converged, status, message, state, n_rows)

    def summary(self) -> Summary | None:
        self._settle()
        summary = self._summary()
        return None if summary is None else summary.less(self.pilot)


def _fetched(batch: Tree) -> Tree:
    """A batch with its rows on the host, if they are on their way to the device."""
    return jax.tree.map(np.asarray, pick(batch)) if isinstance(batch, Picked) else batch

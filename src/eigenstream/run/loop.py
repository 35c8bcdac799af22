"""The loop that every solver runs in: batches in, a `Result` out."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from eigenstream import distributed
from eigenstream.core import host_batches, players, views
from eigenstream.core.precision import check_precision
from eigenstream.core.ritz import WHICH
from eigenstream.core.settings import check_count
from eigenstream.core.transfer import Picked
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import check_k, view_sizes
from eigenstream.run.checkpoint import Checkpointer, RunFolder
from eigenstream.run.engine import SNAPSHOT_EVERY, Engine, Setup, Stop
from eigenstream.run.exact_engine import ExactEngine
from eigenstream.run.game_engine import GameEngine
from eigenstream.run.placement import Placement, make_mesh
from eigenstream.run.progress import Bar, Interrupts, StopRules
from eigenstream.run.result import Result, Status
from eigenstream.run.stepping_engine import SteppingEngine
from eigenstream.solvers.choice import chosen
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.game import Game
from eigenstream.streams.epochs import Epochs

Callback = Callable[[dict[str, Any]], Any]

log = logging.getLogger("eigenstream")

#: The last rows of a stream that an estimator keeps, and the most numbers in them.
RECENT_ROWS, RECENT_NUMBERS = 4096, 2**25
#: Batches between two agreements of several processes on whether to save or to stop.
AGREE = 10
#: The numbers of a run that a checkpoint holds.
COUNTERS = ("n", "steps", "batches", "epoch", "taken", "seconds", "averaged")
#: What a reader gives in place of a batch at the end of a stream.
END = object()


#: The engine of each kind of solver; all others take a step with every batch.
ENGINES: dict[type, Callable[[Setup], Engine]] = {Exact: ExactEngine, Game: GameEngine}


def start_engine(setup: Setup) -> Engine:
    """Start the engine of the solver."""
    return next((ENGINES[kind] for kind in type(setup.solver).__mro__ if kind in ENGINES), SteppingEngine)(setup)


class Run:
    """A solver under way. `eigenstream.solve` makes one; an estimator keeps one for `partial_fit`."""

    engine: Engine

    def __init__(
        self,
        problem: Problem,
        k: int | None,
        solver: Any = "auto",
        *,
        which: str = "largest",
        memory_budget: float | None = None,
        half_life: float | None = None,
        random_state: int = 0,
        precision: str | None = None,
        mesh: Any = None,
        for_estimator: bool = False,
        single_view: bool = False,
    ):
        if not isinstance(problem, Problem):
            raise ValueError(f"problem={problem!r}: give a problem, for instance es.problems.pca(), called")
        if isinstance(solver, type):
            raise ValueError(f"solver is the class {solver.__name__}: give an object, {solver.__name__}(...)")
        if which not in WHICH:
            raise ValueError(f"which={which!r}: give one of {', '.join(map(repr, WHICH))}")
        check_count("k", k, none="for all there are")
        if not isinstance(random_state, int | np.integer):
            raise ValueError(f"random_state={random_state!r}: give a whole number, the seed")
        check_precision(precision)
        self.placement = Placement(make_mesh(mesh), precision)
        self.problem, self.k, self.which = problem, None if k is None else int(k), which
        self.solver, self.budget, self.seed, self.half_life = solver, memory_budget, int(random_state), half_life
        #: An estimator also needs the rows' means and the last rows of a stream that cannot be read again.
        self.for_estimator, self.single_view = for_estimator, single_view
        self.begun = False
        self.recent: list[Tree] = []
        self.history: list[dict[str, Any]] = []
        self.n = self.steps = self.batches = self.epoch = self.taken = 0
        self.seconds = 0.0
        self.averaged: float | None = None
        self.stop: Stop | None = None

    def begin(self, batch: Tree, repeatable: bool = False, keep_rows: bool = False, rereads: bool = False) -> None:
        """Choose the solver and start its engine, for batches like this one."""
        template = self.problem.template(batch)
        check_k(self.k, self.problem.most_components(view_sizes(template)))
        if self.single_view and isinstance(template, tuple | list) and len(template) > 1:
            raise ValueError(f"a batch holds {len(template)} arrays, and this estimator takes one: give X alone")
        self.solver, self.reason = chosen(
            self.solver,
            self.problem,
            view_sizes(template),
            self.k,
            self.which,
            self.budget,
            self.half_life,
            self.placement.feature_shards(batch),
        )
        options = self.which, repeatable, self.seed, self.for_estimator, self.placement, self.budget, keep_rows, rereads
        setup = Setup(self.problem, self.solver, self.k, batch, *options)
        self.template = template
        self.engine = start_engine(setup)
        self.begun = True
        self._kept_rows = 0
        if self.for_estimator and not repeatable:
            self.keep_recent()

    def reopen(self) -> None:
        """Continue a finished run with new rows."""
        self.stop, self.averaged = None, None
        self.engine.reopen()
        self.keep_recent()

    def keep_recent(self) -> None:
        """Keep the last rows from now on, to measure what a streaming solver does not sum."""
        if not self.engine.sums_rows:
            self._kept_rows = max(64, min(RECENT_ROWS, RECENT_NUMBERS // players.size(self.template)))

    def take(self, raw: Tree) -> None:
        """Learn from one batch; on given matrices, take this many steps."""
        if self.problem.noiseless:
            self.steps += self.engine.take(None, 0, raw)
            return
        if isinstance(raw, Picked):
            self.steps += self.engine.take(raw, 0, views.n_rows(raw))
            self.n, self.batches = self.n + views.n_rows(raw), self.batches + 1
            return
        rows, start, total = raw if isinstance(raw, host_batches.Part) else (raw, 0, None)
        batch = self.problem.accept(rows)
        total = views.n_rows(batch) if total is None else total
        if not self.begun:
            self.begin(batch)
        self._check_shape(batch)
        self.steps += self.engine.take(batch, start, total)
        self.n, self.batches = self.n + total, self.batches + 1
        self._keep(batch)

    def _check_shape(self, batch: Tree) -> None:
        first, now = (jax.tree.map(lambda leaf: leaf.shape, t) for t in (self.template, self.problem.template(batch)))
        if first != now:
            raise ValueError(f"the stream changed shape: its first rows were of shape {first}, these are of {now}")

    def _keep(self, batch: Tree) -> None:
        if self._kept_rows:
            # A copy, because a stream may reuse its memory.
            self.recent.append(host_batches.last(batch, self._kept_rows))
            while sum(map(views.n_rows, self.recent[1:])) >= self._kept_rows:
                del self.recent[0]

    def snapshot(self) -> dict[str, Any]:
        """Append the state of the run to the history."""
        position = {"step": self.steps, "epoch": self.epoch, "rows": self.n, "seconds": round(self.seconds, 3)}
        record = {**position, **self.engine.snapshot()}
        self.history.append(record)
        return record

    def result(self, tol: float | None = None) -> Result:
        """The eigenpairs so far."""
        if not self.begun:
            raise ValueError("batches is empty: give at least one batch")
        source = f"{self.n} rows in {self.batches} batch{'es' * (self.batches != 1)}"
        if self.problem.noiseless:
            source = f"{self.steps} steps on the matrices"
        ending = self.engine.finish(self.n, source, self.stop)
        if tol is not None and ending.status is Status.NOT_CONVERGED and self.engine.criterion:
            ending = ending._replace(message=f"{ending.message} (tol={tol:g} was not reached)")
        own: dict[str, Any] = {"n_iter": self.steps, "solver": self.solver, "history": self.history}
        return Result(**ending._asdict(), **own, summary=self.engine.summary())

    def through(
        self,
        batches: Iterable[Tree] | None,
        max_epochs: int | None = 1,
        *,
        max_steps: int | None = None,
        tol: float | None = None,
        verbose: bool = False,
        callbacks: Iterable[Callback] = (),
        folder: RunFolder | None = None,
    ) -> Result:
        """Read a stream to its end, or until there is a reason to stop, and give the result."""
        with distributed.report_lost_first():
            check_count("max_steps", max_steps, none="for no limit")
            check_count("max_epochs", max_epochs, none="for as many as needed")
            stream = Epochs(self.problem, batches, max_steps, SNAPSHOT_EVERY)
            callbacks = tuple(callbacks)
            self.begin(self.problem.accept(stream.head()), stream.repeatable, True, stream.rereads)
            if self.engine.sums_rows:
                self.engine.rows_stay = stream.in_large_batches(self.engine.block_rows)
                if self.engine.share is not None:
                    stream.shared(self.engine.share)
                max_steps, max_epochs, tol = None, 1, None
            else:
                self._check_stepping(stream, max_epochs, tol)
                if self.engine.examines_on_device:
                    stream.send(lambda rows: self.engine.converted(self.problem.accept(rows)))
            log.info("solver: %r (%s)", self.solver, self.reason)
            if self.engine.sums_rows and self.problem.noiseless:
                return self.result()
            checkpointer = Checkpointer(self, folder)
            rules = StopRules(callbacks, tol, max_steps, checkpointer, time.monotonic() - self.seconds)
            shown = verbose and distributed.is_first()
            try:
                with (
                    Bar(shown, stream.length(max_epochs or 1, max_steps)) as bar,
                    Interrupts(distributed.count() == 1) as interrupts,
                ):
                    while self._read_epoch(stream, interrupts, bar, rules):
                        more = self.engine.next_pass(self.epoch, max_epochs)
                        if not self.engine.sums_rows and self.engine.snapshot_due(self.steps):
                            record = self.snapshot()
                            rules.checkpointer.write(record)
                            self._apply_stop_rules(record, rules)
                        if not more or self.stop is not None:
                            break
                        self.epoch, self.taken = self.epoch + 1, 0
                if interrupts.asked and self.stop is None:
                    # The checkpoint is that of a run to be resumed, so it is written before the stop is noted.
                    checkpointer.save()
                    self.stop = Stop(Status.INTERRUPTED, f"interrupted after {self.n} rows: this is their result")
                    warnings.warn(self.stop.message, stacklevel=3)
            finally:
                checkpointer.close()
            return self.result(tol)

    def _check_stepping(self, stream: Epochs, max_epochs: int | None, tol: float | None) -> None:
        if tol is not None and not self.engine.criterion:
            raise ValueError(f"tol: {type(self.solver).__name__} has no residual; give max_epochs or max_steps")
        if (max_epochs or 1) > 1 and not stream.repeatable:
            raise ValueError(f"max_epochs={max_epochs} but batches can be read once only: give a list or a re-iterable")
        if self.placement.shares_rows:
            stream.shared(self.placement.share)

    def _read_epoch(self, stream: Epochs, interrupts: Interrupts, bar: Bar, rules: StopRules) -> bool:
        """Read one epoch, or what is left of it; whether its end was reached."""
        before, resumed = self.n, self.taken
        batches: Iterator[Tree] = stream.epoch(self.epoch, self.taken, self._revisit, self.engine.fewest_rows)
        while self.stop is None and self.steps != rules.max_steps:
            steps = self.steps
            raw = interrupts.next(batches, END)
            if raw is END:
                break
            self.take(raw)
            # A batch may fill most of the memory: it is freed before the next is read.
            del raw
            self.taken += 1
            self.seconds = time.monotonic() - rules.started
            record = None
            if self.steps > steps and self.engine.snapshot_due(self.steps):
                record = self.snapshot()
                rules.checkpointer.write(record)
                self._apply_stop_rules(record, rules)
            bar.show(self.steps, self.n, self.seconds, record)
            if self.taken % AGREE == 0 or distributed.count() == 1:
                interrupts.asked, due = distributed.agreed(interrupts.heard, rules.checkpointer.is_due())
                if due:
                    rules.checkpointer.save()
        if self.stop is not None or interrupts.asked or self.steps == rules.max_steps:
            return False
        if self.n == before and not resumed and not self.problem.noiseless:
            raise ValueError("batches gave nothing when read again: give a list, or another iterable that starts anew")
        return True

    def _revisit(self, raw: Tree) -> None:
        """Show the engine a batch that was learned from before a checkpoint."""
        if isinstance(raw, Picked):
            self.engine.revisit(raw)
        elif not isinstance(raw, host_batches.Part):
            batch = self.problem.accept(raw)
            self.engine.revisit(batch)
            self._keep(batch)

    def _apply_stop_rules(self, record: dict[str, Any], rules: StopRules) -> None:
        """Stop after a failed step, below ``tol``, or when a callback asks for it."""
        value = record.get(self.engine.criterion)
        if self.engine.failed:
            self.stop = Stop(Status.FAILED, "a step was not finite")
        elif value is not None:
            self.averaged = value if self.averaged is None else self.averaged + 0.5 * (value - self.averaged)
            if rules.tol is not None and self.averaged < rules.tol:
                message = f"the {self.engine.criterion} is below tol={rules.tol:g} after {self.steps} steps"
                self.stop = Stop(Status.CONVERGED, message)
        answers = [callback(record) for callback in rules.callbacks]
        (asked,) = distributed.agreed(True in answers)
        if asked and self.stop is None:
            self.stop = Stop(Status.STOPPED, f"stopped by a callback after {self.n} rows")

    def values(self) -> dict[str, Any]:
        """What a checkpoint holds beside the solver's arrays."""
        stop = self.stop and list(self.stop)
        return {**{name: getattr(self, name) for name in COUNTERS}, "stop": stop, "records": len(self.history)}

    def restore(self, arrays: dict[int, np.ndarray], values: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Continue from a checkpoint."""
        for name in COUNTERS:
            # Checkpoints of version 0.1 count steps alone.
            setattr(self, name, values.get(name, values["steps"]))
        if values.get("stop") is not None:
            status, message = values["stop"]
            self.stop = Stop(Status(status), message)
        self.history = [
            {key: np.array(value) if key in ("eigenvalues", "heldout") else value for key, value in record.items()}
            for record in history
        ]
        self.engine.restore(arrays, self.epoch)

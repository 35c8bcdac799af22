"""The one loop: batches in, a `Result` out."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from eigenstream import distributed, host, rows, trees
from eigenstream.checkpoint import Keeper, Place
from eigenstream.eigenpairs import WHICH
from eigenstream.engines import LOOK_EVERY, Playing, Solving
from eigenstream.gathering import Gathering
from eigenstream.placement import Placement, make_mesh
from eigenstream.precision import check_precision
from eigenstream.problems.base import Problem, view_sizes
from eigenstream.progress import Bar, Interrupts, Watch
from eigenstream.result import Result
from eigenstream.solvers.accelerated import Game
from eigenstream.solvers.choice import chosen
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.rsg import RSGPlus
from eigenstream.streams.epochs import Epochs

Tree = Any
Callback = Callable[[dict[str, Any]], Any]

log = logging.getLogger("eigenstream")

#: The last rows of a stream that are kept for those who ask, and the most numbers in them.
RECENT_ROWS, RECENT_NUMBERS = 4096, 2**25
#: Batches after which several processes agree on whether to save or to stop.
AGREE = 10
#: What a reader gives in place of a batch when there is none.
END = object()


class Run:
    """A solver under way, fed batch by batch. `eigenstream.solve` makes one; an estimator keeps one."""

    def __init__(
        self,
        problem: Problem,
        k: int | None,
        solver: Any = "auto",
        *,
        which: str = "largest",
        memory_budget: float = 4e9,
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
        if k is not None and not (isinstance(k, int | np.integer) and k >= 1):
            raise ValueError(f"k={k!r}: give a whole number of at least 1, or None for all there are")
        if not isinstance(random_state, int | np.integer):
            raise ValueError(f"random_state={random_state!r}: give a whole number, the seed")
        check_precision(precision)
        self.place = Placement(make_mesh(mesh), precision)
        self.problem, self.k, self.which = problem, None if k is None else int(k), which
        self.solver, self.budget, self.seed, self.half_life = solver, memory_budget, int(random_state), half_life
        #: An estimator also needs the rows' means and, of a stream that cannot be read again, its last rows.
        self.for_estimator, self.single_view = for_estimator, single_view
        self.engine: Any = None
        self.recent: list[Tree] = []
        self.history: list[dict[str, Any]] = []
        self.n = self.steps = self.epoch = self.taken = 0
        self.seconds = 0.0
        self.averaged: float | None = None
        self.stopped, self.converged = "", False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mesh": None}

    def begin(self, batch: Tree, repeatable: bool = False) -> None:
        """Choose the solver and make its first state, for batches like this one."""
        template = self.problem.template(batch)
        most = self.problem.most_components(view_sizes(template))
        if self.k is not None and self.k > most:
            raise ValueError(
                f"k={self.k} is too large: this problem has at most {most} components; give k (n_components) of at "
                f"most {most}"
            )
        if self.single_view and isinstance(template, tuple | list) and len(template) > 1:
            raise ValueError(f"a batch holds {len(template)} arrays, and this estimator takes one: give X alone")
        self.solver, self.reason = chosen(
            self.solver, self.problem, view_sizes(template), self.k, self.which, self.budget, self.half_life
        )
        self.template = template
        self._kept_rows = 0
        if self.for_estimator and not repeatable:
            self.keep_recent()
        if isinstance(self.solver, Exact):
            self.engine = Solving(self.problem, self.solver, self.k, self.which, batch, repeatable)
        else:
            kind = Gathering if isinstance(self.solver, Game) else Playing
            more = self.seed, self.for_estimator, self.place
            self.engine = kind(self.problem, self.solver, self.k, self.which, batch, *more)

    def go_on(self) -> None:
        """Take up a run that had come to its end, with batches that are read once."""
        self.stopped, self.converged, self.averaged = "", False, None
        self.engine.go_on()
        self.keep_recent()

    def keep_recent(self) -> None:
        """Keep the last rows of a streaming solver's from now on."""
        if not isinstance(self.solver, Exact):
            self._kept_rows = max(64, min(RECENT_ROWS, RECENT_NUMBERS // trees.size(self.template)))

    def prepare(self, raw: Tree) -> Tree | None:
        """Check a batch and bring it to where `step` wants it; None if it has to wait for more rows."""
        if self.problem.noiseless:
            return raw
        raw, start, total = raw if isinstance(raw, host.Part) else (raw, 0, None)
        batch = self.problem.accept(raw)
        if self.engine is None:
            self.begin(batch)
        self._check_shape(batch)
        ready = self.engine.prepare(batch, start, total)
        # Only what was not refused counts.
        self.n += rows.n_rows(batch) if total is None else total
        self._keep(batch)
        return ready

    def step(self, batch: Tree | None) -> None:
        if batch is not None:
            self.steps += batch if self.problem.noiseless else 1
            self.engine.step(batch)

    def take(self, raw: Tree) -> None:
        """Learn from one batch."""
        self.step(self.prepare(raw))

    def _check_shape(self, batch: Tree) -> None:
        first, now = (jax.tree.map(lambda leaf: leaf.shape, t) for t in (self.template, self.problem.template(batch)))
        if first != now:
            raise ValueError(f"the stream changed shape: its first rows were of shape {first}, these are of {now}")

    def _keep(self, batch: Tree) -> None:
        if self._kept_rows:
            # A copy: a stream may use its memory again.
            self.recent.append(host.last(batch, self._kept_rows))
            while sum(map(rows.n_rows, self.recent[1:])) >= self._kept_rows:
                del self.recent[0]

    def look(self) -> dict[str, Any]:
        """What is known so far, appended to the history."""
        place = {"step": self.steps, "epoch": self.epoch, "rows": self.n, "seconds": round(self.seconds, 3)}
        record = {**place, **self.engine.look()}
        self.history.append(record)
        return record

    def result(self) -> Result:
        """The eigenpairs so far."""
        if self.engine is None:
            raise ValueError("batches is empty: give at least one batch")
        n = self.engine.rows(self.n)
        least, k = self.engine.fewest_rows(), self.k or 1
        if n < least or not self.engine.has_begun():
            raise ValueError(f"the stream held too few rows: at least {least} are needed")
        if self.problem.rank_of_rows and n < k:
            raise ValueError(f"the stream held {n} rows, fewer than k={k}: give more rows, or a smaller k")
        stopped = self.stopped or self._how_far()
        lam, V, rest, converged, message = self.engine.end(n, stopped)
        state, summary = self.engine.settled, self.engine.summary()
        converged = converged or self.converged
        looks, heldout = self.history, self.engine.heldout
        return Result(lam, V, converged, message, rest, self.steps, n, self.solver, looks, state, summary, *heldout)

    def _how_far(self) -> str:
        on_matrices = self.problem.noiseless
        return self.engine.how_far(
            f"{self.steps} steps on the matrices" if on_matrices else f"{self.n} rows in {self.steps} batches"
        )

    # The loop.

    @distributed.waiting_for_the_others
    def through(
        self,
        batches: Iterable[Tree] | None,
        max_epochs: int = 1,
        *,
        max_steps: int | None = None,
        tol: float | None = None,
        verbose: bool = False,
        callbacks: Iterable[Callback] = (),
        place: Place | None = None,
    ) -> Result:
        """Read a stream to its end, or until there is a reason to stop, and give the result."""
        if max_steps is not None and not (isinstance(max_steps, int | np.integer) and max_steps >= 1):
            raise ValueError(f"max_steps={max_steps!r}: give a whole number of at least 1, or None")
        if not (isinstance(max_epochs, int | np.integer) and max_epochs >= 1):
            raise ValueError(f"max_epochs={max_epochs!r}: give a whole number of at least 1")
        stream = Epochs(self.problem, batches, max_steps, LOOK_EVERY)
        self.begin(self.problem.accept(stream.head()), stream.repeatable)
        if tol is not None and isinstance(self.solver, RSGPlus):
            raise ValueError("tol: RSGPlus has no residual to stop on; give max_epochs or max_steps")
        exact = isinstance(self.engine, Solving)
        if exact:
            stream.in_large_batches()
            max_steps = None
        elif max_epochs > 1 and not stream.repeatable:
            raise ValueError(
                f"max_epochs={max_epochs}, but batches can be read once only: give a list or a re-iterable"
            )
        if not exact and self.place.shares_rows:
            stream.shared(self.place.share)
        log.info("solver: %r (%s)", self.solver, self.reason)
        if exact and self.problem.noiseless:
            return self.result()
        keeper = Keeper(self, place)
        watch = Watch(tuple(callbacks), tol, max_steps, keeper, time.monotonic() - self.seconds)
        alone = distributed.count() == 1
        try:
            with (
                Bar(verbose and distributed.is_first(), stream.length(1 if exact else max_epochs, max_steps)) as bar,
                Interrupts(alone) as interrupts,
            ):
                while True:
                    before, resumed = self.n, self.taken
                    epoch = stream.epoch(self.epoch, self.taken, self._revisit, self.engine.fewest_rows())
                    self._read(epoch, interrupts, bar, watch)
                    if self.stopped or interrupts.asked or self.steps == max_steps:
                        break
                    if self.n == before and not resumed and not self.problem.noiseless:
                        raise ValueError(
                            "batches gave nothing when read again: give a list, or another iterable that starts anew"
                        )
                    if not self.engine.next_pass(self.epoch, max_epochs):
                        break
                    self.epoch, self.taken = self.epoch + 1, 0
            if interrupts.asked and not self.stopped:
                # Saved as a run that is to go on.
                keeper.save()
                self.stopped = f"interrupted after {self.n} rows: this is what was learned from them"
                warnings.warn(self.stopped, stacklevel=3)
        finally:
            keeper.close()
        solved = self.engine.keeps_all
        if solved and self.engine.has_begun():
            # Rows that were kept to the end were not looked at on the way.
            self.engine.settle()
            self.look()
        if not self.stopped and tol is not None and not exact and not solved and self.engine.has_begun():
            self.stopped = f"{self._how_far()} (tol={tol:g} was not reached)"
        return self.result()

    def _read(self, iterator: Iterator[Tree], interrupts: Interrupts, bar: Bar, watch: Watch) -> None:
        """One epoch, or what is left of it."""
        while not self.stopped:
            if self.steps == watch.max_steps:
                return
            # Not bound to a name: a batch may be most of what fits in memory, and goes before the next is read.
            batch = self._prepared(interrupts.next(iterator, END))
            if batch is END:
                return
            self.taken += 1
            self.step(batch)
            waiting, batch = batch is None, None
            self.seconds = time.monotonic() - watch.started
            record = None
            if not waiting and self.engine.worth_a_look(self.steps):
                record = self.look()
                watch.keeper.write(record)
                self._judge(record, watch)
            bar.show(self.steps, self.n, self.seconds, record)
            if self.taken % AGREE == 0 or distributed.count() == 1:
                interrupts.asked, due = distributed.agreed(interrupts.heard, watch.keeper.is_due())
                if due:
                    watch.keeper.save()

    def _prepared(self, raw: Tree) -> Tree | None:
        return END if raw is END else self.prepare(raw)

    def _revisit(self, raw: Tree) -> None:
        """A batch that was learned from before a checkpoint."""
        if not isinstance(raw, host.Part):
            batch = self.problem.accept(raw)
            self.engine.remember(batch)
            self._keep(batch)

    def _judge(self, record: dict[str, Any], watch: Watch) -> None:
        """Whether this look is the last."""
        if self.engine.failed:
            self.stopped = "a step was not finite"
        elif "residual" in record:
            worst = record["residual"]
            self.averaged = worst if self.averaged is None else self.averaged + 0.5 * (worst - self.averaged)
            if watch.tol is not None and self.averaged < watch.tol:
                self.converged = True
                what = "the estimated shortfall" if isinstance(self.engine, Gathering) else "every residual"
                self.stopped = f"{what} is below tol={watch.tol:g} after {self.steps} steps"
        answers = [callback(record) for callback in watch.callbacks]
        (asked,) = distributed.agreed(True in answers)
        if asked and not self.stopped:
            self.stopped = f"stopped by a callback after {self.n} rows"

    # What a checkpoint holds beside the solver's arrays.

    def values(self) -> dict[str, Any]:
        names = ("n", "steps", "epoch", "taken", "seconds", "averaged", "stopped", "converged")
        return {name: getattr(self, name) for name in names}

    def restore(self, arrays: dict[int, np.ndarray], values: dict[str, Any], history: list[dict[str, Any]]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.history = [
            {key: np.array(value) if key in ("eigenvalues", "heldout") else value for key, value in record.items()}
            for record in history
        ]
        self.engine.restore(arrays, self.epoch)

"""The accelerated game under way: batches joined to blocks, moves, and passes until done."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.memory import free_bytes
from eigenstream.core.transfer import Picked
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.run.engine import Ending, Setup, Stop, check_enough_rows
from eigenstream.run.intake import is_dense
from eigenstream.run.placement import n_rows, on_host, placed
from eigenstream.run.result import Status
from eigenstream.run.stepping_engine import SteppingEngine
from eigenstream.solvers.game import Game
from eigenstream.solvers.game.verdict import SOLVED, verdict

#: Rows that are multiplied at once: fewer leave a processor, or an accelerator, idle.
BLOCK, DEVICE_BLOCK = 512, 8192
#: Block sizes that are compiled as they come; others are cut into powers of two.
FEW = 4
#: The most numbers in a block, and in one on an accelerator.
NUMBERS, DEVICE_NUMBERS = 2**23, 2**30
#: The most passes over rows that fit in memory, and over others until they converge.
PASSES_IN_MEMORY, PASSES = 100, 10
#: Moves that gain less than NOTHING, STALLED of them in a row, end passes over rows in memory.
NOTHING, STALLED = 1e-7, 4


def _applied(method: str, solver: Game, problem: Problem, state: Any, *more: Any) -> Any:
    return placed(getattr(Game, method))(solver, problem, state, *more)


_next_state = jax.jit(_applied, static_argnums=(0, 1), donate_argnums=3)
_measured = jax.jit(_applied, static_argnums=(0, 1))


class GameEngine(SteppingEngine):
    """The accelerated game. Borders between batches mean nothing to it, so small batches are joined."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self.criterion = "residual" if self.problem.noiseless else "shortfall"
        self._width = players.size(self.template)
        #: Rows in the queue, and rows that are still to be examined on the device.
        self._queue: list[Tree] = []
        self._raw: list[Tree] = []
        self._sizes: set[int] = set()
        #: Whether the stream gives its batches on the device.
        self._given = False
        #: Rows until the players move next, and whether they moved since the last snapshot.
        self._left, self._moved = float(self.state.rows_to_next_move), False
        #: Bytes for rows, and those of the rows of the first pass.
        self._room = 0.0
        if not (self.problem.noiseless or self.solver.half_life):
            self._room = free_bytes() / 2 if setup.memory_budget is None else setup.memory_budget
        self._bytes = 0
        #: The blocks of a stream that fits and would have to be copied to be read again; else None.
        self._kept: list[Tree] | None = None
        self._rereads = setup.rereads and self.intake is None
        if setup.keep_rows and not self._rereads:
            self._kept = []

    def take(self, batch: Tree, start: int, total: int) -> int:
        if self.problem.noiseless:
            return super().take(batch, start, total)
        blocks = self._joined(batch, start, total)
        for block in blocks or ():
            self._learn(block)
        return int(blocks is not None)

    def _joined(self, batch: Tree, start: int, total: int) -> list[Tree] | None:
        """The queued rows in blocks, once they are worth a product or enough for a move; None until then."""
        self._given = _on_device(batch)
        if self.intake is not None and is_dense(batch):
            kept = self._given or isinstance(batch, Picked)
            self._raw.append(batch if kept else host_batches.owned(self.converted(batch), batch))
            return self._when_enough(batch)
        self._examine()
        near = self._near(batch)
        rows, labels = self.problem.split(near)
        tame = self.outliers.tame(rows, start, total)
        self._summarise(near, total)
        near = self.problem.join(tame, labels)
        if total > views.n_rows(near):
            # With several processes batches are not joined: their local parts would have unequal sizes.
            return [self.placement.batch(near, start, total)] if total >= self.fewest_rows else None
        self._queue.append(near if self._given else host_batches.owned(near, batch))
        return self._when_enough(near)

    def _when_enough(self, near: Tree) -> list[Tree] | None:
        # A power of two of batches, so that a stream of equal batches compiles few programs.
        rows, numbers = (BLOCK, NUMBERS) if self.intake is None else (DEVICE_BLOCK, DEVICE_NUMBERS)
        wanted = max(1, int(min(self._left, rows, numbers / self._width)) // views.n_rows(near)).bit_length()
        enough = len(self._queue) + len(self._raw) >= 1 << (wanted - 1) or self._given
        return self._dequeued() if enough and self._queued() >= self.fewest_rows else None

    @property
    def examines_on_device(self) -> bool:
        return self.intake is not None

    def _queued(self) -> int:
        return sum(map(views.n_rows, self._queue + self._raw))

    def _dequeued(self) -> list[Tree]:
        """The queued rows in blocks of few sizes: each size compiles a program."""
        if self._queue:
            self._examine()
        raw = [views.n_rows(batch) for batch in self._raw]
        taken, self._queue, self._raw = host_batches.join(*self._queue, *self._raw), [], []
        b = views.n_rows(taken)
        if len(self._sizes) < FEW or self._given:
            self._sizes.add(b)
        sizes = [b] if b in self._sizes else host_batches.in_powers_of_two(b, self.fewest_rows)
        # A slice of all rows on a device would copy them.
        parts = [taken] if len(sizes) == 1 else host_batches.cut(taken, sizes)
        blocks = [self.placement.batch(part, for_good=True) for part in parts]
        if raw:
            starts = itertools.accumulate(sizes, initial=0)
            return [self._taken_in(block, raw, start) for block, start in zip(blocks, starts, strict=False)]
        jax.block_until_ready(blocks)
        return blocks

    def _examine(self) -> None:
        """Examine the rows that wait for it, without learning from them."""
        if self._raw:
            sizes, rows = [views.n_rows(batch) for batch in self._raw], host_batches.join(*self._raw)
            self._raw = []
            rows = self._taken_in(self.placement.batch(rows, for_good=True), sizes)
            # As many batches as before, since blocks are counted in batches.
            self._queue.extend(host_batches.cut(rows, sizes))

    def _apply(self, method: str, state: Any, *more: Any) -> Any:
        run = _next_state if method in ("gather", "move") else _measured
        return self.placement.run(run, method, self.solver, self.problem, state, *more)

    def _learn(self, block: Tree) -> None:
        if not self.state.exact:
            self._bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(block))
            if self._kept is not None:
                self._kept = [*self._kept, block] if self._bytes <= self._room else None
        self.state = self._apply("gather", self.state, block)
        self._left -= n_rows(block)
        if self._left <= 0:
            self._move()

    def _move(self) -> None:
        self.state = self._apply("move", self.state)
        self._moved = True
        # In a pass over all rows the players move at its end.
        self._left = np.inf if self.state.exact else float(self.state.rows_to_next_move)

    def flush(self) -> None:
        for block in self._dequeued() if self._queued() >= max(self.fewest_rows, 1) else ():
            self._learn(block)
        if not self.problem.noiseless and float(self.state.gathered.rows) > 0:
            self._move()

    def next_pass(self, epoch: int, max_epochs: int | None) -> bool:
        self._before = None
        if self.problem.noiseless:
            return False
        self.flush()
        if self.solver.half_life:
            return epoch + 1 < (max_epochs or 1)
        if self._kept:
            self._solve_kept()
            return False
        if self.fits and self._rereads:
            more = epoch + 1 < PASSES_IN_MEMORY and not self._is_solved()
        elif max_epochs is None:
            more = self._repeatable and epoch + 1 < PASSES and not self._verdict().converged
        else:
            more = epoch + 1 < max_epochs
        if more:
            self._reread()
        return more

    @property
    def fits(self) -> bool:
        """Whether the rows of a pass fit in memory."""
        return 0 < self._bytes <= self._room

    def _reread(self) -> None:
        self.state, self._left = self._apply("reread", self.state), np.inf

    def _solve_kept(self) -> None:
        """Move with products of all rows until they are solved."""
        self._reread()
        for _ in range(PASSES_IN_MEMORY):
            for block in self._kept or ():
                self.state = self._apply("gather", self.state, block)
            self._move()
            if self._is_solved():
                break
        self._kept = None

    def _is_solved(self) -> bool:
        """Whether the residual is at rounding, or the last moves gained nothing."""
        gains = np.asarray(self.state.gains)[-STALLED:]
        worst = float(np.max(self.state.preconditioned_residuals))
        return self.state.exact and (worst < SOLVED or bool((np.abs(gains) < NOTHING).all()))

    def reopen(self) -> None:
        self._kept = None
        if self.state.exact and not self.problem.noiseless:
            self.state = self._apply("reopen", self.state)
            self._left = float(self.state.rows_to_next_move)

    def revisit(self, batch: Tree) -> None:
        """Rows before a checkpoint are all learned."""

    def __getstate__(self) -> dict[str, Any]:
        self._examine()
        return {**super().__getstate__(), "_kept": None}

    def saveable(self) -> list[Any] | None:
        if self._queue or self._raw or self._kept is not None or not int(self.state.step):
            return None
        self._settle()
        self.info = self._apply("info", self.state)
        kept: list[Any] = jax.tree.leaves(self._kept_state())
        guard, sizes = self.outliers, np.array(sorted(self._sizes), int)
        counters = [self._left, self._bytes, self._moved, guard.seen, guard.count]
        return [*kept, *map(float, counters), guard.energies, np.array(guard.named, int), sizes]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        if epoch and not self.solver.half_life:
            self._reread()
        super().restore(arrays, epoch)
        last, guard = len(jax.tree.leaves(self._kept_state())), self.outliers
        self._left, self._bytes, self._moved = float(arrays[last]), int(arrays[last + 1]), bool(arrays[last + 2])
        guard.seen, guard.count = int(arrays[last + 3]), int(arrays[last + 4])
        guard.energies = arrays.get(last + 5, np.zeros(0))
        guard.named = arrays.get(last + 6, np.zeros(0, int)).tolist()
        self._sizes = set(arrays.get(last + 7, np.zeros(0, int)).tolist())
        self._kept = None

    def snapshot_due(self, steps: int) -> bool:
        moved, self._moved = self._moved, False
        return moved or self.problem.noiseless

    def snapshot(self) -> dict[str, Any]:
        if self.problem.noiseless:
            return super().snapshot()
        self._settle()
        self.info = self._apply("info", self.state)
        known = self._verdict()
        return {**super().snapshot(), "heldout": self.sign * known.heldout, "shortfall": known.shortfall}

    def _verdict(self) -> Any:
        return verdict(self.state, self.fits)

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self._examine()
        begun = int(self.state.step) > 0 or bool(self._queue)
        check_enough_rows(n_rows if begun else -1, self.fewest_rows, self.problem, self._asked)
        if self.state.exact:
            # The products of part of a pass are not those of all rows.
            return self._ending(n_rows, source, stop)
        # A last move on the queued rows is for the result alone: the run goes on from before it.
        before = jax.tree.map(jnp.copy, self.state), list(self._queue), self._left, self._moved, self._bytes
        kept, self._kept = self._kept, None
        try:
            self.flush()
            return self._ending(n_rows, source, stop)
        finally:
            self.state, self._queue, self._left, self._moved, self._bytes = before
            self._kept = kept

    def _ending(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self._settle()
        self.info = self._apply("info", self.state)
        state = on_host(jax.tree.map(jnp.copy, self.state))
        lam, V = self.solver.eigenpairs(self.problem, state)
        order = self.solver.order(state)
        residuals = np.asarray(self.info.residuals)[order]
        if self.failed:
            raise ValueError("no move of the players was finite: look for numbers too large to square")
        found = min(int((np.asarray(players.norms(V)) > 0).sum()), int(state.rank))
        if self._asked is None:
            lam, V, order, residuals = lam[:found], players.take(V, 0, found), order[:found], residuals[:found]
        elif found < len(lam):
            raise ValueError(
                f"k={len(lam)} is too large: only {found} components were found (constant or duplicate columns, or few "
                "rows); give a smaller k, more rows, or a ridge"
            )
        if self.problem.noiseless:
            solved = bool(np.max(state.preconditioned_residuals) < SOLVED)
            words = message = f"stopped after {source}, with a residual of {residuals.max():.2g}"
        else:
            known = verdict(state, self.fits)
            solved, words = known.converged, known.words
            message = f"read {source}; {words}"
        status = stop.status if stop else Status.CONVERGED if solved else Status.NOT_CONVERGED
        converged = status is not Status.INTERRUPTED and (solved or status is Status.CONVERGED)
        if stop:
            # An interrupted run has not seen the rows that would tell whether it has converged.
            interrupted = status is Status.INTERRUPTED and not self.problem.noiseless
            message = f"{stop.message}; {words.partition(': ')[2] if interrupted else words}"
        if self.outliers.count:
            self.outliers.warn()
            message += f"; {self.outliers.report()}"
        ending = Ending(self.sign * lam, V, residuals, converged, status, message, state, n_rows)
        if self.problem.noiseless:
            return ending
        if self.problem.orthonormal and self.problem.center:
            # The mean of all rows is subtracted from each: unbiased variances divide by one row less.
            n = max(float(state.rows_known), 2.0)
            ending = ending._replace(eigenvalues=ending.eigenvalues * (n / (n - 1)))
        return ending._replace(
            heldout=self.sign * known.heldout[order],
            heldout_error=known.errors[order],
            shortfall=known.shortfall,
            noise_floors=np.asarray(state.floors, np.float64)[order],
        )


def _on_device(batch: Tree) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in views.leaves(batch))

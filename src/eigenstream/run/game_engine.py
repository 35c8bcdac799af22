"""The accelerated game under way: batches joined to blocks, an opening, and a move once enough rows are there."""

from __future__ import annotations

import itertools
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.memory import free_bytes
from eigenstream.core.precision import compiled
from eigenstream.core.transfer import Picked
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.run.engine import Ending, Setup, Stop, check_enough_rows
from eigenstream.run.intake import is_dense
from eigenstream.run.placement import n_rows, on_host, placed
from eigenstream.run.result import Status
from eigenstream.run.stepping_engine import SteppingEngine
from eigenstream.solvers.game import Game
from eigenstream.solvers.game.opening import FIRST_BLOCK, Opening
from eigenstream.solvers.game.verdict import SOLVED, verdict


def _applied(method: str, solver: Game, problem: Problem, state: Any, *more: Any) -> Any:
    return placed(getattr(Game, method))(solver, problem, state, *more)


_next_state = jax.jit(_applied, static_argnums=(0, 1), donate_argnums=3)
_measured = jax.jit(_applied, static_argnums=(0, 1))
#: How methods are compiled that do not return the next state, or multiply kept rows in large blocks, a few times.
COMPILED = {
    "validate": _measured,
    "info": _measured,
    "multiply_exactly": compiled(_applied, static_argnums=(0, 1), donate_argnums=3),
}


#: Rows that are multiplied at once: fewer leave a processor idle.
BLOCK = 512
#: Block sizes that are compiled as they come; others are cut into powers of two.
FEW = 4
#: The most numbers in a block, in one on an accelerator, and in one of kept rows there.
NUMBERS, DEVICE_NUMBERS, KEPT_NUMBERS = 2**23, 2**25, 2**28


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
        #: The first rows; None once the game has opened.
        self.opening: Opening | None = None
        if self.solver.opening and not (self.problem.noiseless or self.state.plays_all or self.solver.half_life):
            room = 0.0
            if self.intake is not None and setup.keep_rows:
                # Rows that fit an accelerator are kept there.
                room = free_bytes() / 2 if setup.memory_budget is None else setup.memory_budget
            self.opening = Opening(self.solver.opening, room)

    @property
    def holds_whole_stream(self) -> bool:
        return self.opening is not None

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
        most = FIRST_BLOCK if self.opening is not None else min(self._left, BLOCK)
        numbers = NUMBERS if self.intake is None else DEVICE_NUMBERS
        wanted = max(1, int(min(most, numbers / self._width)) // views.n_rows(near)).bit_length()
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
        return self.placement.run(COMPILED.get(method, _next_state), method, self.solver, self.problem, state, *more)

    def _learn(self, block: Tree, method: str = "gather") -> None:
        if self.opening is None:
            self.state = self._apply(method, self.state, block)
            self._left -= n_rows(block)
            if self._left <= 0:
                self._move()
            return
        self.state = self.opening.add(self._apply, self.state, block, n_rows(block))
        if self.opening.is_full(self.state):
            self.state, validation = self.opening.play(self._apply, self.state)
            self.opening, self._moved = None, True
            self._left = float(self.state.rows_to_next_move)
            for block in validation:
                self._learn(block, "multiply")

    def _join_kept(self) -> None:
        """Join kept rows on an accelerator to large blocks, so that a move has few programs."""
        assert self.opening is not None
        if self.intake is None or not all(is_dense(self.problem.split(block)[0]) for block in self.opening.blocks):
            return
        waiting, self.opening.blocks = self.opening.blocks, []
        each = max(1, KEPT_NUMBERS // (self._width * max(map(n_rows, waiting), default=1)))
        while waiting:
            self.opening.blocks.append(host_batches.join(*waiting[:each]))
            # Free these before the next are joined.
            del waiting[:each]

    def _move(self) -> None:
        if bool(self.solver.sketch_is_due(self.state)):
            self.state = self._apply("update_sketch", self.state)
        self.state = self._apply("move", self.state, False)
        self._left, self._moved = float(self.state.rows_to_next_move), True

    def flush(self) -> None:
        for block in self._dequeued() if self._queued() >= max(self.fewest_rows, 1) else ():
            if self.opening is None:
                self.state = self._apply("gather", self.state, block)
            else:
                self.state = self.opening.add(self._apply, self.state, block, n_rows(block))
        if self.opening is not None:
            self._join_kept()
            self.state = self.opening.solve(self._apply, self.state)
        elif not self.problem.noiseless and float(self.state.gathered.rows) > 0:
            self._move()

    def next_pass(self, epoch: int, max_epochs: int) -> bool:
        # Rows that are all kept need not be read again.
        if self.holds_whole_stream or not super().next_pass(epoch, max_epochs):
            return False
        self.state = self.state._replace(first_pass=np.array(False))
        return True

    def free_rows(self) -> None:
        if self.intake is not None and self.opening is not None:
            self.opening, self._left = None, float(self.state.rows_to_next_move)
            # Gains on the same rows again do not predict gains on new rows.
            self.state = self.state._replace(gains=jnp.full_like(self.state.gains, jnp.nan))

    def reopen(self) -> None:
        self.state = self.state._replace(first_pass=np.array(True))

    def revisit(self, batch: Tree) -> None:
        """Rows before a checkpoint are all learned."""

    def __getstate__(self) -> dict[str, Any]:
        self._examine()
        kept = super().__getstate__()
        if self.opening is not None:
            kept["opening"] = copy(self.opening)
            kept["opening"].blocks = on_host(self.opening.blocks)
        return kept

    def saveable(self) -> list[Any] | None:
        if self._queue or self._raw or self.opening is not None or not int(self.state.step):
            return None
        self._settle()
        self.info = self._apply("info", self.state)
        kept: list[Any] = jax.tree.leaves(self._kept())
        guard, sizes = self.outliers, np.array(sorted(self._sizes), int)
        return [*kept, self._left, guard.energies, guard.seen, guard.count, np.array(guard.named, int), sizes]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        super().restore(arrays, epoch)
        last = len(jax.tree.leaves(self._kept()))
        guard = self.outliers
        self._left, guard.energies = float(arrays[last]), arrays.get(last + 1, np.zeros(0))
        guard.seen, guard.count = int(arrays[last + 2]), int(arrays[last + 3])
        guard.named = arrays.get(last + 4, np.zeros(0, int)).tolist()
        self._sizes = set(arrays.get(last + 5, np.zeros(0, int)).tolist())
        self.opening = None

    def snapshot_due(self, steps: int) -> bool:
        moved, self._moved = self._moved, False
        return moved or self.problem.noiseless

    def snapshot(self) -> dict[str, Any]:
        if self.problem.noiseless:
            return super().snapshot()
        self._settle()
        self.info = self._apply("info", self.state)
        known = verdict(self.state, 1, solved=self.holds_whole_stream)
        record = {**super().snapshot(), "heldout": self.sign * known.heldout}
        # With K = d the players span the whole space and solve for the rows so far: only more rows improve the answer.
        return record if self.state.plays_all else {**record, "shortfall": known.shortfall}

    def finish(self, n_rows: int, source: str, stop: Stop | None) -> Ending:
        self._examine()
        begun = int(self.state.step) > 0 or bool(self._queue)
        check_enough_rows(n_rows if begun else -1, self.fewest_rows, self.problem, self._asked)
        if self.holds_whole_stream:
            self.flush()
            return self._ending(n_rows, source, stop)
        # A last move on the queued rows is for the result alone: the run goes on from before it.
        before = jax.tree.map(jnp.copy, self.state), list(self._queue), self._left, self._moved
        try:
            self.flush()
            return self._ending(n_rows, source, stop)
        finally:
            self.state, self._queue, self._left, self._moved = before

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
            message = stop.message if stop else f"stopped after {source}, with a residual of {residuals.max():.2g}"
            status = stop.status if stop else Status.CONVERGED if solved else Status.NOT_CONVERGED
            converged = status is not Status.INTERRUPTED and (solved or status is Status.CONVERGED)
            return Ending(self.sign * lam, V, residuals, converged, status, message, state, n_rows)
        known = verdict(state, n_rows, solved=self.holds_whole_stream)
        status = stop.status if stop else Status.CONVERGED if known.converged else Status.NOT_CONVERGED
        interrupted = status is Status.INTERRUPTED
        # An interrupted run has not seen the rows that would tell whether it has converged.
        words = known.words.partition(": ")[2] if interrupted else known.words
        message = f"{stop.message if stop else f'read {source}'}; {words}"
        if self.holds_whole_stream and self.problem.orthonormal and self.problem.center:
            # The mean of all rows is subtracted from each: unbiased variances divide by one row less.
            lam = lam * (n_rows / (n_rows - 1))
        if self.outliers.count:
            self.outliers.warn()
            message += f"; {self.outliers.report()}"
        converged = not interrupted and (known.converged or status is Status.CONVERGED)
        heldout = self.sign * known.heldout[order], known.errors[order]
        return Ending(self.sign * lam, V, residuals, converged, status, message, state, n_rows, *heldout)


def _on_device(batch: Tree) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in views.leaves(batch))

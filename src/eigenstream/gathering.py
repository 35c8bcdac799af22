"""The accelerated game under way: the same face as in `eigenstream.engines`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream import host, rows, trees
from eigenstream.engines import NOISELESS, Playing
from eigenstream.outliers import Outliers
from eigenstream.placement import n_rows, on_host, placed
from eigenstream.problems.base import Problem
from eigenstream.solvers.accelerated import GROWTH, Game
from eigenstream.solvers.knowing import verdict

Tree = Any


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _gather(solver: Game, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.gather(problem, state, batch)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _observe(solver: Game, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.observe(problem, state, batch)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _multiply(solver: Game, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.multiply(problem, state, batch)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _learn(solver: Game, problem: Problem, state: Any) -> Any:
    return solver.learn(state)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@placed
def _move(solver: Game, problem: Problem, state: Any, whole: bool) -> Any:
    return solver.move(problem, state, whole)


@partial(jax.jit, static_argnums=0)
@placed
def _judge(solver: Game, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.judge(problem, state, batch)


#: Rows that are multiplied at once, whatever the batches: fewer leave a processor idle. The first are kept in blocks
#: that a sketch learns from.
BLOCK, FIRST_BLOCK = 512, 256
#: Sizes of blocks that are taken as they come; further ones are powers of two.
FEW = 4
#: The most numbers in a block.
NUMBERS = 2**23
#: The first rows are kept while they take no more than so many times the memory of the state. Where a device's memory
#: has an end, so many times as much is left for a move.
ROOM, MOVING = 2, 5
#: The most moves on the first rows, on all rows where they are all kept, and the share of the first that are judges.
OPENING, MOST, JUDGES = 12, 100, 6
#: Moves in a row that may be worse than the best one on the judges, whose few rows are noisy.
PATIENCE = 2


class Gathering(Playing):
    """The accelerated game under way. Where batches begin and end means nothing to it, so small ones are joined.

    The first rows are kept, in up to twice the memory of players and sketches, and the game opens with several moves on
    most of them, each from products with all of these, while that helps on the others. Those of a stream that ends
    before are all there are: the players then move until they have solved it.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.info = jax.tree.map(np.array, self.solver.info(self.state))
        self.outliers = Outliers(self.solver.outlier)
        self._width = trees.size(self.template)
        self._queue: list[Tree] = []
        self._sizes: set[int] = set()
        #: Rows to go before the next move, and whether one was made since the last look.
        self._left, self._moved = float(self.state.due), False
        #: The first rows, None once the game has opened; their bytes, their number and that when the sketches learned.
        self._first: list[Tree] | None = None
        self._weight = self._number = self._learned = 0
        if ROOM and not (self.problem.noiseless or self.state.plays_all or self.solver.half_life):
            self._first = []

    def prepare(self, batch: Tree, start: int = 0, total: int | None = None) -> Tree | None:
        """The rows that wait, once they are worth a product or enough for a move; None until then."""
        near = self._near(batch)
        total = rows.n_rows(near) if total is None else total
        tame = self.outliers.tame(self.problem.features(near), start, total)
        self._summarise(near, total)
        near = self.problem.with_features(near, tame)
        if total > rows.n_rows(near):
            # Parts of several batches do not make parts of one that are as large as one another.
            return [self.place.batch(near, start, total)] if total >= self.least else None
        self._queue.append(near if _on_device(near) else host.owned(near, batch))
        # A power of two of batches, so that streams of even batches compile a few programs only.
        most = FIRST_BLOCK if self._first is not None else min(self._left, BLOCK)
        wanted = max(1, int(min(most, NUMBERS / self._width)) // rows.n_rows(near)).bit_length()
        enough = len(self._queue) >= 1 << (wanted - 1) or _on_device(near)
        return self._taken() if enough and self._waiting() >= self.least else None

    def _waiting(self) -> int:
        return sum(map(rows.n_rows, self._queue))

    @property
    def keeps_all(self) -> bool:
        """Whether all rows so far are kept, so that the answer is that of all of them."""
        return self._first is not None

    def next_pass(self, epoch: int, max_epochs: int) -> bool:
        """Rows that are all kept need not be read again; others come again, and are no longer new."""
        if self.keeps_all or not super().next_pass(epoch, max_epochs):
            return False
        self.state = self.state._replace(first_pass=np.array(False))
        return True

    def go_on(self) -> None:
        self.state = self.state._replace(first_pass=np.array(True))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_first": on_host(self._first)}

    def remember(self, batch: Tree) -> Tree:
        """Rows before a checkpoint are all learned."""
        return batch

    def _taken(self) -> list[Tree]:
        """What waits, in blocks of few sizes: each is another program."""
        taken, self._queue = host.join(*self._queue), []
        b = rows.n_rows(taken)
        if len(self._sizes) < FEW or _on_device(taken):
            self._sizes.add(b)
        parts = host.cut(taken, [b] if b in self._sizes else host.in_powers_of_two(b, self.least))
        blocks = [self.place.batch(part, for_good=True) for part in parts]
        jax.block_until_ready(blocks)
        return blocks

    def step(self, batch: Any) -> None:
        if self.problem.noiseless:
            super().step(batch)
            return
        for block in batch:
            if self._first is None:
                self._learn(_gather, block)
                continue
            self._keep(block)
            if self._weight > room(_bytes(self.state), _limit(self.state)):
                self._open()

    def _run(self, f: Any, *more: Any) -> None:
        self.state = self.place.run(f, self.solver, self.problem, self.state, *more)

    def _keep(self, batch: Tree) -> None:
        self._run(_observe, batch)
        if self._first is not None:
            self._first.append(batch)
        self._weight, self._number = self._weight + _bytes(batch), self._number + n_rows(batch)
        self._learn_first()

    def _learn_first(self, least: int = FIRST_BLOCK) -> None:
        """Let the sketches learn, once enough of the first rows are new to them."""
        if self._number - self._learned >= max(least, (GROWTH - 1) * self._learned):
            self._run(_learn)
            self._learned = self._number

    def _open(self) -> None:
        """Move on the first rows while the players do better on the last of them, which then are new rows.

        Means, and so the class means of LDA, know these already.
        """
        first, self._first = self._first or [], None
        # A single block leaves none to judge.
        cut = max(len(first) - max(len(first) // JUDGES, 1), 1)
        played, judges = first[:cut], first[cut:]
        self._learn_first(1)
        best: tuple[float, Any] = (-np.inf, None)
        worse = 0
        for _ in range(OPENING):
            self._move_on(played)
            scores = [self.place.run(_judge, self.solver, self.problem, self.state, x) for x in judges or played]
            a, b = np.sum(scores, axis=0)
            value = float((a / b).sum())
            worse = worse + 1 if value < best[0] else 0
            if worse == PATIENCE:
                break
            if not worse:
                best = value, jax.tree.map(jnp.copy, self.state._replace(metric=None, memory=None))
        if worse:
            self.state = best[1]._replace(metric=self.state.metric, memory=self.state.memory)
            self._left = float(self.state.due)
            self.info = jax.tree.map(np.array, self.solver.info(self.state))
        if judges:
            # What was gained on the same rows again says nothing of rows to come.
            self.state = self.state._replace(gains=jnp.full_like(self.state.gains, jnp.nan))
        for batch in judges:
            self._learn(_multiply, batch)

    def _solve(self) -> None:
        """Move with products of all rows until they are solved."""
        self._learn_first(1)
        for _ in range(MOST):
            self._move_on(self._first or [])
            if float(self.info.residuals.max()) < NOISELESS:
                break

    def _move_on(self, batches: list[Tree]) -> None:
        """Move once, with products of rows that are all there are."""
        for batch in batches:
            self._run(_multiply, batch)
        self._move(whole=True)

    def _learn(self, gather: Any, batch: Tree) -> None:
        self._run(gather, batch)
        self._left -= n_rows(batch)
        if self._left <= 0:
            self._move()

    def _move(self, whole: bool = False) -> None:
        if not whole and bool(self.solver.is_to_learn(self.state)):
            self._run(_learn)
        self._run(_move, whole)
        self._moved = True
        self.info = jax.tree.map(np.array, self.solver.info(self.state))
        self._left = float(self.state.due)

    def settle(self) -> None:
        """Learn the rows that wait."""
        for block in self._taken() if self._queue and self._waiting() >= self.least else ():
            if self._first is None:
                self._run(_gather, block)
            else:
                self._keep(block)
        if self._first:
            self._solve()
        elif not self.problem.noiseless and float(self.state.gathered.rows) > 0:
            self._move()
        self.info = jax.tree.map(np.array, self.solver.info(self.state))

    def has_begun(self) -> bool:
        return int(self.state.step) > 0 or bool(self._queue)

    def saveable(self) -> list[Any] | None:
        if self._queue or self._first is not None or not int(self.state.step):
            return None
        guard = self.outliers
        kept: list[Any] = jax.tree.leaves(self._kept())
        sizes = np.array(sorted(self._sizes), int)
        return [*kept, self._left, guard.energies, guard.seen, guard.count, np.array(guard.named, int), sizes]

    def restore(self, arrays: dict[int, np.ndarray], epoch: int) -> None:
        super().restore(arrays, epoch)
        last = len(jax.tree.leaves(self._kept()))
        guard = self.outliers
        self._left, guard.energies = float(arrays[last]), arrays.get(last + 1, np.zeros(0))
        guard.seen, guard.count = int(arrays[last + 2]), int(arrays[last + 3])
        guard.named = arrays.get(last + 4, np.zeros(0, int)).tolist()
        self._sizes = set(arrays.get(last + 5, np.zeros(0, int)).tolist())
        self._first = None

    def worth_a_look(self, steps: int) -> bool:
        moved, self._moved = self._moved, False
        return moved or self.problem.noiseless

    def how_far(self, source: str) -> str:
        return super().how_far(source) if self.problem.noiseless else f"read {source}"

    def look(self) -> dict[str, Any]:
        if self.problem.noiseless:
            return super().look()
        known = verdict(self.state, 1, solved=self.keeps_all)
        return {
            "eigenvalues": self.sign * np.asarray(self.info.eigenvalues),
            "residual": known.shortfall,
            "heldout": self.sign * known.heldout,
        }

    def end(self, n: int, stopped: str) -> tuple[np.ndarray, Tree, np.ndarray, bool, str]:
        if self.keeps_all:
            self.settle()
            self._settled = on_host(jax.tree.map(jnp.copy, self.state))
            return self._ended(n, stopped)
        # A move on the rows that wait, few as they may be, is for the result alone.
        going_on = jax.tree.map(jnp.copy, self.state), list(self._queue), self._left, self.info
        self.settle()
        self._settled = on_host(self.state)
        try:
            return self._ended(n, stopped)
        finally:
            self.state, self._queue, self._left, self.info = going_on

    @property
    def settled(self) -> Any:
        return self._settled

    def _ended(self, n: int, stopped: str) -> tuple[np.ndarray, Tree, np.ndarray, bool, str]:
        lam, V = self.solver.eigenpairs(self.problem, self._settled)
        order = self.solver.order(self.state)
        rest = np.asarray(self.info.residuals)[order]
        if self.failed:
            raise ValueError("no move of the players was finite: look for numbers too large to square")
        found = min(int((np.asarray(trees.norms(V)) > 0).sum()), int(self.state.rank))
        if found < len(lam):
            raise ValueError(
                f"k={len(lam)} is too large: only {found} components were found (constant or duplicate columns, or few "
                "rows); give a smaller k, more rows, or a ridge"
            )
        if self.problem.noiseless:
            return self.sign * lam, V, rest, bool(rest.max() < NOISELESS), stopped
        known = verdict(self.state, n, solved=self.keeps_all)
        self.heldout = self.sign * known.heldout[order], known.errors[order]
        message = f"{stopped}; {known.words}" if stopped else known.words
        if self.outliers.count:
            self.outliers.warn()
            message += f"; {self.outliers.report()}"
        return self.sign * lam, V, rest, known.converged, message


def room(state: float, limit: float) -> float:
    """Bytes of first rows that are kept beside a state of so many, on a device of so many."""
    return min(ROOM * state, limit - MOVING * state)


def _limit(state: Any) -> float:
    """The bytes of the devices that share out the players, so far as they say."""
    players = jax.tree.leaves(state)[0]
    shard = players.addressable_shards[0]
    limit = (shard.device.memory_stats() or {}).get("bytes_limit", np.inf)
    return limit * players.nbytes / shard.data.nbytes


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _on_device(batch: Tree) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in rows.leaves(batch))

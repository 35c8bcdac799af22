"""Read any iterable of batches for several epochs, from any position."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.streams.batching import Batches


class Epochs:
    """The input of a run: batches, or for a problem without data a list of step counts."""

    def __init__(self, problem: Problem, batches: Iterable[Tree] | None, max_steps: int | None, stride: int):
        self._opened: Iterator[Tree] | None = None
        self._without_data = problem.noiseless
        self.source: Any = batches
        self.repeatable = True
        if problem.noiseless:
            problem.accept(batches)
            left = 1000 if max_steps is None else max_steps
            self.source = [min(stride, left - start) for start in range(0, left, stride)]
        elif batches is None:
            raise ValueError("batches is None: this problem needs data; give an iterable of batches")
        elif hasattr(batches, "shape"):
            raise ValueError("batches is one array: give an iterable of batches, [X] for a single one")
        elif not isinstance(batches, Batches):
            self._opened = iter(batches)
            self.repeatable = self._opened is not batches

    def head(self) -> Tree:
        """The first batch, which the first epoch returns again; None for a problem without data."""
        if self._without_data:
            return None
        if isinstance(self.source, Batches):
            return self.source.head()
        assert self._opened is not None
        heads = list(itertools.islice(self._opened, 1))
        if not heads:
            raise ValueError("batches is empty: give at least one batch")
        self._opened = _Chained(heads, self._opened)
        return heads[0]

    @property
    def rereads(self) -> bool:
        """Whether the rows can be read again from memory or files, so that nobody needs to keep them."""
        return isinstance(self.source, list | tuple | Batches)

    def in_large_batches(self, rows: int) -> bool:
        """Read batches of this many rows in file order, if the source can; for solvers that only sum rows."""
        if isinstance(self.source, Batches):
            self.source = self.source.in_order(rows)
        return isinstance(self.source, Batches)

    def send(self, convert: Callable[[Tree], Tree]) -> None:
        """Copy arrays to the device in large blocks, each run of rows after ``convert``."""
        if isinstance(self.source, Batches) and self.source.can_be_sent:
            self.source = self.source.sent(convert)

    def shared(self, share: Callable[[int], tuple[int, int]]) -> None:
        """Read only the rows in ``share(n)`` of every batch of n rows, if the batches are dense `Batches`."""
        if isinstance(self.source, Batches) and self.source.is_dense:
            self.source = self.source.shared(share)

    def length(self, max_epochs: int, max_steps: int | None) -> int | None:
        """The number of steps, or None if it is unknown."""
        if self._without_data:
            return sum(self.source)
        try:
            total = len(self.source) * max_epochs
        except TypeError:
            # The source has no length, or is a loader whose data set has none.
            return max_steps
        return total if max_steps is None else min(total, max_steps)

    def epoch(self, number: int, taken: int, revisit: Callable[[Tree], None], least: int) -> Iterator[Tree]:
        """The batches of an epoch after the first ``taken``; ``revisit`` gets at least ``least`` rows before them."""
        if isinstance(self.source, Batches):
            start = max(0, taken - -(-least // self.source.batch_size))
            batches = self.source.epoch(number, start)
        else:
            start, batches = 0, iter(self.source) if self._opened is None else self._opened
            self._opened = None
        for raw in itertools.islice(batches, taken - start):
            if not self._without_data:
                revisit(raw)
        return batches


class _Chained:
    """A list followed by an iterator. Each item is removed from the list when it is returned, to free its memory."""

    def __init__(self, items: list[Tree], rest: Iterator[Tree]):
        self.items, self.rest = items, rest

    def __iter__(self) -> _Chained:
        return self

    def __next__(self) -> Tree:
        return self.items.pop(0) if self.items else next(self.rest)

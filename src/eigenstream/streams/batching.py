"""Cut sources into batches, in order or shuffled, from any position, on the host or on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse

from eigenstream.core.host_batches import Part, join
from eigenstream.core.settings import check_count
from eigenstream.core.transfer import Picked, Window
from eigenstream.core.types import Tree
from eigenstream.streams.formats import open_source
from eigenstream.streams.reading_ahead import AHEAD, prefetch, read_early

T = TypeVar("T")

#: A shuffling window consists of this many runs of consecutive rows.
STRETCHES = 16


def batches(*sources: Any, batch_size: int = 100, shuffle: bool = True, random_state: int = 0) -> Batches:
    """Cut one source, or several views of the same samples, into batches.

    Parameters
    ----------
    *sources : array, sparse matrix, path or source
        Row r of each source belongs to sample r. A path is opened by `open_source`.
    batch_size : int
        Rows per batch. The last batch may be shorter.
    shuffle : bool
        Whether to draw a new order for every epoch. A large file is shuffled in windows: each window joins several
        runs of consecutive rows from random places in the file and permutes their rows.
    random_state : int
        Seed of the order.

    Returns
    -------
    Batches
        A re-iterable of arrays for one source, of tuples for several.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.arange(10.0).reshape(5, 2)
    >>> [b.shape for b in es.streams.batches(X, batch_size=2)]
    [(2, 2), (2, 2), (1, 2)]
    """
    return Batches(tuple(_opened(source) for source in sources), batch_size, shuffle, random_state)


def edges(source: Any, batch_size: int = 1000, shuffle: bool = True, random_state: int = 0) -> Batches:
    """Cut an edge list, one edge per row, into batches ``(sources, targets)`` or ``(sources, targets, weights)``."""
    source = _opened(source)
    if len(source.shape) != 2 or source.shape[1] not in (2, 3):
        raise ValueError(f"edges have shape {source.shape}: give two columns, or three with a weight")
    return Batches((source,), batch_size, shuffle, random_state, _edge_columns)


def _opened(source: Any) -> Any:
    if isinstance(source, str | Path):
        source = open_source(source)
    if scipy.sparse.issparse(source):
        return source.tocsr()
    return source if hasattr(source, "shape") else np.asarray(source)


def _one_or_all(views: tuple[Any, ...]) -> Tree:
    return views[0] if len(views) == 1 else views


def _edge_columns(views: tuple[Any, ...]) -> Tree:
    (rows,) = views
    ends = tuple(rows[:, i] if rows.dtype.kind in "iu" else _whole(rows[:, i]) for i in range(2))
    return (*ends, rows[:, 2]) if rows.shape[1] == 3 else ends


def _whole(nodes: np.ndarray) -> np.ndarray:
    whole = nodes.astype(np.int64)
    if (whole != nodes).any():
        raise ValueError("the first two columns of an edge list must be whole numbers, the nodes")
    return whole


@dataclass(frozen=True)
class Batches:
    """Batches of rows, made by `batches`. Their order depends on the seed and the epoch alone."""

    sources: tuple[Any, ...]
    batch_size: int = 100
    shuffle: bool = True
    random_state: int = 0
    #: Makes the user's batch from one array per source.
    form: Callable[[tuple[Any, ...]], Tree] = field(default=_one_or_all, repr=False)
    #: The range of rows to read from a batch of n rows. If set, every batch is a `Part`.
    share: Callable[[int], tuple[int, int]] | None = field(default=None, repr=False)
    #: Applied to runs of rows in a thread before they are copied to the device. If set, every batch is `Picked`.
    convert: Callable[[Tree], Tree] | None = field(default=None, repr=False)
    #: Size of a shuffling window in numbers. The default is 64 MB of float32.
    window_numbers: int = field(default=2**24, repr=False)

    def __post_init__(self) -> None:
        lengths = [source.shape[0] for source in self.sources]
        if len(set(lengths)) != 1:
            raise ValueError(f"the sources have {lengths} rows: row r of each must be the same sample")
        if not lengths[0]:
            raise ValueError("the sources have no rows: give at least one")
        check_count("batch_size", self.batch_size)

    @property
    def n_rows(self) -> int:
        return int(self.sources[0].shape[0])

    @property
    def width(self) -> int:
        """Numbers per sample, all sources together."""
        return max(1, sum(int(np.prod(source.shape[1:])) for source in self.sources))

    def __len__(self) -> int:
        return -(-self.n_rows // self.batch_size)

    def __iter__(self) -> Iterator[Tree]:
        return self.epoch(0)

    def head(self) -> Tree:
        """The first batch without shuffling, read in the calling thread."""
        return self.form(tuple(source[: min(self.batch_size, self.n_rows)] for source in self.sources))

    def in_order(self, batch_size: int) -> Batches:
        """The same rows without shuffling, in batches of another size."""
        return replace(self, batch_size=batch_size, shuffle=False)

    @property
    def is_dense(self) -> bool:
        """Whether every source is a dense array of features: no sparse rows, labels or edges."""
        views = [len(source.shape) > 1 and not scipy.sparse.issparse(source) for source in self.sources]
        return all(views) and self.form is _one_or_all

    def shared(self, share: Callable[[int], tuple[int, int]]) -> Batches:
        """The same batches, but only the rows in ``share(n)`` of each are read."""
        return replace(self, share=share)

    @property
    def can_be_sent(self) -> bool:
        """Whether runs of rows can be copied to a device from several threads: dense arrays, also in mapped files."""
        return self.is_dense and all(isinstance(source, np.ndarray) for source in self.sources)

    def sent(self, convert: Callable[[Tree], Tree]) -> Batches:
        """The same batches as `Picked`: ``convert`` is applied to runs of rows on their way to the device."""
        return replace(self, convert=convert)

    def _total(self, batch: int) -> int:
        return min(self.batch_size, self.n_rows - batch * self.batch_size)

    def _own(self, batch: int) -> tuple[int, int]:
        total = self._total(batch)
        return (0, total) if self.share is None else self.share(total)

    def epoch(self, number: int, start: int = 0) -> Iterator[Tree]:
        """The batches of one epoch, starting at batch ``start``. Equal arguments give equal batches."""
        if self.convert is not None:
            return map(Picked, self._picks(number, start, self._send, AHEAD))
        pieces = self._shuffled(number, start) if self.shuffle else self._in_order(start)
        formed: Iterator[Tree] = map(self.form, pieces)
        if self.share is not None:
            formed = (Part(x, self._own(t)[0], self._total(t)) for t, x in enumerate(formed, start))
        # Slicing an array in memory is free. Reading a file or gathering shuffled rows is not, so a thread does it.
        in_memory = all(isinstance(s, np.ndarray) and not _is_mapped(s) for s in self.sources)
        return formed if in_memory and not self.shuffle else prefetch(formed, AHEAD)

    def _in_order(self, start: int) -> Iterator[tuple[Any, ...]]:
        for t in range(start, len(self)):
            lo, hi = (t * self.batch_size + i for i in self._own(t))
            views = tuple(source[lo:hi] for source in self.sources)
            for view in views:
                _read_pages(view)
            yield views

    def _shuffled(self, number: int, start: int) -> Iterator[tuple[Any, ...]]:
        for parts in self._picks(number, start, partial(_gather, self.sources, self.share is not None), 0):
            yield join(*parts)

    def _send(self, spans: list[tuple[int, int]]) -> Callable[[np.ndarray], tuple[Window, np.ndarray]]:
        """Start to copy runs of rows to the device."""
        window = Window([partial(self._converted, *span) for span in spans], self._stretch * STRETCHES)
        return lambda positions: (window, positions)

    def _converted(self, lo: int, hi: int) -> Tree:
        assert self.convert is not None
        return self.convert(self.form(tuple(source[lo:hi] for source in self.sources)))

    @property
    def _stretch(self) -> int:
        """Rows in a run of consecutive rows."""
        return -(-min(self.n_rows, max(self.batch_size, self.window_numbers // self.width)) // STRETCHES)

    def _picks(
        self, number: int, start: int, opened: Callable[[list[tuple[int, int]]], Callable[[np.ndarray], T]], ahead: int
    ) -> Iterator[list[T]]:
        """For every batch its parts: ``opened(runs of rows)(positions)`` of one or more windows.

        A window joins runs of rows from random places, and its rows are permuted; without shuffling all stay in order.
        It is opened while ``ahead`` others are still to be read.
        """
        n, stretch = self.n_rows, self._stretch
        seed = self.random_state, number
        count = -(-n // stretch)
        order = np.random.default_rng(seed).permutation(count) if self.shuffle else np.arange(count)
        skip = start * self.batch_size

        def windows() -> Iterator[tuple[Callable[[np.ndarray], T], np.ndarray]]:
            passed = 0
            for index, window in enumerate(np.split(order, range(STRETCHES, count, STRETCHES))):
                spans = [(s * stretch, min((s + 1) * stretch, n)) for s in window.tolist()]
                length = sum(hi - lo for lo, hi in spans)
                passed += length
                if skip < passed:
                    turn = np.arange(length)
                    turn = np.random.default_rng((*seed, index)).permutation(turn) if self.shuffle else turn
                    yield opened(spans), turn[max(skip - (passed - length), 0) :]

        # The current batch, the number of its rows passed so far, and those rows that this process reads.
        batch, passed = start, 0
        parts: list[T] = []
        for take, turn in read_early(windows(), ahead):
            while len(turn):
                here, turn = np.split(turn, [self._total(batch) - passed])
                lo, hi = self._own(batch)
                parts.append(take(here[max(lo - passed, 0) : max(hi - passed, 0)]))
                passed += len(here)
                if passed == self._total(batch):
                    yield parts
                    batch, passed, parts = batch + 1, 0, []


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def _read_pages(view: Any) -> None:
    """Touch every page of a memory map, so that the disk is read in this thread and not at first use."""
    if _is_mapped(view) and view.flags.c_contiguous:
        view.reshape(-1).view(np.uint8)[::4096].copy()


def _gather(
    sources: tuple[Any, ...], few: bool, spans: list[tuple[int, int]]
) -> Callable[[np.ndarray], tuple[Any, ...]]:
    """A function from positions in a window to rows. Files are read one run of rows at a time.

    If only a ``few`` rows are needed, a mapped file is read row by row instead.
    """
    numbers = np.concatenate([np.arange(lo, hi) for lo, hi in spans])

    def rows_of(source: Any) -> Callable[[np.ndarray], Any]:
        in_memory = isinstance(source, np.ndarray) and (few or not _is_mapped(source))
        if in_memory or scipy.sparse.issparse(source):
            return lambda turn: source[numbers[turn]]
        held = np.concatenate([source[lo:hi] for lo, hi in spans])
        return lambda turn: held[turn]

    takers = [rows_of(source) for source in sources]
    return lambda turn: tuple(take(turn) for take in takers)

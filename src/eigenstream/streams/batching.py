"""Sources cut into batches, in order or shuffled, from any position, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from eigenstream.core.host_batches import Part, join
from eigenstream.core.types import Tree
from eigenstream.streams.formats import open_source

#: Numbers held for shuffling: 64 MB of float32.
WINDOW_NUMBERS = 2**24
#: Stretches of consecutive rows that fill a window.
STRETCHES = 16
#: Batches read ahead.
AHEAD = 2


def batches(*sources: Any, batch_size: int = 100, shuffle: bool = True, random_state: int = 0) -> Batches:
    """Batches of one source, or of several with the same rows.

    Parameters
    ----------
    *sources : array, sparse matrix, path or source
        Views with the same rows; a path is opened by `open_source`.
    batch_size : int
        Rows in a batch; the last may be shorter and is not dropped.
    shuffle : bool
        Whether every epoch takes the rows in a new order. What does not fit in memory is read in stretches of
        consecutive rows drawn from all over the file, several at a time, and shuffled among them.
    random_state : int
        The seed of that order.

    Returns
    -------
    Batches
        An iterable that starts anew each time: arrays for one source, tuples for several.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.arange(10.0).reshape(5, 2)
    >>> [b.shape for b in es.streams.batches(X, batch_size=2)]
    [(2, 2), (2, 2), (1, 2)]
    """
    return Batches(tuple(_opened(source) for source in sources), batch_size, shuffle, random_state)


def edges(source: Any, batch_size: int = 1000, shuffle: bool = True, random_state: int = 0) -> Batches:
    """Batches ``(sources, targets)`` or ``(sources, targets, weights)`` of a list of edges, one a row."""
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
    """Rows of sources in batches. Made by `batches`; the order is a function of the seed and the epoch alone."""

    sources: tuple[Any, ...]
    batch_size: int = 100
    shuffle: bool = True
    random_state: int = 0
    #: What the user's batch is made of the sources' rows.
    form: Callable[[tuple[Any, ...]], Tree] = field(default=_one_or_all, repr=False)
    #: Which rows of a batch of so many to read; a batch is a `Part` then.
    share: Callable[[int], tuple[int, int]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        lengths = [source.shape[0] for source in self.sources]
        if len(set(lengths)) != 1:
            raise ValueError(f"the sources have {lengths} rows: row r of each must be the same sample")
        if not lengths[0]:
            raise ValueError("the sources have no rows: give at least one")
        if not (isinstance(self.batch_size, int | np.integer) and self.batch_size >= 1):
            raise ValueError(f"batch_size={self.batch_size!r}: give a whole number of at least 1")

    @property
    def n_rows(self) -> int:
        return int(self.sources[0].shape[0])

    @property
    def width(self) -> int:
        """Numbers in one row of all sources."""
        return max(1, sum(int(np.prod(source.shape[1:])) for source in self.sources))

    def __len__(self) -> int:
        return -(-self.n_rows // self.batch_size)

    def __iter__(self) -> Iterator[Tree]:
        return self.epoch(0)

    def head(self) -> Tree:
        """The first rows as they lie, read here and now."""
        return self.form(tuple(source[: min(self.batch_size, self.n_rows)] for source in self.sources))

    def in_order(self, batch_size: int) -> Batches:
        """The same rows as they lie, in batches of another size."""
        return replace(self, batch_size=batch_size, shuffle=False)

    @property
    def is_dense(self) -> bool:
        """Whether batches are dense views and nothing else: no labels, no edges."""
        views = [len(source.shape) > 1 and not scipy.sparse.issparse(source) for source in self.sources]
        return all(views) and self.form is _one_or_all

    def shared(self, share: Callable[[int], tuple[int, int]]) -> Batches:
        """The same batches, of which only those rows are read and given."""
        return replace(self, share=share)

    def _total(self, batch: int) -> int:
        return min(self.batch_size, self.n_rows - batch * self.batch_size)

    def _own(self, batch: int) -> tuple[int, int]:
        total = self._total(batch)
        return (0, total) if self.share is None else self.share(total)

    def epoch(self, number: int, start: int = 0) -> Iterator[Tree]:
        """The batches of one epoch from batch ``start`` on; the same arguments give the same batches."""
        pieces = self._shuffled(number, start) if self.shuffle else self._in_order(start)
        formed: Iterator[Tree] = map(self.form, pieces)
        if self.share is not None:
            formed = (Part(x, self._own(t)[0], self._total(t)) for t, x in enumerate(formed, start))
        # Slices of an array in memory cost nothing; reading and gathering are worth a thread.
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
        """Windows of several stretches each, their rows permuted, cut into batches across their borders."""
        n, size = self.n_rows, self.batch_size
        stretch = -(-min(n, max(size, WINDOW_NUMBERS // self.width)) // STRETCHES)
        order = np.random.default_rng([self.random_state, number]).permutation(-(-n // stretch))
        windows = np.split(order, range(STRETCHES, len(order), STRETCHES))
        lengths = [sum(min(stretch, n - s * stretch) for s in window.tolist()) for window in windows]
        # The batch under way, how many of its rows have been passed, and those of them that are read here.
        batch, passed, left = start, 0, None
        skip = start * size
        for index, (window, length) in enumerate(zip(windows, lengths, strict=True)):
            if skip >= length:
                skip -= length
                continue
            turn = np.random.default_rng([self.random_state, number, index]).permutation(length)[skip:]
            skip = 0
            take = _gather(self.sources, window, stretch, self.share is not None)
            while len(turn):
                here, turn = np.split(turn, [self._total(batch) - passed])
                lo, hi = self._own(batch)
                piece = take(here[max(lo - passed, 0) : max(hi - passed, 0)])
                left = piece if left is None else join(left, piece)
                passed += len(here)
                if passed == self._total(batch):
                    yield left
                    batch, passed, left = batch + 1, 0, None


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def _read_pages(view: Any) -> None:
    """Have the pages of a map read here, in the reading thread, rather than where they are first used."""
    if _is_mapped(view) and view.flags.c_contiguous:
        view.reshape(-1).view(np.uint8)[::4096].copy()


def _gather(
    sources: tuple[Any, ...], window: np.ndarray, stretch: int, few: bool
) -> Callable[[np.ndarray], tuple[Any, ...]]:
    """A function from positions within a window to rows; what lies in a file is read a stretch at a time.

    Where ``few`` of them are wanted, a mapped file is read row by row.
    """
    n = sources[0].shape[0]
    spans = [(s * stretch, min((s + 1) * stretch, n)) for s in window.tolist()]
    numbers = np.concatenate([np.arange(lo, hi) for lo, hi in spans])

    def rows_of(source: Any) -> Callable[[np.ndarray], Any]:
        in_memory = isinstance(source, np.ndarray) and (few or not _is_mapped(source))
        if in_memory or scipy.sparse.issparse(source):
            return lambda turn: source[numbers[turn]]
        held = np.concatenate([source[lo:hi] for lo, hi in spans])
        return lambda turn: held[turn]

    takers = [rows_of(source) for source in sources]
    return lambda turn: tuple(take(turn) for take in takers)


class prefetch:
    """An iterator that stays a few items ahead of its reader, in a thread of its own.

    Examples
    --------
    >>> import eigenstream as es
    >>> list(es.streams.prefetch(iter(range(4)), ahead=2))
    [0, 1, 2, 3]
    """

    def __init__(self, items: Iterable[Any], ahead: int = AHEAD):
        self._stop = threading.Event()
        if ahead < 1:
            raise ValueError(f"ahead={ahead!r}: give a whole number of at least 1")
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
        self._ended = False
        # The thread knows the queue but not this object, so that letting go of it ends the thread.
        arguments = (iter(items), self._queue, self._stop)
        threading.Thread(target=_read_ahead, args=arguments, daemon=True, name="eigenstream-prefetch").start()

    def __iter__(self) -> prefetch:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        kind, item = self._queue.get()
        if kind == "item":
            return item
        self._ended = True
        if kind == "error":
            raise item
        raise StopIteration

    def __del__(self) -> None:
        self._stop.set()


def _read_ahead(items: Iterator[Any], out: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    def put(kind: str, item: Any) -> bool:
        while not stop.is_set():
            try:
                out.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in items:
            if not put("item", item):
                return
            # What waits in the queue is all that is kept.
            del item
    except BaseException as error:
        put("error", error)
        return
    put("end", None)

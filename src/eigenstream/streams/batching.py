"""Cut sources into batches, in order or shuffled, from any position, and read them ahead in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from eigenstream.core.host_batches import Part, join
from eigenstream.core.settings import check_count
from eigenstream.core.types import Tree
from eigenstream.streams.formats import open_source

#: A shuffling window consists of this many runs of consecutive rows.
STRETCHES = 16
#: Batches to read ahead.
AHEAD = 2


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

    def _total(self, batch: int) -> int:
        return min(self.batch_size, self.n_rows - batch * self.batch_size)

    def _own(self, batch: int) -> tuple[int, int]:
        total = self._total(batch)
        return (0, total) if self.share is None else self.share(total)

    def epoch(self, number: int, start: int = 0) -> Iterator[Tree]:
        """The batches of one epoch, starting at batch ``start``. Equal arguments give equal batches."""
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
        """Join runs of rows into windows, permute each window, and cut the result into batches."""
        n, size = self.n_rows, self.batch_size
        stretch = -(-min(n, max(size, self.window_numbers // self.width)) // STRETCHES)
        order = np.random.default_rng([self.random_state, number]).permutation(-(-n // stretch))
        windows = np.split(order, range(STRETCHES, len(order), STRETCHES))
        lengths = [sum(min(stretch, n - s * stretch) for s in window.tolist()) for window in windows]
        # The current batch, the number of its rows passed so far, and those rows that this process reads.
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
    """Touch every page of a memory map, so that the disk is read in this thread and not at first use."""
    if _is_mapped(view) and view.flags.c_contiguous:
        view.reshape(-1).view(np.uint8)[::4096].copy()


def _gather(
    sources: tuple[Any, ...], window: np.ndarray, stretch: int, few: bool
) -> Callable[[np.ndarray], tuple[Any, ...]]:
    """A function from positions in a window to rows. Files are read one run of rows at a time.

    If only a ``few`` rows are needed, a mapped file is read row by row instead.
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
    """Iterate in a background thread that keeps a queue of the next items.

    Parameters
    ----------
    items : iterable
    ahead : int
        Length of the queue.

    Examples
    --------
    >>> import eigenstream as es
    >>> list(es.streams.prefetch(iter(range(4)), ahead=2))
    [0, 1, 2, 3]
    """

    def __init__(self, items: Iterable[Any], ahead: int = AHEAD):
        self._stop = threading.Event()
        check_count("ahead", ahead)
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=ahead)
        self._ended = False
        # The thread holds no reference to this object, so deleting the object stops the thread.
        arguments = (iter(items), self._queue, self._stop)
        threading.Thread(target=_read_ahead, args=arguments, daemon=True, name="eigenstream-prefetch").start()

    def __iter__(self) -> prefetch:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        item, ending = self._queue.get()
        if ending is not None:
            self._ended = True
            raise ending
        return item

    def __del__(self) -> None:
        self._stop.set()


def _read_ahead(items: Iterator[Any], out: queue.Queue[Any], stop: threading.Event) -> None:
    """Put pairs ``(item, None)`` and at the end ``(None, exception)`` into a queue, until told to stop."""

    def put(item: Any, ending: BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                out.put((item, ending), timeout=0.1)
                return

    try:
        for item in items:
            put(item, None)
            if stop.is_set():
                return
            # Otherwise this name would keep the item in memory after the reader has freed it.
            del item
    except BaseException as error:
        put(None, error)
    else:
        put(None, StopIteration())

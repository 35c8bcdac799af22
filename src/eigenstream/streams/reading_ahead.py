"""Read an iterable before its items are needed."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from eigenstream.core.settings import check_count

T = TypeVar("T")

#: Batches to read ahead, or windows on their way to the device.
AHEAD = 2


def read_early(items: Iterator[T], ahead: int) -> Iterator[T]:
    """The same items, read ``ahead`` earlier."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > ahead:
            yield held.popleft()
    while held:
        yield held.popleft()


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

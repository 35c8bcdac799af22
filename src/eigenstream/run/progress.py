"""What a run shows and hears while it goes: a bar on the terminal, Ctrl-C, and what it looks out for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple


class Bar:
    """A progress bar on a terminal's standard error; nothing elsewhere.

    It tells rows per second, the time left where the end is known, the leading eigenvalues and the residual.
    """

    def __init__(self, wanted: bool, total: int | None):
        self._bar: Any = None
        if not wanted:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._words = ""

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def show(self, completed: int, rows: int, seconds: float, record: dict[str, Any] | None) -> None:
        if self._bar is None:
            return
        if record is not None and "eigenvalues" in record:
            leading = " ".join(f"{value:.4g}" for value in record["eigenvalues"][:4])
            measure = "shortfall" if "shortfall" in record else "residual"
            self._words = f"  {measure} {record[measure]:.2g}  eigenvalues {leading}"
        speed = rows / seconds if seconds > 0 else 0.0
        words = f"{rows:,} rows  {speed:,.0f} rows/s{self._words}"
        self._bar.update(self._task, completed=completed, description=words)

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


class Interrupts:
    """The first Ctrl-C is kept until the step under way is done, so that what was learned is whole; a second one acts.

    While a batch is awaited nothing is under way, and the first acts at once. One of several processes waits until all
    have agreed on it.
    """

    def __init__(self, alone: bool = True) -> None:
        self.heard = self.asked = False
        self._alone = alone
        self._waiting = False

    def __enter__(self) -> Interrupts:
        self._mine = threading.current_thread() is threading.main_thread()
        if self._mine:
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def _heard(self, number: int, frame: Any) -> None:
        if self.heard or (self._waiting and self._alone):
            raise KeyboardInterrupt
        self.heard, self.asked = True, self._alone

    def next(self, iterator: Any, end: Any) -> Any:
        """The next item of an iterator, or ``end``: also when a Ctrl-C comes first."""
        try:
            self._waiting = True
            return end if self.asked else next(iterator, end)
        except KeyboardInterrupt:
            if not self._alone:
                raise
            self.heard = self.asked = True
            return end
        finally:
            self._waiting = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine and self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class StopRules(NamedTuple):
    """When a run stops before its stream does, and what is told on the way."""

    callbacks: tuple[Callable[[dict[str, Any]], Any], ...]
    tol: float | None
    max_steps: int | None
    checkpointer: Any
    #: When the run started, by the monotonic clock.
    started: float

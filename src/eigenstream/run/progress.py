"""Progress bar, Ctrl-C and stop rules of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple


class Bar(ExitStack):
    """A progress bar on standard error, if that is a terminal.

    It shows rows per second, the time left if the length is known, the leading eigenvalues and the residual.
    """

    def __init__(self, wanted: bool, total: int | None):
        super().__init__()
        self._bar: Any = None
        if not wanted:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = self.enter_context(Progress(*columns, console=console, transient=True))
            self._task = self._bar.add_task("", total=total)
            self._eigenvalues = ""

    def show(self, completed: int, rows: int, seconds: float, record: dict[str, Any] | None) -> None:
        if self._bar is None:
            return
        if record is not None and "eigenvalues" in record:
            leading = " ".join(f"{value:.4g}" for value in record["eigenvalues"][:4])
            measure = "shortfall" if "shortfall" in record else "residual"
            self._eigenvalues = f"  {measure} {record[measure]:.2g}  eigenvalues {leading}"
        speed = rows / seconds if seconds > 0 else 0.0
        description = f"{rows:,} rows  {speed:,.0f} rows/s{self._eigenvalues}"
        self._bar.update(self._task, completed=completed, description=description)


class Interrupts:
    """Delays the first Ctrl-C until the end of the current step, so that the state stays consistent.

    While the next batch is being read, the first Ctrl-C stops the run at once; a second one always does. With several
    processes (``alone=False``) the run stops when all have agreed.
    """

    def __init__(self, alone: bool = True) -> None:
        self.heard = self.asked = False
        self._alone = alone
        self._waiting = False

    def __enter__(self) -> Interrupts:
        # Python allows signal handlers in the main thread only.
        in_main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._on_interrupt) if in_main else None
        return self

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self.heard or (self._waiting and self._alone):
            raise KeyboardInterrupt
        self.heard, self.asked = True, self._alone

    def next(self, iterator: Any, end: Any) -> Any:
        """The next item of an iterator; ``end`` if there is none or Ctrl-C was pressed."""
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

    def __exit__(self, *exception: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class StopRules(NamedTuple):
    """When a run stops before the end of its stream, and what it calls after each snapshot."""

    callbacks: tuple[Callable[[dict[str, Any]], Any], ...]
    tol: float | None
    max_steps: int | None
    checkpointer: Any
    #: Start of the run on the monotonic clock.
    started: float

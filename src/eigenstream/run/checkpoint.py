"""What survives the process: checkpoints of a run under way, and small files written all at once."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eigenstream.distributed import is_first, wait

#: Checkpoints kept, the newest.
KEEP = 3


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a kill, sees the old or the new one and nothing between; by one process."""
    if not is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    new.replace(path)


class Checkpoints:
    """Orbax checkpoints in a folder: arrays and a few plain values, written atomically, the newest few kept.

    Parameters
    ----------
    folder : Path
    every : float
        Seconds between two checkpoints.
    """

    def __init__(self, folder: Path, every: float):
        # Orbax is slow to import and most runs have no folder.
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP, enable_async_checkpointing=False, cleanup_tmp_directories=True, create=True
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "values": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        self.every, self._last = every, time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self.every

    def save(self, step: int, arrays: list[Any], values: dict[str, Any]) -> None:
        """Write a checkpoint, unless this step has one."""
        # Orbax refuses arrays without elements; they are what a fresh state has in their place.
        state = {str(i): _given(x) for i, x in enumerate(arrays) if np.size(x)}
        if step not in self._manager.all_steps():
            parts = self._args.Composite(state=self._args.StandardSave(state), values=self._args.JsonSave(values))
            self._manager.save(step, args=parts)
        self._last = time.monotonic()

    def latest(self) -> tuple[dict[int, np.ndarray], dict[str, Any]] | None:
        """The newest checkpoint's arrays, by their place, and values; None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        # Whole, on the host, whatever devices they were on.
        kept = self._manager.item_metadata(step)["state"].tree
        wanted = {i: np.broadcast_to(np.zeros((), like.dtype), like.shape) for i, like in kept.items()}
        parts = self._args.Composite(state=self._args.StandardRestore(wanted), values=self._args.JsonRestore())
        found = self._manager.restore(step, args=parts)
        return {int(i): np.asarray(x) for i, x in found["state"].items()}, dict(found["values"])

    def close(self) -> None:
        self._manager.close()


def _given(x: Any) -> Any:
    """As Orbax takes it: a host array, or one whose parts several processes write."""
    return x if isinstance(x, jax.Array) and not x.is_fully_addressable else np.asarray(x)


class Metrics:
    """``metrics.jsonl``: one line for every look at a run, written by one process."""

    def __init__(self, path: Path, last_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        # What a killed run wrote after its last checkpoint happens again.
        lines = [(line, json.loads(line)) for line in _whole_lines(path)]
        kept = [(line, record) for line, record in lines if record["step"] <= last_step]
        self.history = [record for _, record in kept]
        wait("metrics read")
        write_atomically(path, "".join(line + "\n" for line, _ in kept).encode())
        self._file = path.open("a") if is_first() else None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(plain(record)) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Have it on the disk, not only in the system's memory."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    # A kill may have cut the last line; every whole one ends with a newline.
    return [line for line in lines[:-1] if line]


def plain(value: Any) -> Any:
    """Nested values as JSON holds them, to the last bit; what JSON has no form for, by its name."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
        return {"name": type(value).__name__, **fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    # Two schedules of one kind differ in what they close over.
    return [name, plain(closed)] if closed else name


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its checkpoints and metrics."""

    path: Path
    #: Settings that must be the same when the run is resumed.
    settings: dict[str, Any]
    resume: bool = False
    #: Seconds between two checkpoints.
    every: float = 60.0


class Checkpointer:
    """Writes a run's checkpoints and metrics to its folder, and reads them back; without a folder, does nothing.

    A run has ``engine.saveable()``, the solver's arrays, ``values()``, plain numbers, and ``restore`` for both.
    """

    def __init__(self, run: Any, folder: RunFolder | None):
        self._run, self._checkpoints = run, None
        if folder is None:
            return
        self._settings = plain(folder.settings)
        self._checkpoints = Checkpoints(folder.path / "checkpoints", folder.every)
        found = self._checkpoints.latest()
        held = found is not None or (folder.path / "metrics.jsonl").exists()
        wait("folder looked at")
        if held and not folder.resume:
            self._checkpoints.close()
            raise ValueError(f"{folder.path} holds a run: give resume=True to go on, or another folder")
        if found is not None:
            arrays, values = found
            before = values.pop("settings")
            differ = [key for key in self._settings if self._settings[key] != before.get(key)]
            if differ:
                self._checkpoints.close()
                seen = ", ".join(f"{key} {before.get(key)!r}, now {self._settings[key]!r}" for key in differ)
                raise ValueError(f"{folder.path} was begun with other settings ({seen}): resume with the same")
        self._metrics = Metrics(folder.path / "metrics.jsonl", 0 if found is None else values["steps"])
        if found is not None:
            run.restore(arrays, values, self._metrics.history)

    def save(self) -> None:
        arrays = None if self._checkpoints is None else self._run.engine.saveable()
        if self._checkpoints is not None and arrays is not None:
            self._metrics.sync()
            self._checkpoints.save(self._run.steps, arrays, plain(self._run.values()) | {"settings": self._settings})

    def is_due(self) -> bool:
        """Whether it is time to save, by the clock of the process that writes."""
        return self._checkpoints is not None and is_first() and self._checkpoints.due()

    def write(self, record: dict[str, Any]) -> None:
        if self._checkpoints is not None:
            self._metrics.write(record)

    def close(self) -> None:
        if self._checkpoints is not None:
            self._metrics.close()
            self._checkpoints.close()

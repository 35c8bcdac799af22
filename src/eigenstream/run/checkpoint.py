"""Checkpoints and metrics of a run, and atomic writes of small files."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from eigenstream.distributed import is_first, wait

#: Older checkpoints are deleted.
KEEP = 3

#: A checkpoint's arrays by position, and its plain values.
Checkpoint = tuple[dict[int, np.ndarray], dict[str, Any]]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that it is always complete. Only the first process writes."""
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
    """Orbax checkpoints of arrays and plain values in a folder; one is due every ``every`` seconds."""

    def __init__(self, folder: Path, every: float):
        # Imported here because Orbax is slow to import and most runs have no folder.
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
        # Host arrays, or arrays sharded over processes, each of which writes its shards. Orbax rejects empty arrays:
        # they are omitted, and a restored state keeps its own.
        shared = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in arrays]
        state = {str(i): x if shared[i] else np.asarray(x) for i, x in enumerate(arrays) if np.size(x)}
        if step not in self._manager.all_steps():
            parts = self._args.Composite(state=self._args.StandardSave(state), values=self._args.JsonSave(values))
            self._manager.save(step, args=parts)
        self._last = time.monotonic()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        step = self._manager.latest_step()
        if step is None:
            return None
        # Restore whole host arrays, whatever their sharding was.
        kept = self._manager.item_metadata(step)["state"].tree
        wanted = {i: np.broadcast_to(np.zeros((), like.dtype), like.shape) for i, like in kept.items()}
        parts = self._args.Composite(state=self._args.StandardRestore(wanted), values=self._args.JsonRestore())
        found = self._manager.restore(step, args=parts)
        return {int(i): np.asarray(x) for i, x in found["state"].items()}, dict(found["values"])

    def close(self) -> None:
        self._manager.close()


def plain(value: Any) -> Any:
    """Convert nested values to JSON types without loss; other objects become their names."""
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
    # Two schedules of the same kind differ only in their closures.
    closure = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return [name, plain(closure)] if closure else name


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run's checkpoints and metrics."""

    path: Path
    #: A run can be resumed only with equal settings.
    settings: dict[str, Any]
    resume: bool = False
    #: Seconds between two checkpoints.
    every: float = 60.0


class Checkpointer:
    """Writes a run's checkpoints and ``metrics.jsonl`` to its folder and reads them back. No folder: does nothing.

    ``run.engine.saveable()`` gives the solver's arrays, ``run.values()`` plain numbers; ``run.restore`` takes both.
    """

    def __init__(self, run: Any, folder: RunFolder | None):
        self._run = run
        self._checkpoints: Checkpoints | None = None
        #: Open in the first process only.
        self._metrics: TextIO | None = None
        if folder is None:
            return
        # What "auto" chose, and for sums the number of rows that a position in the stream counts.
        self._used = {"solver used": type(run.solver).__name__, "rows at once": run.engine.block_rows}
        self._settings = plain({**folder.settings, **self._used})
        checkpoints, metrics = Checkpoints(folder.path / "checkpoints", folder.every), folder.path / "metrics.jsonl"
        try:
            found = self._resumable(folder, checkpoints.latest(), metrics.exists())
        except ValueError:
            checkpoints.close()
            raise
        self._checkpoints = checkpoints
        history = self._open_metrics(metrics, {"steps": 0} if found is None else found[1])
        if found is not None:
            run.restore(*found, history)

    def _resumable(self, folder: RunFolder, found: Checkpoint | None, has_metrics: bool) -> Checkpoint | None:
        """The checkpoint to resume from, if there is one; an error if the folder holds another run."""
        wait("folder read")
        if (found is not None or has_metrics) and not folder.resume:
            raise ValueError(f"{folder.path} holds a run: give resume=True to continue it, or another folder")
        if found is not None:
            before, now = found[1].pop("settings"), self._settings
            # Version 0.1 did not write what was used; only positions of sums depend on it.
            known = [key for key in now if key in before or key not in self._used or self._run.engine.sums_rows]
            differ = [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in known if now[key] != before.get(key)]
            if differ:
                seen = ", ".join(differ)
                raise ValueError(f"{folder.path} was begun with other settings ({seen}): resume with the same")
        return found

    def _open_metrics(self, path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Open the file to append to it; return its records."""
        lines = path.read_text().split("\n") if path.exists() else [""]
        # The last line has no newline: it is empty, or a kill has cut it.
        records = [json.loads(line) for line in lines[:-1] if line]
        # The resumed run repeats what came after its checkpoint. Checkpoints of version 0.1 do not count records.
        records = [record for record in records if record["step"] <= values["steps"]][: values.get("records")]
        wait("metrics read")
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in records).encode())
        if is_first():
            self._metrics = path.open("a")
        return records

    def save(self) -> None:
        if self._checkpoints is None or (arrays := self._run.engine.saveable()) is None:
            return
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        self._checkpoints.save(self._run.steps, arrays, plain(self._run.values()) | {"settings": self._settings})

    def is_due(self) -> bool:
        """Whether it is time to save, by the clock of the first process."""
        return self._checkpoints is not None and is_first() and self._checkpoints.due()

    def write(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(plain(record)) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        for file in (self._metrics, self._checkpoints):
            if file is not None:
                file.close()

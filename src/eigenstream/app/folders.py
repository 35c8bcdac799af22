"""The output folder of a command-line run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from eigenstream.distributed import is_first, wait
from eigenstream.estimators.model_files import saved_status
from eigenstream.run.checkpoint import write_atomically
from eigenstream.run.result import Status


def claim(out: Path, started: dict[str, Any], resume: bool, overwrite: bool) -> bool:
    """Prepare ``out`` for this run. True if it already holds this run, finished."""
    path = out / "config.json"
    if overwrite:
        clear(out)
    wait("cleared")
    before = json.loads(path.read_text()) if path.exists() else None
    wait("read")
    if before is None:
        write_atomically(path, (json.dumps({"run": started}, indent=1) + "\n").encode())
        return False
    if not resume:
        raise ValueError(f"{out} holds a run: give --resume to continue it, --overwrite, or another --out")
    if before.get("run") != started:
        differ = [key for key in started if before.get("run", {}).get(key) != started[key]]
        raise ValueError(f"{out} holds a run with other {', '.join(differ)}: resume with the same, or another --out")
    # An interrupted run saves a model too.
    return "learned" in before and saved_status(before["learned"]) != Status.INTERRUPTED


def clear(out: Path) -> None:
    """Delete the files of a run and nothing else."""
    if not is_first():
        return
    for name in ("checkpoints", "metrics.jsonl", "model.safetensors", "statistics.safetensors", "config.json"):
        old = out / name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)

"""Arguments of the command line as objects: solvers with their settings, sources as they are recorded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from eigenstream import streams
from eigenstream.estimators.model_files import OPTIMIZERS
from eigenstream.solvers.choice import SOLVERS


def named_solver(name: str, options: list[str]) -> Any:
    """The solver's name, or with options a solver object."""
    if name != "auto" and name not in SOLVERS:
        raise ValueError(f"--solver {name}: give auto, {', '.join(SOLVERS)}")
    if not options:
        return name
    if name == "auto":
        raise ValueError("--option needs a named --solver")
    kind: Any = SOLVERS[name]
    fields = {f.name for f in dataclasses.fields(kind)}
    settings: dict[str, Any] = {}
    for item in options:
        key, _, value = item.partition("=")
        if key not in fields:
            raise ValueError(f"--option {item}: {name} has the settings {', '.join(sorted(fields))}")
        if key == "optimizer":
            if value not in OPTIMIZERS:
                raise ValueError(f"--option {item}: give {' or '.join(OPTIMIZERS)}")
            settings[key] = OPTIMIZERS[value]
            continue
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"--option {item}: give a number, true, false or null") from None
    return kind(**settings)


def shape_and_dtype(path: str) -> dict[str, Any]:
    source = streams.open_source(path)
    return {"path": path, "shape": [int(n) for n in source.shape], "dtype": str(source.dtype)}

"""The files of a fitted estimator, ``model.safetensors`` and ``config.json``; they hold no code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh
from safetensors.numpy import save as save_tensors

from eigenstream.run.checkpoint import plain, write_atomically
from eigenstream.run.result import Status
from eigenstream.solvers.choice import SOLVERS

FORMAT = 1
OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


def save(estimator: Any, folder: Path, **more: Any) -> None:
    """Write a fitted estimator, with ``more`` values in its config."""
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    estimator.solver_  # noqa: B018 - computes the solution after partial_fit
    for name, value in vars(estimator).items():
        if name.startswith("_") or not name.endswith("_") or name in ("solver_", "affinity_matrix_", "history_"):
            continue
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            tensors[name] = np.ascontiguousarray(value)
        elif isinstance(value, list) and value and all(isinstance(item, np.ndarray) for item in value):
            tensors |= {f"{name}.{i}": np.ascontiguousarray(item) for i, item in enumerate(value)}
        else:
            values[name] = plain(value)
    config = {
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "parameters": {name: _parameter(value) for name, value in estimator.get_params(deep=False).items()},
        "solver": _parameter(estimator.solver_),
        "learned": values,
        **more,
    }
    # The tensors first: a new config never lies beside an old model.
    write_atomically(folder / "model.safetensors", save_tensors(tensors))
    write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def _parameter(value: Any) -> Any:
    """A setting as JSON: a solver as its name and settings; any other object as its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _parameter(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"solver": type(value).__name__, "settings": fields}
    if isinstance(value, Mesh):
        # The devices of this machine mean nothing on another.
        return None
    named = [name for name, optimizer in OPTIMIZERS.items() if value is optimizer]
    return {"optimizer": named[0]} if named else plain(value)


def restored(value: Any) -> Any:
    """A setting from its JSON."""
    if not isinstance(value, dict):
        return value
    if "optimizer" in value:
        return OPTIMIZERS.get(value["optimizer"], optax.sgd)
    kind = {kind.__name__: kind for kind in SOLVERS.values()}.get(value.get("solver", ""))
    if kind is None:
        return None
    settings = {name: restored(item) for name, item in value["settings"].items()}
    # A schedule is code, so only its name was saved: use the default in its place.
    return kind(**{name: item for name, item in settings.items() if not isinstance(item, str | list)})


def saved_status(learned: dict[str, Any]) -> str:
    """The status in a model's config."""
    if "status_" in learned:
        return learned["status_"]
    # Models of version 0.1 have no status, but the message says whether the run was interrupted.
    if learned["message_"].startswith("interrupted"):
        return str(Status.INTERRUPTED)
    return str(Status.CONVERGED if learned["converged_"] else Status.NOT_CONVERGED)

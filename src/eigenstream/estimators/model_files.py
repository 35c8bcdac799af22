"""Save and load fitted estimators: ``model.safetensors`` and ``config.json``, which hold no code.

``statistics.safetensors`` holds the exact solver's sums if they are asked for: what a checkpoint holds.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from eigenstream.core.types import Tree
from eigenstream.distributed import is_first
from eigenstream.estimators import merging
from eigenstream.run.checkpoint import plain, write_atomically
from eigenstream.run.result import Status
from eigenstream.solvers.choice import SOLVERS

FORMAT = 1
STATISTICS = "statistics.safetensors"
OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


def save(estimator: Any, folder: Path, statistics: bool = False, **more: Any) -> None:
    """Write a fitted estimator, with its sums if ``statistics``, and with ``more`` values in its config."""
    sums = merging.engine_with_sums(estimator, "the model").flushed().saveable() if statistics else None
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
    if is_first():
        (folder / STATISTICS).unlink(missing_ok=True)
    # The tensors first: a new config never lies beside an old model, nor a model beside the sums of another.
    write_atomically(folder / "model.safetensors", save_tensors(tensors))
    if sums is not None:
        _save_sums(estimator._run, sums, folder / STATISTICS)
    write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def load(folder: str | Path) -> Any:
    """Read a fitted estimator that ``save`` or ``eigenstream fit`` wrote. No code is executed.

    Parameters
    ----------
    folder : str or Path

    Returns
    -------
    estimator
        Ready for ``transform``, ``predict`` and so on; for ``partial_fit`` and ``merge`` if it was saved with
        ``statistics=True``.

    Examples
    --------
    >>> import tempfile, numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(100, 3))
    >>> folder = tempfile.mkdtemp()
    >>> pca = es.PCA(n_components=2).fit(X)
    >>> pca.save(folder)
    >>> bool((es.load(folder).transform(X) == pca.transform(X)).all())
    True
    """
    # Here, because the estimators import this module.
    from eigenstream import estimators

    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists() or not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder} holds no finished model: config.json and model.safetensors are needed")
    config = json.loads(path.read_text())
    kind: Any = getattr(estimators, str(config.get("estimator")), None)
    if config.get("format") != FORMAT or not hasattr(kind, "fit_stream"):
        raise ValueError(f"{path} is not a model of this version: fit it again")
    estimator: Any = kind(**{name: _restored(value) for name, value in config["parameters"].items()})
    tensors = load_tensors((folder / "model.safetensors").read_bytes())
    for name in sorted({name.rpartition(".")[0] for name in tensors if "." in name}):
        count = sum(key.startswith(f"{name}.") for key in tensors)
        setattr(estimator, name, [tensors.pop(f"{name}.{i}") for i in range(count)])
    learned = config["learned"] | {"status_": saved_status(config["learned"])}
    values = {name: np.array(value) if isinstance(value, list) else value for name, value in learned.items()}
    vars(estimator).update(tensors | values, solver_=_restored(config["solver"]), history_=[])
    if (folder / STATISTICS).exists():
        _load_sums(estimator, folder / STATISTICS)
    return estimator


def _save_sums(run: Any, sums: list[Any], path: Path) -> None:
    arrays = {str(i): np.asarray(x, order="C") for i, x in enumerate(sums)}
    template = jax.tree.map(lambda leaf: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}, run.template)
    values = {"template": template, "values": plain(run.values())}
    write_atomically(path, save_tensors(arrays, {name: json.dumps(value) for name, value in values.items()}))


def _load_sums(estimator: Any, path: Path) -> None:
    """Give the estimator the run whose sums these are."""
    with safe_open(path, "numpy") as file:
        arrays = {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        kept = {name: json.loads(value) for name, value in file.metadata().items()}
    problem = estimator._problem()
    run = merging.begun(estimator, problem, estimator.solver_, problem.blank(_template(kept["template"])))
    run.restore(arrays, kept["values"], [])
    estimator._run, estimator._stale = run, False


def _template(kept: Any) -> Tree:
    """The shapes of one row from their JSON."""
    if isinstance(kept, list):
        return tuple(map(_template, kept))
    if isinstance(kept.get("shape"), list):
        return jax.ShapeDtypeStruct(tuple(kept["shape"]), kept["dtype"])
    return {name: _template(part) for name, part in kept.items()}


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


def _restored(value: Any) -> Any:
    """A setting from its JSON."""
    if not isinstance(value, dict):
        return value
    if "optimizer" in value:
        return OPTIMIZERS.get(value["optimizer"], optax.sgd)
    kind = {kind.__name__: kind for kind in SOLVERS.values()}.get(value.get("solver", ""))
    if kind is None:
        return None
    settings = {name: _restored(item) for name, item in value["settings"].items()}
    # A schedule is code, so only its name was saved: use the default in its place.
    return kind(**{name: item for name, item in settings.items() if not isinstance(item, str | list)})


def saved_status(learned: dict[str, Any]) -> str:
    """The status in a model's config."""
    if "status_" in learned:
        return learned["status_"]
    # Models of version 0.1 have no status: their message tells.
    said = {"interrupted": Status.INTERRUPTED, "solved exactly": Status.SOLVED, "a step near number": Status.FAILED}
    ended = Status.CONVERGED if learned["converged_"] else Status.NOT_CONVERGED
    return str(next((status for words, status in said.items() if learned["message_"].startswith(words)), ended))

"""Load fitted estimators from the files that `model_files` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors

from eigenstream.estimators.ica import ICA
from eigenstream.estimators.lda import LDA
from eigenstream.estimators.model_files import FORMAT, restored, saved_status
from eigenstream.estimators.multiview import MultiviewCCA
from eigenstream.estimators.pairs import CCA, PLS
from eigenstream.estimators.pca import PCA
from eigenstream.estimators.spectral import SpectralClustering, SpectralEmbedding

KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (CCA, ICA, LDA, MultiviewCCA, PCA, PLS, SpectralClustering, SpectralEmbedding)
}


def load(folder: str | Path) -> Any:
    """Read a fitted estimator that ``save`` or ``eigenstream fit`` wrote. No code is executed.

    Parameters
    ----------
    folder : str or Path

    Returns
    -------
    estimator
        Ready for ``transform``, ``predict`` and so on. ``partial_fit`` raises: its sums were not saved.

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
    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists() or not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder} holds no finished model: config.json and model.safetensors are needed")
    config = json.loads(path.read_text())
    if config.get("format") != FORMAT or config.get("estimator") not in KINDS:
        raise ValueError(f"{path} is not a model of this version: fit it again")
    estimator: Any = KINDS[config["estimator"]](**{k: restored(v) for k, v in config["parameters"].items()})
    tensors = load_tensors((folder / "model.safetensors").read_bytes())
    for name in sorted({name.rpartition(".")[0] for name in tensors if "." in name}):
        count = sum(key.startswith(f"{name}.") for key in tensors)
        setattr(estimator, name, [tensors.pop(f"{name}.{i}") for i in range(count)])
    learned = config["learned"] | {"status_": saved_status(config["learned"])}
    values = {name: np.array(value) if isinstance(value, list) else value for name, value in learned.items()}
    vars(estimator).update(tensors | values, solver_=restored(config["solver"]), history_=[])
    return estimator

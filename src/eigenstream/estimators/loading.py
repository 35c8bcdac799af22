"""Fitted estimators from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eigenstream import models
from eigenstream.estimators.cross import CCA, PLS
from eigenstream.estimators.ica import ICA
from eigenstream.estimators.lda import LDA
from eigenstream.estimators.multiview import MultiviewCCA
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
        Ready for ``transform``, ``predict`` and so on; ``partial_fit`` starts anew.

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
    return models.read(Path(folder), KINDS)

"""Data sets of the paper, and small data sets for examples."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

__all__ = [
    "cifar10",
    "cifar10_halves",
    "digits_halves",
    "folder",
    "mediamill",
    "mediamill_like",
    "mixed_signals",
    "mnist",
    "mnist_halves",
]


def folder() -> Path:
    """The folder of data files: ``EIGENSTREAM_DATA``, by default ``~/.cache/eigenstream``."""
    return Path(os.environ.get("EIGENSTREAM_DATA", "~/.cache/eigenstream")).expanduser()


def _load(name: str, openml: str, shape: tuple[int, ...], train: int) -> dict[str, np.ndarray]:
    path = folder() / f"{name}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as data:
            return dict(data)
    from sklearn.datasets import fetch_openml

    images, labels = fetch_openml(openml, version=1, return_X_y=True, as_frame=False)
    images, labels = images.astype(np.uint8).reshape(-1, *shape), labels.astype(np.uint8)
    if len(shape) == 3:
        images = np.moveaxis(images, 1, -1)
    arrays = {"x_train": images[:train], "y_train": labels[:train], "x_test": images[train:], "y_test": labels[train:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return arrays


def mnist() -> dict[str, np.ndarray]:
    """MNIST, ``x_train`` (60000, 28, 28) and so on, bytes, from the data folder or from OpenML."""
    return _load("mnist", "mnist_784", (28, 28), 60_000)


def cifar10() -> dict[str, np.ndarray]:
    """CIFAR-10, ``x_train`` (50000, 32, 32, 3) and so on, bytes, from the data folder or from OpenML."""
    return _load("cifar10", "CIFAR_10", (3, 32, 32), 50_000)


def mnist_halves() -> tuple[np.ndarray, np.ndarray]:
    """Columns 0 to 391 and 392 to 783 of MNIST's flattened training digits, in [0, 1], float32."""
    Z = mnist()["x_train"].reshape(60_000, -1).astype(np.float32) / 255
    return Z[:, :392], Z[:, 392:]


def cifar10_halves() -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower 16 rows of CIFAR-10's images, training and test together, (60000, 1536) each, in [0, 1]."""
    data = cifar10()
    Z = np.concatenate([data["x_train"], data["x_test"]]).astype(np.float32) / 255
    return tuple(np.ascontiguousarray(half).reshape(len(Z), -1) for half in (Z[:, :16], Z[:, 16:]))  # type: ignore


def mediamill() -> tuple[np.ndarray, np.ndarray]:
    """Mediamill's 120 video features and 101 labels, (43907, 120) and (43907, 101), float32.

    Read from ``train-exp1.svm`` and ``test-exp1.svm`` of the LIBSVM collection, in ``mediamill/`` of the data folder.
    """
    from sklearn.datasets import load_svmlight_file

    files = [folder() / "mediamill" / f"{part}-exp1.svm" for part in ("train", "test")]
    missing = [str(path) for path in files if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)}: put LIBSVM's Mediamill (exp1) there, or use mediamill_like()")
    parts = [load_svmlight_file(path, n_features=120, multilabel=True) for path in files]
    X = np.concatenate([features.toarray() for features, _ in parts]).astype(np.float32)
    Y = np.zeros((len(X), 101), np.float32)
    for row, names in enumerate(names for _, labels in parts for names in labels):
        Y[row, np.asarray(names, int)] = 1
    return X, Y


def mediamill_like(n: int = 25_800, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Synthetic data like Mediamill: 120 features in [0, 1] and 101 sparse labels of ``n`` shots, float32.

    Shots have 20 latent concepts of power-law variance. Features are logistic functions of the concepts and of noise,
    scaled so that their covariance is ill-conditioned. The most frequent label is on in a third of the shots, the
    rarest in one of 500, and at least in one.

    Examples
    --------
    >>> import eigenstream as es
    >>> X, Y = es.datasets.mediamill_like(1000)
    >>> X.shape, Y.shape, float(Y.max())
    ((1000, 120), (1000, 101), 1.0)
    """
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 20)) / np.arange(1, 21) ** 0.5
    mixed = z @ rng.normal(size=(20, 120)) + 0.3 * rng.normal(size=(n, 120))
    X = 1 / (1 + np.exp(-(mixed * rng.uniform(0.1, 1, 120) - 1)))
    common = np.geomspace(1 / 3, 1 / 500, 101)
    logits = 2 * z @ rng.normal(size=(20, 101)) + rng.logistic(size=(n, 101))
    ranks = np.minimum(n * (1 - common), n - 2).astype(int)
    Y = logits > np.sort(logits, axis=0)[ranks, np.arange(101)]
    return X.astype(np.float32), Y.astype(np.float32)


def digits_halves() -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower halves of scikit-learn's 8×8 digits, (1797, 32) each, float32.

    Examples
    --------
    >>> import eigenstream as es
    >>> upper, lower = es.datasets.digits_halves()
    >>> upper.shape, lower.shape
    ((1797, 32), (1797, 32))
    """
    from sklearn.datasets import load_digits

    Z = load_digits().data.astype(np.float32) / 16
    return Z[:, :32], Z[:, 32:]


def mixed_signals(n: int = 2000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three mixed signals and their sources, both ``(n, 3)``: scikit-learn's example of blind source separation.

    The mixtures are centred, as in the paper's experiment.

    Examples
    --------
    >>> import eigenstream as es
    >>> X, S = es.datasets.mixed_signals()
    >>> X.shape, S.shape
    ((2000, 3), (2000, 3))
    """
    from scipy import signal

    time = np.linspace(0, 8, n)
    S = np.c_[np.sin(2 * time), np.sign(np.sin(3 * time)), signal.sawtooth(2 * np.pi * time)]
    S = S + 0.2 * np.random.RandomState(seed).normal(size=S.shape)
    S = S / S.std(axis=0)
    X = S @ np.array([[1, 1, 1], [0.5, 2, 1.0], [1.5, 1.0, 2.0]]).T
    return X - X.mean(0), S

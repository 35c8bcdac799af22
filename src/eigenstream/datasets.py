"""Data sets of the paper and small ones to try things on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

__all__ = ["cifar10", "digits_halves", "folder", "mixed_signals", "mnist", "mnist_halves"]


def folder() -> Path:
    """Where data files are looked for: ``EIGENSTREAM_DATA``, by default ``~/.cache/eigenstream``."""
    return Path(os.environ.get("EIGENSTREAM_DATA", "~/.cache/eigenstream")).expanduser()


def _load(name: str, openml: str, shape: tuple[int, ...], train: int) -> dict[str, np.ndarray]:
    path = folder() / f"{name}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as data:
            return dict(data)
    from sklearn.datasets import fetch_openml

    images, labels = fetch_openml(openml, version=1, return_X_y=True, as_frame=False)
    images = images.astype(np.uint8).reshape(-1, *shape)
    if len(shape) == 3:
        images = images.reshape(-1, shape[2], *shape[:2]).transpose(0, 2, 3, 1)
    labels = labels.astype(np.uint8)
    arrays = {"x_train": images[:train], "y_train": labels[:train], "x_test": images[train:], "y_test": labels[train:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return arrays


def mnist() -> dict[str, np.ndarray]:
    """MNIST, ``x_train`` (60000, 28, 28) of bytes and so on, from the data folder or else from OpenML."""
    return _load("mnist", "mnist_784", (28, 28), 60_000)


def cifar10() -> dict[str, np.ndarray]:
    """CIFAR-10, ``x_train`` (50000, 32, 32, 3) of bytes and so on, from the data folder or else from OpenML."""
    return _load("cifar10", "CIFAR_10", (32, 32, 3), 50_000)


def mnist_halves() -> tuple[np.ndarray, np.ndarray]:
    """Columns 0 to 391 and 392 to 783 of MNIST's flattened training digits, in [0, 1], float32."""
    Z = mnist()["x_train"].reshape(60_000, -1).astype(np.float32) / 255
    return Z[:, :392], Z[:, 392:]


def digits_halves() -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower halves of scikit-learn's embedded 8×8 digits, (1797, 32) each, float32.

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
    """Three mixed signals and their sources: scikit-learn's blind source separation example, both ``(n, 3)``.

    The mixtures are centred, as the paper's experiment takes them.

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

"""Problems with known answers for the benchmarks: two views, their exact correlations, and streams of their rows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np

import eigenstream as es

BATCH = 100
#: The rank of sketches of the game in the benchmarks of streams.
RANK = 256
Views = tuple[np.ndarray, np.ndarray]


def log_uniform(condition: float) -> Callable[[int], np.ndarray]:
    """Standard deviations of a covariance with this condition number."""
    return lambda d: np.logspace(0, -np.log10(condition) / 2, d)


USUAL = log_uniform(1e3)


def planted(
    n: int,
    dims: tuple[int, ...],
    deviations: Callable[[int], np.ndarray] = USUAL,
    rho: Any = None,
    seed: int = 0,
) -> tuple[np.ndarray, ...]:
    """Views with planted correlations in random directions; ``deviations(d)`` are the standard deviations of a view."""
    rng = np.random.default_rng(seed)
    rho = np.linspace(0.95, 0.5, 8) if rho is None else np.asarray(rho)
    z = rng.normal(size=(n, len(rho)))
    views = []
    for d in dims:
        noise = rng.normal(size=(n, d))
        noise[:, : len(rho)] = np.sqrt(rho) * z + np.sqrt(1 - rho) * noise[:, : len(rho)]
        rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
        views.append(((noise * rng.permutation(deviations(d))) @ rotation.T).astype(np.float32))
    return tuple(views)


@cache
def problem(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two views and their exact correlations."""
    if name == "mnist":
        Z = es.datasets.mnist()["x_train"].reshape(60_000, -1).astype(np.float32) / 255
        X, Y = Z[:, :392], Z[:, 392:]
    elif name == "cifar10":
        data = es.datasets.cifar10()
        Z = np.concatenate([data["x_train"], data["x_test"]]).astype(np.float32) / 255
        X, Y = Z[:, :16].reshape(len(Z), -1), Z[:, 16:].reshape(len(Z), -1)
    elif name == "flat":
        X, Y = planted(30_000, (800, 600))
    elif name == "collinear":
        X, Y = collinear()
    elif name == "steep":
        X, Y = planted(20_000, (400, 300), lambda d: np.arange(1, d + 1) ** -1.0, np.linspace(0.95, 0.3, 32))
    elif name == "few":
        X, Y = planted(4000, (400, 300), lambda d: np.arange(1, d + 1) ** -0.5, np.linspace(0.95, 0.3, 16))
    else:
        X, Y = planted(60_000, (200, 150))
    X, Y = np.ascontiguousarray(X), np.ascontiguousarray(Y)
    return X, Y, correlations(X, Y)


def correlations(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Exact canonical correlations; rows in float64, so that directions of small variance count."""
    parts = [
        (X[lo : lo + 5000].astype(np.float64), Y[lo : lo + 5000].astype(np.float64)) for lo in range(0, len(X), 5000)
    ]
    return es.solve(es.problems.cca(), parts, min(X.shape[1], Y.shape[1], 100), "exact").eigenvalues


def tcc(X: np.ndarray, Y: np.ndarray, V: np.ndarray, rho: np.ndarray) -> float:
    """Canonical correlations of the projected views, summed, relative to the exact top-k sum."""
    cut = X.shape[1]
    return es.metrics.tcc(X @ V[:cut], Y @ V[cut:], rho)


def batches(X: np.ndarray, Y: np.ndarray, seed: int, size: int = BATCH) -> list[Views]:
    """The rows in the order of a seed."""
    order = np.random.default_rng(1000 + seed).permutation(len(X))
    X, Y = X[order], Y[order]
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


def solved(
    name: str, k: int, seed: int = 0, solver: Any = None, size: int = BATCH, **options: Any
) -> tuple[Any, float]:
    """The result of one run on a named problem, and its TCC."""
    X, Y, rho = problem(name)
    # A budget too small for the rows, so that they are streamed.
    options = {"memory_budget": 1, **options}
    solver = es.solvers.Game(rank=RANK) if solver is None else solver
    result = es.solve(es.problems.cca(), batches(X, Y, seed, size), k, solver, random_state=seed, **options)
    return result, tcc(X, Y, result.V, rho)


def in_processes(f: Callable[[Any], Any], jobs: list[Any]) -> list[Any]:
    """``f`` of every job, in as many processes of one thread each as there are processors."""
    alone = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(f, jobs))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def flat(n: int = 100_000, d: int = 5000, count: int = 64) -> tuple[np.ndarray, ...]:
    """Two views of white columns, the first of which have planted correlations: nothing in the spectrum shows them."""
    rng = np.random.default_rng(0)
    rho = np.linspace(0.95, 0.5, count, dtype=np.float32)
    z, views = rng.standard_normal((n, count), np.float32), []
    for _ in range(2):
        x = rng.standard_normal((n, d), np.float32)
        x[:, :count] = np.sqrt(rho) * z + np.sqrt(1 - rho) * x[:, :count]
        views.append(x)
    return tuple(views)


class Latent:
    """Two views of ``d`` columns: ``latent`` correlated factors and white noise, generated batch by batch."""

    def __init__(self, d: int, n: int, latent: int = 300, k: int = 8):
        rng = np.random.default_rng(0)
        self.d, self.n, self.latent, self.k = d, n, latent, k
        self.deviations = np.arange(1, latent + 1) ** -0.5
        self.maps = [np.linalg.qr(rng.normal(size=(d, latent)).astype(np.float32))[0].T for _ in range(2)]
        self.rho = np.linspace(0.95, 0.5, k)
        self.rotations = [np.linalg.qr(rng.normal(size=(latent, latent)))[0] for _ in range(2)]
        self.noise = 0.1 * self.deviations[-1]
        both = [self._factors(seed)[0] for seed in range(n // BATCH)]
        self.factors = [np.concatenate([b[v] for b in both]) for v in range(2)]
        self.exact = correlations(*self.factors)[:k].sum()

    def _factors(self, seed: int) -> tuple[list[np.ndarray], np.random.Generator]:
        rng = np.random.default_rng([1, seed])
        z = rng.normal(size=(BATCH, self.k))
        out = []
        for rotation in self.rotations:
            e = rng.normal(size=(BATCH, self.latent))
            e[:, : self.k] = np.sqrt(self.rho) * z + np.sqrt(1 - self.rho) * e[:, : self.k]
            out.append((e @ rotation) * self.deviations)
        return out, rng

    def stream(self) -> Iterator[Views]:
        for seed in range(self.n // BATCH):
            (x, y), rng = self._factors(seed)
            yield tuple(
                s.astype(np.float32) @ m + np.float32(self.noise) * rng.standard_normal((BATCH, self.d), np.float32)
                for s, m in zip((x, y), self.maps, strict=True)
            )

    def captured(self, V: np.ndarray) -> float:
        """The correlation within the span of ``V``, relative to that of the factors."""
        projected = []
        for s, v, m in zip(self.factors, np.split(V.astype(np.float64), 2), self.maps, strict=True):
            # The noise of the columns adds its exact covariance.
            C = (m @ v).T @ (np.cov(s.T) @ (m @ v)) + self.noise**2 * v.T @ v
            projected.append((s @ (m @ v), C))
        (a, Ca), (b, Cb) = projected
        cross = (a - a.mean(0)).T @ (b - b.mean(0)) / (len(a) - 1)
        ra, rb = np.linalg.cholesky(Ca), np.linalg.cholesky(Cb)
        M = np.linalg.solve(ra, np.linalg.solve(rb, cross.T).T)
        return float(np.linalg.svd(M, compute_uv=False).sum() / self.exact)


def collinear(n: int = 20_000, seed: int = 0, columns: int = 100, standardised: bool = False) -> tuple[np.ndarray, ...]:
    """Two ranges of smooth spectra of mixtures: neighbouring columns correlate by .99, scales span three decades."""
    rng = np.random.default_rng(seed)
    substances, shared = 24, 8
    z = rng.normal(size=(n, substances))
    views = []
    for _ in range(2):
        channel = np.linspace(0, 1, columns)[:, None]
        bands = np.exp(
            -0.5 * ((channel - rng.uniform(size=3 * substances)) / rng.uniform(0.04, 0.12, 3 * substances)) ** 2
        )
        spectra = bands @ np.kron(np.eye(substances), np.ones((3, 1)) / 3) * np.geomspace(1, 0.1, substances)
        rho = np.r_[np.linspace(0.95, 0.5, shared), np.zeros(substances - shared)]
        own = np.sqrt(rho) * z + np.sqrt(1 - rho) * rng.normal(size=(n, substances))
        x = own @ spectra.T
        x += 0.02 * x.std(0) * rng.normal(size=x.shape)
        scales = 10 ** rng.uniform(-1.5, 1.5, columns)
        views.append(((x / x.std(0)) * (1 if standardised else scales)).astype(np.float32))
    return tuple(views)

"""Is the game's estimate of its own shortfall right? Hundreds of planted problems: the section ``knowing``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import eigenstream as es
from planted import batches, collinear, correlations, in_processes, log_uniform, planted, tcc

#: Dimensions of the views, components and rank of the sketch: few, since each compiles its own programs.
SIZES = [
    ((60, 50), 1, 256),
    ((120, 100), 4, 32),
    ((120, 100), 4, 64),
    ((250, 180), 4, 64),
    ((250, 180), 16, 100),
    ((250, 180), 16, 256),
    ((400, 300), 32, 128),
    ((400, 300), 64, 512),
    ((600, 500), 16, 200),
    ((800, 600), 160, 1024),
    ((2000, 1500), 16, 1024),
]
SPECTRA = {
    "flat": np.ones,
    "power": lambda d: np.arange(1, d + 1) ** -0.5,
    "log-uniform": log_uniform(1e3),
    "clustered": lambda d: np.repeat([1.0, 0.1, 0.01], -(-d // 3))[:d],
    "steep": lambda d: np.arange(1, d + 1) ** -1.0,
}
TAILS = (None, 8, 4)


def drawn(rng: np.random.Generator, size: int, spectrum: str, tail: int | None) -> tuple[Any, ...]:
    """A random problem: its rows, components, rank and passes."""
    dims, k, rank = SIZES[size]
    n = int(rng.choice([4000, 10_000, 30_000]))
    kind = rng.integers(4)
    count = max(8, 2 * k)
    rho = [
        np.linspace(0.95, 0.3, count),
        np.linspace(0.99, 0.9, count),
        np.full(count, 0.7),
        np.r_[np.linspace(0.9, 0.6, k), np.full(count - k, 0.2)],
    ][kind]
    rho = rho[: min(dims)]
    seed = int(rng.integers(2**31))
    if spectrum == "collinear":
        X, Y = collinear(n, seed, columns=min(dims))
    else:
        X, Y = planted(n, dims, SPECTRA[spectrum], rho, seed)
    if tail:
        heavy = np.sqrt(tail / rng.chisquare(tail, size=(n, 1))).astype(np.float32)
        X, Y = X * heavy, Y * heavy
    if rng.uniform() < 0.3:
        X, Y = X / X.std(0), Y / Y.std(0)
    return X, Y, k, rank, int(rng.choice([1, 1, 1, 2, 3, 5, 10])), seed


def judged(seed: int, size: int, spectrum: str) -> dict[str, Any]:
    """One run: what it says, and what is true."""
    rng = np.random.default_rng([seed, size, len(spectrum)])
    tail = TAILS[rng.integers(len(TAILS))]
    X, Y, k, rank, epochs, order = drawn(rng, size, spectrum, tail)
    result = es.solve(
        es.problems.cca(),
        batches(X, Y, order),
        k,
        es.solvers.Game(rank=rank),
        max_epochs=epochs,
        memory_budget=1,
        random_state=seed,
    )
    rho = correlations(X, Y)[:k] if k <= 100 else exact(X, Y, k)
    found = {"columns": SIZES[size][0], "k": k, "rank": rank, "spectrum": spectrum, "tail": tail}
    found |= {"rows": len(X), "passes": epochs, "seed": seed, "converged": result.converged}
    return found | {"stated": float(result.shortfall), "true": 1 - tcc(X, Y, result.V, rho)}


def exact(X: np.ndarray, Y: np.ndarray, k: int) -> np.ndarray:
    rows = [(x.astype(np.float64), y.astype(np.float64)) for x, y in batches(X, Y, 0, 5000)]
    return es.solve(es.problems.cca(), rows, k, "exact").eigenvalues


def judged_all(job: tuple[int, int]) -> list[dict[str, Any]]:
    size, seed = job
    small = sum(SIZES[size][0]) < 500
    found = [judged(seed, size, spectrum) for spectrum in ([*SPECTRA, "collinear"] if small else SPECTRA)]
    jax.clear_caches()
    return found


def knowing(seeds: range = range(100, 109)) -> dict[str, Any]:
    """Is the estimate right? Planted problems of six spectra, three tails, eleven sizes, one to ten passes."""
    # Large problems take long.
    jobs = [(i, seed) for i, (dims, _, _) in enumerate(SIZES) for seed in (seeds if sum(dims) < 1000 else seeds[:2])]
    return summed_up([run for runs in in_processes(judged_all, jobs) for run in runs])


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    yes, stated, true = (np.array([run[name] for run in runs]) for name in ("converged", "stated", "true"))
    close = (true < 2 * stated) & (true > stated / 2)
    return {
        "runs": len(runs),
        "runs reported as converged": int(yes.sum()),
        "share of these that captured .99 or more": float((true[yes] <= 0.01).mean()),
        "runs that captured .995 or more": int((true <= 0.005).sum()),
        "share of these reported as converged": float(yes[true <= 0.005].mean()),
        "runs that fall short by over .005": int((true > 0.005).sum()),
        "share of these within a factor of two of the stated shortfall": float(close[true > 0.005].mean()),
        "each run": runs,
    }

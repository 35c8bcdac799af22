"""The way of rows from host memory to the device: a fit of a large array against a bare copy and `torch.pca_lowrank`.

    python benchmarks/road.py                 # 40,000 rows of 100,000 features, 16 GB
    python benchmarks/road.py 4000 5000 game  # another size, and not the solver that "auto" takes

Prints one JSON object: seconds of each, and the functions in which the second fit spent its time.
"""

from __future__ import annotations

import cProfile
import io
import json
import pstats
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import eigenstream as es

K, LATENT = 16, 64


def rows(n: int, d: int) -> np.ndarray:
    """Latent factors and white noise, in float32."""
    rng = np.random.default_rng(0)
    maps = rng.standard_normal((LATENT, d), np.float32) / np.arange(1, LATENT + 1, dtype=np.float32)[:, None]
    X = np.empty((n, d), np.float32)

    def fill(part: tuple[int, int]) -> None:
        own = np.random.default_rng(part)
        own.standard_normal(dtype=np.float32, out=X[slice(*part)])
        X[slice(*part)] += own.standard_normal((part[1] - part[0], LATENT), np.float32) @ maps

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, [(lo, min(lo + 500, n)) for lo in range(0, n, 500)]))
    return X


def copy(X: np.ndarray, threads: int) -> None:
    """Copy all rows to the device, in blocks that are freed at once."""
    parts = np.array_split(X, max(threads, X.nbytes // 2**24))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: jax.block_until_ready(jax.device_put(part)).delete(), parts))


def lowrank(X: np.ndarray) -> np.ndarray:
    """Variances by `torch.pca_lowrank`, on a GPU if there is one, with the copy to it."""
    import torch

    there = torch.from_numpy(X).to("cuda" if torch.cuda.is_available() else "cpu")
    S = torch.pca_lowrank(there, q=2 * K, niter=2)[1][:K]
    return np.asarray(S.cpu()) ** 2 / (len(X) - 1)


def seconds(f: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = f()
    return round(time.perf_counter() - start, 3), out


def main() -> None:
    n, d = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (40_000, 100_000)
    solver = sys.argv[3] if len(sys.argv) > 3 else "auto"
    X = rows(n, d)
    out: dict[str, Any] = {"rows": n, "features": d, "gigabytes": X.nbytes / 1e9, "device": str(jax.devices()[0])}
    for threads in (1, 4):
        out[f"copy, {threads} threads"] = [seconds(lambda threads=threads: copy(X, threads))[0] for _ in range(2)]

    def fit() -> Any:
        return es.PCA(K, solver=solver).fit(X)

    out["fit, compiling"] = seconds(fit)[0]
    profile = cProfile.Profile()
    out["fit, profiled"], _ = seconds(lambda: profile.runcall(fit))
    out["fit"], model = seconds(fit)
    out["solver"], out["message"] = repr(model.solver_), model.message_
    try:
        out["torch.pca_lowrank"] = []
        for _ in range(2):
            took, variances = seconds(lambda: lowrank(X))
            out["torch.pca_lowrank"].append(took)
        out["sum of the variances over that of torch"] = float(model.explained_variance_.sum() / variances.sum())
    except ImportError:
        del out["torch.pca_lowrank"]
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(25)
    out["profile"] = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()

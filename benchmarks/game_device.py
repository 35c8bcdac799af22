"""The game on this device: kept rows against exact sums, and rows that do not fit against a bare copy of them.

    python benchmarks/game_device.py            # sizes for one H200
    python benchmarks/game_device.py --small    # sizes for a laptop

Every time is the median of three calls after a first one. Writes docs/results/game_device.json; `benchmarks/step.py`
has the times of single steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import eigenstream as es
from exact_device import principal
from planted import planted

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def timed(f: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    out, times = f(), []
    for _ in range(repeats):
        start = time.perf_counter()
        out = f()
        times.append(time.perf_counter() - start)
    return statistics.median(times), out


def kept(n: int, d: int, k: int) -> dict[str, Any]:
    """CCA of rows that fit, by the game and by exact sums."""
    X, Y = planted(n, (d // 2, d // 2))
    solver = es.solvers.Game(rank=d // 8)
    game, exact = (es.CCA(k, solver=s).fit(X, Y) for s in (solver, "exact"))
    a, b = game.transform(X, Y)
    tcc = es.metrics.tcc(a, b, exact.correlations_)
    return {"columns": d, "rows": n, "k": k, "share": tcc, "message": game.message_}


def streamed(n: int, d: int, k: int, budget: float) -> dict[str, Any]:
    """PCA and CCA of rows that do not fit ``budget``, beside a copy of them in eight threads."""
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(64, d)).astype(np.float32) * np.geomspace(1, 0.1, 64, dtype=np.float32)[:, None]
    X = np.empty((n, d), np.float32)
    noise = rng.normal(size=(997, d)).astype(np.float32)
    for lo in range(0, n, 997):
        X[lo : lo + 997] = rng.normal(size=(min(997, n - lo), 64)).astype(np.float32) @ maps + noise[: n - lo]
        np.random.default_rng(lo).shuffle(noise)

    def copy() -> None:
        with cf.ThreadPoolExecutor(8) as pool:
            for block in np.array_split(X, 16):
                sent = [pool.submit(jax.device_put, piece) for piece in np.array_split(block, 4)]
                jax.block_until_ready([piece.result() for piece in sent])

    Z, Y = X[:, : d // 2], X[:, d // 2 :]
    found: dict[str, Any] = {"columns": d, "rows": n, "k": k, "budget": budget, "GB": X.nbytes / 1e9}
    found["copy"], _ = timed(copy)
    options: Any = {"memory_budget": budget, "max_epochs": 1, "batch_size": 1000}
    found["pca"], model = timed(lambda: es.PCA(k, **options).fit(X))
    found["pca_message"] = f"{model.reason_}; {model.message_}"
    found["cca"], model = timed(lambda: es.CCA(k, **options).fit(Z, Y))
    found["cca_message"] = f"{model.reason_}; {model.message_}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "game_device.json")
    options = parser.parse_args()
    small = options.small
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def keep(name: str, f: Callable[..., Any], *sizes: Any) -> None:
        try:
            found[name] = f(*sizes)
        except Exception as error:
            found[name] = {"error": repr(error)[:2000]}
        print(name, json.dumps(found[name]), flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")

    keep("kept", kept, *((4000, 800, 8) if small else (20_000, 4000, 32)))
    keep("streamed", streamed, *((4000, 4000, 16, 2e7) if small else (40_000, 100_000, 16, 2e9)))
    keep("principal", principal, *((2000, 10_000) if small else (40_000, 100_000)))


if __name__ == "__main__":
    main()

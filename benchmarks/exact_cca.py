"""Exact CCA of MNIST halves beside cca-zoo's, on the same machine in the same run.

    python benchmarks/exact_cca.py        # needs the `bench` extra, and mnist.npz in the data folder

Writes docs/results/exact_cca.json and docs/results/exact_cca.md. The two take turns; times are medians.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
REPEATS, K = 7, 4


def ours(X: np.ndarray, Y: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds to fit, and the correlations."""
    start = time.perf_counter()
    batches = ((X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100))
    result = es.solve(es.problems.cca(), batches, K, solver="exact")
    return time.perf_counter() - start, result.eigenvalues


def cca_zoo(X: np.ndarray, Y: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds to fit, and the correlations of the scores, taken off the clock."""
    from cca_zoo.linear import CCA

    start = time.perf_counter()
    model = CCA(n_components=K).fit([X, Y])
    seconds = time.perf_counter() - start
    scores = model.transform([X, Y])
    return seconds, np.array([abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(*(s.T for s in scores), strict=True)])


def main() -> None:
    X, Y = es.datasets.mnist_halves()
    rows = {}
    seconds: dict[str, list[float]] = {"eigenstream Exact, batches of 100": [], "cca-zoo CCA, whole arrays": []}
    for _ in range(REPEATS):
        for name, run in zip(seconds, (ours, cca_zoo), strict=True):
            elapsed, rows[name] = run(X, Y)
            seconds[name].append(elapsed)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    base = median["cca-zoo CCA, whole arrays"]
    best = sum(max(values) for values in zip(*rows.values(), strict=True))
    lines = [
        "# Exact CCA of MNIST halves, k = 4",
        "",
        f"`python benchmarks/exact_cca.py`: 60,000 × (392 + 392), medians of {REPEATS} alternating runs.",
        "",
        "| method | seconds | relative to cca-zoo | correlations | share of the best sum |",
        "| --- | ---: | ---: | --- | ---: |",
        *(
            f"| {name} | {median[name]:.2f} | {median[name] / base:.2f} | "
            f"{' '.join(f'{v:.5f}' for v in rows[name])} | {rows[name].sum() / best:.5f} |"
            for name in rows
        ),
        "",
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {name: {"seconds": seconds[name], "correlations": rows[name].tolist()} for name in rows}
    (RESULTS / "exact_cca.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "exact_cca.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

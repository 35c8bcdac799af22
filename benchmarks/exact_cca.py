"""Exact CCA of MNIST halves against cca-zoo, on the same machine in the same run.

    python benchmarks/exact_cca.py        # needs the `bench` extra, and mnist.npz in the data folder

Writes docs/results/exact_cca.json and docs/results/exact_cca.md; with ``--page`` the page alone, from the figures on
disk. The two take turns; times are medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
REPEATS, K = 7, 4
OURS, THEIRS = "eigenstream Exact, batches of 100", "cca-zoo CCA, whole arrays"


def ours(X: np.ndarray, Y: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds to fit, and the correlations."""
    start = time.perf_counter()
    batches = ((X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100))
    result = es.solve(es.problems.cca(), batches, K, solver="exact")
    return time.perf_counter() - start, result.eigenvalues


def cca_zoo(X: np.ndarray, Y: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds to fit, and the correlations of the scores, which are not timed."""
    from cca_zoo.linear import CCA

    start = time.perf_counter()
    model = CCA(n_components=K).fit([X, Y])
    seconds = time.perf_counter() - start
    scores = model.transform([X, Y])
    return seconds, np.array([abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(*(s.T for s in scores), strict=True)])


def run() -> dict[str, Any]:
    X, Y = es.datasets.mnist_halves()
    found: dict[str, Any] = {OURS: {"seconds": []}, THEIRS: {"seconds": []}}
    for _ in range(REPEATS):
        for one, fit in zip(found.values(), (ours, cca_zoo), strict=True):
            elapsed, rho = fit(X, Y)
            one["seconds"].append(elapsed)
            one["correlations"] = rho.tolist()
    return found


def page(found: dict[str, Any]) -> str:
    median = {name: statistics.median(one["seconds"]) for name, one in found.items()}
    rows = {name: one["correlations"] for name, one in found.items()}
    best = sum(max(values) for values in zip(*rows.values(), strict=True))
    lines = [
        "# Exact CCA of MNIST halves, k = 4",
        "",
        f"`python benchmarks/exact_cca.py`: 60,000 × (392 + 392), medians of {REPEATS} alternating runs.",
        "",
        "| method | seconds | relative to cca-zoo | correlations | share of the best sum |",
        "| --- | ---: | ---: | --- | ---: |",
        *(
            f"| {name} | {median[name]:.2f} | {median[name] / median[THEIRS]:.2f} | "
            f"{' '.join(f'{v:.5f}' for v in rows[name])} | {sum(rows[name]) / best:.5f} |"
            for name in rows
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    if "--page" not in sys.argv:
        (RESULTS / "exact_cca.json").write_text(json.dumps(run(), indent=1) + "\n")
    text = page(json.loads((RESULTS / "exact_cca.json").read_text()))
    (RESULTS / "exact_cca.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""Exact CCA on the host, beside cca-zoo and beside bare matrix products of the same rows in the same run.

    python benchmarks/exact_cca.py        # needs the `bench` extra, and the images in the data folder

Writes docs/results/exact_cca.json and docs/results/exact_cca.md; with ``--page`` the page alone, from the figures on
disk. Methods take turns; times are medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg.blas

import eigenstream as es
from eigenstream.core import pencil
from memory import Peak, anonymous
from planted import planted

RESULTS = Path(__file__).parent.parent / "docs" / "results"
REPEATS, K = 7, 4
#: Columns a view, rows and components of the planted problem.
PLANTED = 4000, 20_000, 16
THEIRS = "cca-zoo CCA, whole arrays"


def batches(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    stream = ((X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100))
    return es.solve(es.problems.cca(), stream, K, solver="exact").eigenvalues


def cca_zoo(X: np.ndarray, Y: np.ndarray) -> Any:
    from cca_zoo.linear import CCA

    return CCA(n_components=K).fit([X, Y])


def correlations(model: Any, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    scores = model.transform([X, Y])
    return np.array([abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(*(s.T for s in scores), strict=True)])


def syrk(*views: np.ndarray) -> np.ndarray:
    """The upper triangle of the product of all rows in float64, and nothing else."""
    d = sum(view.shape[1] for view in views)
    G = np.zeros((d, d), order="F")
    for lo in range(0, len(views[0]), 4096):
        rows = np.concatenate([view[lo : lo + 4096] for view in views], axis=1, dtype=np.float64)
        G = scipy.linalg.blas.dsyrk(1.0, rows.T, beta=1.0, c=G, overwrite_c=True)
    return G


def alternating(methods: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of every run of each method, and their last results."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    last: dict[str, Any] = {}
    for _ in range(repeats):
        for name, run in methods.items():
            start = time.perf_counter()
            last[name] = run()
            seconds[name].append(time.perf_counter() - start)
    return seconds, last


def mnist() -> dict[str, Any]:
    X, Y = es.datasets.mnist_halves()
    methods = {
        "eigenstream.CCA().fit": lambda: es.CCA(K).fit(X, Y).correlations_,
        "eigenstream Exact, batches of 100": lambda: batches(X, Y),
        THEIRS: lambda: cca_zoo(X, Y),
    }
    seconds, last = alternating(methods, REPEATS)
    last[THEIRS] = correlations(last[THEIRS], X, Y)
    return {name: {"seconds": seconds[name], "correlations": np.asarray(last[name]).tolist()} for name in methods}


def cifar() -> dict[str, Any]:
    X, Y = es.datasets.cifar10_halves()
    return alternating({"fit": lambda: es.CCA(K).fit(X, Y).message_, "syrk": lambda: syrk(X, Y)}, 3)[0]


def large() -> dict[str, Any]:
    """Seconds of the sums and of the solution, and the peak of memory beyond the rows in d×d arrays."""
    d, n, k = PLANTED
    X, Y = planted(n, (d, d), rho=np.linspace(0.95, 0.1, 64))
    seconds, solve = [], pencil.solve

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = solve(*arguments)
        seconds.append(time.perf_counter() - start)
        return found

    es.solvers.exact.solve = timed
    before, start = anonymous(), time.perf_counter()
    with Peak() as peak:
        model = es.CCA(k).fit(X, Y)
    total = time.perf_counter() - start
    arrays = (peak.bytes - before) / (8 * (2 * d) ** 2)
    return {"total": total, "solve": seconds[0], "arrays": arrays, "residual": float(model.residuals_.max())}


def run() -> dict[str, Any]:
    return {"large": large(), "mnist": mnist(), "cifar": cifar()}


def page(found: dict[str, Any]) -> str:
    median = {name: statistics.median(one["seconds"]) for name, one in found["mnist"].items()}
    rows = {name: one["correlations"] for name, one in found["mnist"].items()}
    best = sum(max(values) for values in zip(*rows.values(), strict=True))
    fit, bare = (statistics.median(found["cifar"][name]) for name in ("fit", "syrk"))
    d, n, k = PLANTED
    large = found["large"]
    sums = large["total"] - large["solve"]
    lines = [
        "# Exact CCA on a processor",
        "",
        "`python benchmarks/exact_cca.py`, methods alternating, medians.",
        "",
        f"MNIST halves, 60,000 × (392 + 392), k = {K}, {REPEATS} runs:",
        "",
        "| method | seconds | relative to cca-zoo | correlations | share of the best sum |",
        "| --- | ---: | ---: | --- | ---: |",
        *(
            f"| {name} | {median[name]:.2f} | {median[name] / median[THEIRS]:.2f} | "
            f"{' '.join(f'{v:.5f}' for v in rows[name])} | {sum(rows[name]) / best:.5f} |"
            for name in rows
        ),
        "",
        f"CIFAR-10 halves, 50,000 × (1,536 + 1,536), k = {K}, 3 runs: `eigenstream.CCA().fit` takes {fit:.1f} s, a "
        f"bare float64 `syrk` of the same rows {bare:.1f} s: {fit / bare:.2f} times.",
        "",
        f"{n:,} × ({d:,} + {d:,}), 64 planted correlations, k = {k}: {sums:.1f} s for the sums, {large['solve']:.1f} "
        f"s for the solution (residual {large['residual']:.0e}); the peak of memory beyond the rows is that of "
        f"{large['arrays']:.1f} arrays of {2 * d:,} × {2 * d:,} numbers.",
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

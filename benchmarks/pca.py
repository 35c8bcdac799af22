"""PCA of MNIST against scikit-learn, on the same machine in the same run.

    python benchmarks/pca.py        # needs mnist.npz in the data folder

Writes docs/results/pca.json and docs/results/pca.md; with ``--page`` the page alone, from the figures on disk. The
methods take turns; times are medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import PCA, IncrementalPCA

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
REPEATS, K = 5, 32
BASE = "IncrementalPCA, its default batches"


def run() -> dict[str, Any]:
    """Seconds and variance kept of each method."""
    X = es.datasets.mnist()["x_train"].reshape(60_000, -1).astype(np.float32) / 255
    C = np.cov(X.T.astype(np.float64))
    best = np.linalg.eigvalsh(C)[::-1][:K].sum()
    wide = X.astype(np.float64)
    exact = np.linalg.eigvalsh(C)[::-1][:K]
    covariance = partial(PCA, K, svd_solver="covariance_eigh")
    methods = {
        "eigenstream.PCA, solver=auto": (partial(es.PCA, K), X),
        BASE: (partial(IncrementalPCA, K), X),
        "IncrementalPCA, batches of 500": (partial(IncrementalPCA, K, batch_size=500), X),
        "scikit-learn PCA, whole array": (partial(PCA, K), X),
        "scikit-learn PCA, covariance_eigh": (covariance, X),
        "eigenstream.PCA, float64 rows": (partial(es.PCA, K), wide),
        "scikit-learn PCA, covariance_eigh, float64 rows": (covariance, wide),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    share, error = {}, {}
    for _ in range(REPEATS):
        for name, (make, rows) in methods.items():
            start = time.perf_counter()
            model = make().fit(rows)
            times[name].append(time.perf_counter() - start)
            V = np.linalg.qr(model.components_.T.astype(np.float64))[0]
            share[name] = float(np.trace(V.T @ C @ V) / best)
            error[name] = float(np.abs(model.explained_variance_ / exact - 1).max())
    return {
        name: {"seconds": times[name], "variance": share[name], "eigenvalue_error": error[name]} for name in methods
    }


def page(found: dict[str, Any]) -> str:
    median = {name: statistics.median(one["seconds"]) for name, one in found.items()}
    lines = [
        f"# PCA of MNIST, 60,000 × 784, k = {K}",
        "",
        f"`python benchmarks/pca.py`: medians of {REPEATS} alternating runs. Variance kept: the variance of the data",
        "within the span of the components, relative to the largest possible. Error: the largest relative error of an",
        "eigenvalue. Rows are float32 unless said: eigenstream multiplies them in float64, scikit-learn in float32.",
        "",
        "| method | seconds | relative to IncrementalPCA | variance kept | error |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {median[name]:.2f} | {median[name] / median[BASE]:.3f} | {one['variance']:.7f} "
            f"| {one['eigenvalue_error']:.0e} |"
            for name, one in found.items()
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    if "--page" not in sys.argv:
        (RESULTS / "pca.json").write_text(json.dumps(run(), indent=1) + "\n")
    text = page(json.loads((RESULTS / "pca.json").read_text()))
    (RESULTS / "pca.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

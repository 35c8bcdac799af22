"""PCA of MNIST beside scikit-learn's, on the same machine in the same run.

    python benchmarks/pca.py        # needs mnist.npz in the data folder

Writes docs/results/pca.json and docs/results/pca.md. The methods take turns; times are medians.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
from sklearn.decomposition import PCA, IncrementalPCA

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
REPEATS, K = 5, 32


def main() -> None:
    X = es.datasets.mnist()["x_train"].reshape(60_000, -1).astype(np.float32) / 255
    C = np.cov(X.T.astype(np.float64))
    best = np.linalg.eigvalsh(C)[::-1][:K].sum()
    methods = {
        "eigenstream.PCA, solver=auto": lambda: es.PCA(n_components=K),
        "IncrementalPCA, its default batches": lambda: IncrementalPCA(K),
        "IncrementalPCA, batches of 500": lambda: IncrementalPCA(K, batch_size=500),
        "scikit-learn PCA, whole array": lambda: PCA(K),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    share = {}
    for _ in range(REPEATS):
        for name, make in methods.items():
            start = time.perf_counter()
            model = make().fit(X)
            times[name].append(time.perf_counter() - start)
            V = np.linalg.qr(model.components_.T.astype(np.float64))[0]
            share[name] = float(np.trace(V.T @ C @ V) / best)
    median = {name: statistics.median(values) for name, values in times.items()}
    base = median["IncrementalPCA, its default batches"]
    lines = [
        f"# PCA of MNIST, 60,000 × 784, k = {K}",
        "",
        f"`python benchmarks/pca.py`: medians of {REPEATS} alternating runs. Variance: that of the data within the "
        "span of the components, over the largest possible.",
        "",
        "| method | seconds | relative to IncrementalPCA | variance kept |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {name} | {median[name]:.2f} | {median[name] / base:.3f} | {share[name]:.7f} |" for name in methods),
        "",
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {name: {"seconds": times[name], "variance": share[name]} for name in methods}
    (RESULTS / "pca.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "pca.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

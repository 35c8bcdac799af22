"""The accelerated game: accuracy of one pass, an ablation, times, and how reliable its convergence estimate is.

    python benchmarks/acceleration.py                   # every section
    python benchmarks/acceleration.py accuracy timing   # some of them
    python benchmarks/acceleration.py page              # the page again, from the figures on disk

Each section writes its figures to docs/results/acceleration.json, from which docs/results/acceleration.md is made.
Several defaults were chosen with these problems in view: see docs/results/acceleration.md.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import scipy.sparse
import scipy.sparse.linalg

import eigenstream as es
from ablation import ablation
from planted import (
    BATCH,
    RANK,
    Latent,
    batches,
    collinear,
    correlations,
    flat,
    log_uniform,
    planted,
    problem,
    solved,
    tcc,
)
from verdicts import exact, knowing

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SEEDS, TURNS = 3, 8
GAME = es.solvers.Game(rank=RANK)

CASES = [("mnist", 4), ("mnist", 32), ("mnist", 64), ("cifar10", 4), ("cifar10", 32), ("synthetic", 4), ("flat", 4)]


def accuracy() -> dict[str, Any]:
    """One pass of rows that are not kept, three seeds."""
    out: dict[str, Any] = {}
    for name, k in CASES:
        for rank in (RANK, 512):
            if 2 * rank < sum(x.shape[1] for x in problem(name)[:2]):
                found = [
                    solved(name, k, s, es.solvers.Game(rank=rank))[1] for s in range(1 if name == "cifar10" else SEEDS)
                ]
                out[f"{name}, k={k}, rank {rank}"] = found
    return out


def budgets() -> dict[str, Any]:
    """``solver="game"`` with a budget: what it takes, and what it captures."""
    out: dict[str, Any] = {}
    X, Y, rho = problem("mnist")
    for k in (4, 32, 64, 100):
        result = es.solve(es.problems.cca(), batches(X, Y, 0), k, "game")
        out[f"mnist, k={k}, default budget: {type(result.solver).__name__}"] = tcc(X, Y, result.V, rho)
    for seed in range(SEEDS):
        for standardised in (False, True):
            X, Y = collinear(seed=seed, standardised=standardised)
            rho = correlations(X, Y)
            for epochs in (1, 3):
                result = es.solve(es.problems.cca(), batches(X, Y, seed), 4, GAME, max_epochs=epochs, memory_budget=1)
                label = f"collinear, k=4, {'standardised' if standardised else 'raw'}, passes: {epochs}"
                out.setdefault(label, []).append(tcc(X, Y, result.V, rho))
    X, Y, _ = problem("cifar10")
    for k, seeds in ((4, SEEDS), (32, SEEDS), (160, 1)):
        rho = exact(X, Y, k)
        for epochs in (1, 5):
            for seed in range(seeds if epochs == 1 else 1):
                result = es.solve(
                    es.problems.cca(), batches(X, Y, seed), k, "game", max_epochs=epochs, memory_budget=60e6
                )
                out.setdefault(f"cifar10, k={k}, 60 MB, passes: {epochs}", []).append(tcc(X, Y, result.V, rho))
    return out


def wide_and_flat() -> dict[str, Any]:
    """5,000 + 5,000 white columns, 64 planted correlations, 100,000 rows, 400 MB; baselines by their best step."""
    X, Y = flat()
    stream = es.streams.batches(X, Y, batch_size=1000)
    last = es.solve(es.problems.cca(), stream, 64, "exact", memory_budget=8e9)
    out: dict[str, Any] = {}
    for epochs in (1, 10):
        result = es.solve(es.problems.cca(), stream, 64, "game", max_epochs=epochs, memory_budget=400e6)
        out[f"game, passes: {epochs}"] = tcc(X, Y, result.V, last.eigenvalues)
    makers: dict[str, Callable[[float], Any]] = {
        "Paper, Adam": lambda r: es.solvers.Paper(learning_rate=r, optimizer=optax.adam),
        "EckartYoung, Adam": lambda r: es.solvers.EckartYoung(learning_rate=r, optimizer=optax.adam),
        "SGHA, Adam": lambda r: es.solvers.SGHA(learning_rate=r, optimizer=optax.adam),
    }
    for label, make in makers.items():
        found = []
        for rate in (1e-4, 1e-3, 1e-2):
            try:
                V = es.solve(es.problems.cca(), es.streams.batches(X, Y, batch_size=200), 64, make(rate)).V
                found.append(tcc(X, Y, V, last.eigenvalues))
            except (ValueError, np.linalg.LinAlgError):
                found.append(0.0)
        out[f"{label}, one pass"] = float(np.nanmax(found))
    return out


def variations() -> dict[str, Any]:
    """More passes, other batch sizes, other units."""
    out: dict[str, Any] = {}
    for name, k in (("mnist", 4), ("synthetic", 4), ("flat", 4)):
        for epochs in (1, 2, 3, 5):
            out[f"{name}, k={k}, {epochs} passes"] = solved(name, k, max_epochs=epochs)[1]
        for size in (20, 500):
            out[f"{name}, k={k}, batch {size}"] = solved(name, k, size=size)[1]
        X, Y, rho = problem(name)
        scaled = [(x * np.float32(1e3), y * np.float32(1e-3)) for x, y in batches(X, Y, 0)]
        V = es.solve(es.problems.cca(), scaled, k, GAME, memory_budget=1).V
        out[f"{name}, k={k}, views times 1e3 and 1e-3"] = tcc(X * np.float32(1e3), Y * np.float32(1e-3), V, rho)
    return out


def failures() -> dict[str, Any]:
    """Rows of extreme norm, and fewer rows than dimensions."""
    out: dict[str, Any] = {}
    X, Y, rho = problem("synthetic")
    rng = np.random.default_rng(0)
    large = rng.choice(len(X), len(X) // 1000, replace=False)
    dirty = [v.copy() for v in (X, Y)]
    for v in dirty:
        v[large] *= 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tame = es.solvers.Game(rank=RANK, outlier=100.0)
        scaled = es.solve(es.problems.cca(), batches(dirty[0], dirty[1], 0), 4, tame, memory_budget=1)
        found = es.solve(es.problems.cca(), batches(dirty[0], dirty[1], 0), 4, GAME, memory_budget=1)
    out["0.1% of rows 30 times larger, outlier=100, on the clean rows"] = tcc(X, Y, scaled.V, rho)
    out["the same, rows as they are"] = tcc(X, Y, found.V, rho)
    for n, condition, ridge in ((300, 10.0, 1.0), (600, 10.0, 1.0), (300, 1e3, 0.1), (600, 1e3, 0.1)):
        views = planted(n + 5000, (400, 300), log_uniform(condition), seed=4)
        train, test = [v[:n] for v in views], [v[n:] for v in views]

        def heldout(solver: Any, train: Any = train, test: Any = test, ridge: float = ridge) -> float:
            V = es.solve(es.problems.cca(ridge=ridge), batches(*train, 0), 4, solver).V
            a, b = (v @ w for v, w in zip(test, np.split(V, [400]), strict=True))
            return es.metrics.tcc(a, b, np.ones(4))

        label = f"n = {n}, d = 700, condition {condition:g}, ridge {ridge:g}: held-out correlation, game and exact"
        out[label] = [heldout(GAME), heldout("exact")]
    return out


def others() -> dict[str, Any]:
    """Other streaming solvers with the best step size of a grid, and cca-zoo with its defaults."""
    makers: dict[str, Callable[[float], Any]] = {
        "Paper, SGD": lambda r: es.solvers.Paper(learning_rate=r),
        "Paper, Adam": lambda r: es.solvers.Paper(learning_rate=r, optimizer=optax.adam),
        "EckartYoung, Adam": lambda r: es.solvers.EckartYoung(learning_rate=r, optimizer=optax.adam),
        "EckartYoung, SGD": lambda r: es.solvers.EckartYoung(learning_rate=r),
        "SGHA, SGD": lambda r: es.solvers.SGHA(learning_rate=r),
        "SGHA, Adam": lambda r: es.solvers.SGHA(learning_rate=r, optimizer=optax.adam),
    }
    grid = {"SGD": (1e-2, 1e-1, 1.0, 10.0), "Adam": (1e-4, 1e-3, 1e-2)}
    out: dict[str, Any] = {}
    for name, k in (("mnist", 4), ("cifar10", 4), ("synthetic", 4), ("flat", 4)):
        for label, make in makers.items():
            found = []
            for rate in grid[label.rsplit(", ", 1)[1]]:
                try:
                    found.append(solved(name, k, solver=make(rate))[1])
                except (ValueError, np.linalg.LinAlgError):
                    found.append(0.0)
            out[f"{name}, k={k}: {label}"] = float(np.nanmax(found))
        X, Y, rho = problem(name)
        order = np.random.default_rng(1000).permutation(len(X))
        model = from_cca_zoo(X[order], Y[order], k)
        out[f"{name}, k={k}: cca-zoo's StochasticCCAEY"] = es.metrics.tcc(*model.transform([X, Y]), rho)
        out[f"{name}, k={k}: the accelerated game"] = solved(name, k)[1]
    return out


def from_cca_zoo(X: np.ndarray, Y: np.ndarray, k: int) -> Any:
    """cca-zoo with its defaults, one pass of batches of 100."""
    from cca_zoo.stochastic import StochasticCCAEY

    model = StochasticCCAEY(n_components=k, batch_size=BATCH, max_iter=1, random_state=0)
    with warnings.catch_warnings():
        # It warns that one pass is not enough.
        warnings.simplefilter("ignore")
        return model.fit([X, Y])


def other_problems() -> dict[str, Any]:
    """PCA, LDA and graphs."""
    data = es.datasets.mnist()
    X, y = data["x_train"].reshape(60_000, -1).astype(np.float32) / 255, data["y_train"]
    order = np.random.default_rng(0).permutation(60_000)
    stream = [X[order[i : i + BATCH]] for i in range(0, 60_000, BATCH)]
    exact = es.solve(es.problems.pca(), stream, 32, "exact")
    C = np.cov(X.T.astype(np.float64))
    out: dict[str, Any] = {}
    shares, cosines = [], []
    for seed in range(SEEDS):
        V = es.solve(es.problems.pca(), stream, 32, GAME, random_state=seed, memory_budget=1).V.astype(np.float64)
        Q = np.linalg.qr(V)[0]
        shares.append(float(np.trace(Q.T @ C @ Q) / exact.eigenvalues.sum()))
        cosines.append(float(np.abs((V * exact.V).sum(0) / np.linalg.norm(V, axis=0))[:8].min()))
    out["PCA of MNIST, k=32: variance over exact"] = shares
    out["PCA of MNIST, k=32: least absolute cosine of the first eight"] = cosines
    test = data["x_test"].reshape(10_000, -1).astype(np.float32) / 255
    for solver, label in (("exact", "exact"), (GAME, "game")):
        out[f"LDA of MNIST, k=9: test accuracy, {label}"] = (
            es.LDA(9, solver=solver, max_epochs=1).fit(X, y).score(test, data["y_test"])
        )
    out |= graphs()
    return out


def graphs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    block = np.arange(1000) % 4
    chance = np.where(block[:, None] == block[None], 0.1, 0.01)
    i, j = np.nonzero(np.triu(rng.uniform(size=(1000, 1000)) < chance, 1))
    out = {
        "block model, 1000 nodes: subspace error after 1, 3 and 5 passes": [graph(1000, i, j, e)[0] for e in (1, 3, 5)]
    }
    weight = np.minimum((1 - rng.uniform(size=800)) ** -1.2, 200)
    side = np.arange(800) % 2
    chance = 3 * np.outer(weight, weight) / weight.sum() * np.where(side[:, None] == side[None], 1.7, 0.3)
    i, j = np.nonzero(np.triu(rng.uniform(size=(800, 800)) < chance, 1))
    _, ends = np.unique(np.r_[i, j], return_inverse=True)
    i, j = np.split(ends, 2)
    out["degrees from 1 to 250: eigenvalue sum after 3 and 10 passes, and by eigsh"] = [
        graph(ends.max() + 1, i, j, 3)[1],
        *graph(ends.max() + 1, i, j, 10)[1:],
    ]
    return out


def graph(n: int, i: np.ndarray, j: np.ndarray, epochs: int) -> tuple[float, float, float]:
    """Subspace error of the game on the edges of a graph, the sum of its four eigenvalues, and the exact sum."""
    W = scipy.sparse.coo_array((np.ones(len(i)), (i, j)), shape=(n, n)).tocsr()
    W = W + W.T
    degrees = W.sum(1)
    L, D = (scipy.sparse.diags_array(degrees) - W).tocsc(), scipy.sparse.diags_array(degrees).tocsc()
    lam, exact = scipy.sparse.linalg.eigsh(L, 4, D, sigma=-0.01)
    order = np.random.default_rng(0).permutation(len(i))
    stream = [(i[part], j[part]) for part in np.array_split(order, len(i) // 200)]
    V = es.solve(es.problems.laplacian(n_nodes=int(n)), stream, 4, "game", which="smallest", max_epochs=epochs).V
    R = np.linalg.cholesky(V.T @ (degrees[:, None] * V))
    V = np.linalg.solve(R, V.T).T
    return es.metrics.subspace_error(V, exact, D.toarray()), float(np.trace(V.T @ (L @ V))), float(lam.sum())


def timing() -> dict[str, Any]:
    """Seconds of a pass; solvers take turns, and the first run of each, which compiles, does not count."""
    out: dict[str, Any] = {}
    for name, k in (("mnist", 4), ("cifar10", 4), ("cifar10", 64)):
        X, Y, _ = problem(name)
        stream = batches(X, Y, 0)
        runs: dict[str, Callable[[], Any]] = {
            label: partial(es.solve, es.problems.cca(), stream, k, solver, memory_budget=1)
            for label, solver in (("game", GAME), ("Paper", es.solvers.Paper()), ("exact", "exact"))
        }
        if name == "mnist":
            runs["cca-zoo's StochasticCCAEY"] = partial(from_cca_zoo, X, Y, k)
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(TURNS):
            for label, run in runs.items():
                start = time.perf_counter()
                run()
                times[label].append(time.perf_counter() - start)
        for label, values in times.items():
            out[f"{name}, k={k}: {label}"] = values[1:]
        ratios = [a / b for a, b in zip(times["game"][1:], times["Paper"][1:], strict=True)]
        out[f"{name}, k={k}: game over Paper, turn by turn"] = ratios
    return out


def crossover() -> dict[str, Any]:
    """Seconds per row against the dimension: exact sums and the game."""
    out: dict[str, Any] = {}
    for d in (500, 1000, 2000, 4000, 8000):
        X = np.random.default_rng(0).normal(size=(12_000, d)).astype(np.float32)
        stream = np.split(X, 120)
        for solver in ("exact", "game"):
            for views in (1, 2):
                data = stream if views == 1 else [(x[:, : d // 2], x[:, d // 2 :]) for x in stream]
                kind = es.problems.pca() if views == 1 else es.problems.cca()
                times = []
                for _ in range(2):
                    start = time.perf_counter()
                    if solver == "exact":
                        # The sums alone: their cost grows with the rows.
                        exact = es.solvers.Exact()
                        state = exact.init(kind, data[0], 4)
                        for part in range(0, 120, 40):
                            joined = (
                                [np.concatenate(c) for c in zip(*data[part : part + 40], strict=True)]
                                if views == 2
                                else np.concatenate(data[part : part + 40])
                            )
                            state = exact.step(kind, state, tuple(joined) if views == 2 else joined)
                    else:
                        es.solve(kind, data, 4, GAME, memory_budget=1)
                    times.append(time.perf_counter() - start)
                out[f"d = {d}, {'PCA' if views == 1 else 'CCA'}: {solver}"] = min(times) / 12_000
    return out


def large(d: int = 20_000, n: int = 20_000) -> dict[str, Any]:
    """300 latent dimensions in 20,000 columns of each view, generated batch by batch."""
    data, k = Latent(d, n), 8
    # A small run first, so that the peak of memory grows by this problem alone.
    es.solve(es.problems.cca(), batches(*planted(2000, (500, 500)), 0), k, GAME, memory_budget=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    game = es.solve(es.problems.cca(), data.stream(), k, "game", memory_budget=1e9 if d <= 20_000 else 4e9)
    seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    out = {"game": data.captured(game.V), "seconds": seconds, "GB beyond those of the generator": memory}
    if d <= 20_000:
        adam = es.solvers.Paper(learning_rate=1e-3, optimizer=optax.adam)
        out["Paper, Adam 1e-3"] = data.captured(es.solve(es.problems.cca(), data.stream(), k, adam).V)
    return out


def larger() -> dict[str, Any]:
    """The same at 100,000 columns a view."""
    return large(100_000, 10_000)


HEAD = """# The accelerated game, measured

Made by `python benchmarks/acceleration.py`, or `... acceleration.py SECTION`. All figures are in
[acceleration.json](acceleration.json). Two CPU cores, JAX in float32. TCC: canonical correlations of the projected
views, summed, relative to the exact top-k sum (1 is perfect). Batches of 100 of raw data, the last short batch
included, default settings, and one pass unless stated otherwise.

The defaults were chosen on planted problems, MNIST and the problems below. The verdict was calibrated on 276 problems
of the generator in `benchmarks/verdicts.py` (seeds 0 to 5, eight of its sizes). The section `knowing` has other seeds
and more sizes: the page shows seeds 100 to 105 of the nine smaller sizes, as far as the time went (50 of 54 pairs).
They ran before the last changes: one gain for both views, correlations above 1 come last, and at most a quarter of the
columns are players.

Sketches have rank 256 unless stated otherwise.

[accelerated.md](../accelerated.md) lists the known limits. Sections of the benchmark that are not on this page were not
run on this code.

"""

SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        accuracy,
        budgets,
        wide_and_flat,
        variations,
        failures,
        others,
        other_problems,
        timing,
        crossover,
        large,
        larger,
        knowing,
        ablation,
    )
}


def table(section: str, values: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{key}: {shown(v)}" for key, v in value.items())
        if isinstance(value, list):
            return " ".join(shown(v) for v in value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [f"## {section}: {(SECTIONS[section].__doc__ or '').splitlines()[0]}", "", "| | |", "| --- | --- |"]
    for label, value in values.items():
        if section in ("accuracy", "budgets") and isinstance(value, list):
            lines.append(f"| {label} | least {min(value):.4f} of {shown(value)} |")
        elif section == "timing":
            unit = "" if "over" in label else " s"
            spread = f"{min(value):.2f} to {max(value):.2f}"
            lines.append(f"| {label} | median {statistics.median(value):.2f}{unit}, {spread} |")
        elif label != "each run":
            lines.append(f"| {label} | {shown(value)} |")
    return [*lines, ""]


def main(names: list[str]) -> None:
    path = RESULTS / "acceleration.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in [name for name in names if name != "page"] if names else SECTIONS:
        known[name] = SECTIONS[name]()
        path.write_text(json.dumps(known, indent=1) + "\n")
        print("\n".join(table(name, known[name])), flush=True)
    lines = [line for name in SECTIONS if name in known for line in table(name, known[name])]
    (RESULTS / "acceleration.md").write_text(HEAD + "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])

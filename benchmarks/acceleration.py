"""The accelerated game: what one pass captures, what each part gives, how long it takes, and whether it knows.

    python benchmarks/acceleration.py                   # every section whose data are there
    python benchmarks/acceleration.py accuracy timing   # some of them

Each section writes its figures into docs/results/acceleration.json, from which docs/results/acceleration.md is made.
Several defaults were settled with these very problems in view: see docs/results/acceleration.md.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
import scipy.sparse.linalg

import eigenstream as es
from eigenstream.core import players
from eigenstream.solvers.game import filter, move

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SEEDS, BATCH, TURNS = 5, 100, 8
Views = tuple[np.ndarray, np.ndarray]


# Problems.


def planted(n: int, dims: tuple[int, int], condition: float = 1e3, rho: Any = None, seed: int = 0) -> Views:
    """Two views with planted correlations in random directions of log-uniform variance."""
    rng = np.random.default_rng(seed)
    rho = np.linspace(0.95, 0.5, 8) if rho is None else np.asarray(rho)
    z = rng.normal(size=(n, len(rho)))
    views = []
    for d in dims:
        noise = rng.normal(size=(n, d))
        noise[:, : len(rho)] = np.sqrt(rho) * z + np.sqrt(1 - rho) * noise[:, : len(rho)]
        rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
        deviations = rng.permutation(np.logspace(0, -np.log10(condition) / 2, d))
        views.append(((noise * deviations) @ rotation.T).astype(np.float32))
    return views[0], views[1]


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
    else:
        X, Y = planted(60_000, (200, 150))
    X, Y = np.ascontiguousarray(X), np.ascontiguousarray(Y)
    return X, Y, correlations(X, Y)


def correlations(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Exact ones; of rows in float64, so that no direction is too weak to count."""
    parts = [
        (X[lo : lo + 5000].astype(np.float64), Y[lo : lo + 5000].astype(np.float64)) for lo in range(0, len(X), 5000)
    ]
    return es.solve(es.problems.cca(), parts, min(X.shape[1], Y.shape[1], 100), "exact").eigenvalues


def tcc(X: np.ndarray, Y: np.ndarray, V: np.ndarray, rho: np.ndarray) -> float:
    cut = X.shape[1]
    return es.metrics.tcc(X @ V[:cut], Y @ V[cut:], rho)


def batches(X: np.ndarray, Y: np.ndarray, seed: int, size: int = BATCH) -> list[Views]:
    order = np.random.default_rng(1000 + seed).permutation(len(X))
    X, Y = X[order], Y[order]
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


def solved(
    name: str, k: int, seed: int = 0, solver: Any = "game", size: int = BATCH, **options: Any
) -> tuple[Any, float]:
    X, Y, rho = problem(name)
    result = es.solve(es.problems.cca(), batches(X, Y, seed, size), k, solver, random_state=seed, **options)
    return result, tcc(X, Y, result.V, rho)


CASES = [("mnist", k) for k in (4, 32, 64, 100)]
CASES += [("cifar10", 4), ("cifar10", 32), ("synthetic", 4), ("flat", 4)]


# Sections.


def accuracy() -> dict[str, Any]:
    """One pass, five seeds."""
    return {f"{name}, k={k}": [solved(name, k, seed)[1] for seed in range(SEEDS)] for name, k in CASES}


def variations() -> dict[str, Any]:
    """More passes, other batches, other units."""
    out: dict[str, Any] = {}
    for name, k in (("mnist", 4), ("synthetic", 4), ("flat", 4)):
        for epochs in (1, 2, 3, 5):
            out[f"{name}, k={k}, {epochs} passes"] = solved(name, k, max_epochs=epochs)[1]
        for size in (20, 500):
            out[f"{name}, k={k}, batch {size}"] = solved(name, k, size=size)[1]
        X, Y, rho = problem(name)
        scaled = [(x * np.float32(1e3), y * np.float32(1e-3)) for x, y in batches(X, Y, 0)]
        V = es.solve(es.problems.cca(), scaled, k, "game").V
        out[f"{name}, k={k}, views times 1e3 and 1e-3"] = tcc(X * np.float32(1e3), Y * np.float32(1e-3), V, rho)
    return out


def failures() -> dict[str, Any]:
    """What the prototype could not do."""
    out: dict[str, Any] = {}
    X, Y, rho = problem("synthetic")
    rng = np.random.default_rng(0)
    large = rng.choice(len(X), len(X) // 1000, replace=False)
    dirty = [v.copy() for v in (X, Y)]
    for v in dirty:
        v[large] *= 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = es.solve(es.problems.cca(), batches(dirty[0], dirty[1], 0), 4, "game")
        asis = es.solve(es.problems.cca(), batches(dirty[0], dirty[1], 0), 4, es.solvers.Game(outlier=np.inf))
    out["0.1% of rows 30 times larger, on the clean rows"] = tcc(X, Y, found.V, rho)
    out["the same, rows taken as they are"] = tcc(X, Y, asis.V, rho)
    for n, condition, ridge in ((300, 10.0, 1.0), (600, 10.0, 1.0), (300, 1e3, 0.1), (600, 1e3, 0.1)):
        views = planted(n + 5000, (400, 300), condition, seed=4)
        train, test = [v[:n] for v in views], [v[n:] for v in views]

        def heldout(solver: str, train: Any = train, test: Any = test, ridge: float = ridge) -> float:
            V = es.solve(es.problems.cca(ridge=ridge), batches(*train, 0), 4, solver).V
            a, b = (v @ w for v, w in zip(test, np.split(V, [400]), strict=True))
            return es.metrics.tcc(a, b, np.ones(4))

        label = f"n = {n}, d = 700, condition {condition:g}, ridge {ridge:g}: held-out correlation, game and exact"
        out[label] = [heldout("game"), heldout("exact")]
    return out


def others() -> dict[str, Any]:
    """The other streaming solvers, best of a grid of steps, and cca-zoo's at its defaults."""
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
    """Its defaults, one pass of batches of 100."""
    from cca_zoo.stochastic import StochasticCCAEY

    model = StochasticCCAEY(n_components=k, batch_size=BATCH, max_iter=1, random_state=0)
    with warnings.catch_warnings():
        # One pass is less than it would take.
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
        V = es.solve(es.problems.pca(), stream, 32, "game", random_state=seed).V.astype(np.float64)
        Q = np.linalg.qr(V)[0]
        shares.append(float(np.trace(Q.T @ C @ Q) / exact.eigenvalues.sum()))
        cosines.append(float(np.abs((V * exact.V).sum(0) / np.linalg.norm(V, axis=0))[:8].min()))
    out["PCA of MNIST, k=32: variance over exact"] = shares
    out["PCA of MNIST, k=32: least |cos| of the first eight"] = cosines
    test = data["x_test"].reshape(10_000, -1).astype(np.float32) / 255
    for solver in ("exact", "game"):
        out[f"LDA of MNIST, k=9: test accuracy, {solver}"] = (
            es.LDA(9, solver=solver).fit(X, y).score(test, data["y_test"])
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
    out["degrees from 1 to 250: eigenvalue sum after 3 and 10 passes, and eigsh's"] = [
        graph(ends.max() + 1, i, j, 3)[1],
        *graph(ends.max() + 1, i, j, 10)[1:],
    ]
    return out


def graph(n: int, i: np.ndarray, j: np.ndarray, epochs: int) -> tuple[float, float, float]:
    """Subspace error of four players on the edges of a graph, the sum of their quotients, and the least possible."""
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
    """Seconds of a pass, in turns; the first run of each, which compiles, left out."""
    out: dict[str, Any] = {}
    for name, k in (("mnist", 4), ("cifar10", 4), ("cifar10", 64)):
        X, Y, _ = problem(name)
        stream = batches(X, Y, 0)
        runs: dict[str, Callable[[], Any]] = {
            label: partial(es.solve, es.problems.cca(), stream, k, solver)
            for label, solver in (("game", "game"), ("Paper", es.solvers.Paper()), ("exact", "exact"))
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
    """Seconds for a row of PCA against dimension: exact sums, and the game."""
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
                        # The sums alone: what grows with the rows.
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
                        es.solve(kind, data, 4, "game")
                    times.append(time.perf_counter() - start)
                out[f"d = {d}, {'PCA' if views == 1 else 'CCA'}: {solver}"] = min(times) / 12_000
    return out


def large(d: int = 20_000, n: int = 20_000) -> dict[str, Any]:
    """A latent block of 300 dimensions in 20,000 columns a view, generated batch by batch."""
    latent, k = 300, 8
    rng = np.random.default_rng(0)
    deviations = np.arange(1, latent + 1) ** -0.5
    maps = [np.linalg.qr(rng.normal(size=(d, latent)).astype(np.float32))[0].T for _ in range(2)]
    rho = np.linspace(0.95, 0.5, k)
    rotations = [np.linalg.qr(rng.normal(size=(latent, latent)))[0] for _ in range(2)]
    noise = 0.1 * deviations[-1]

    def rows(seed: int, count: int) -> tuple[list[np.ndarray], np.random.Generator]:
        rng = np.random.default_rng([1, seed])
        z = rng.normal(size=(count, k))
        out = []
        for rotation in rotations:
            e = rng.normal(size=(count, latent))
            e[:, :k] = np.sqrt(rho) * z + np.sqrt(1 - rho) * e[:, :k]
            out.append((e @ rotation) * deviations)
        return out, rng

    def stream() -> Iterator[Views]:
        for seed in range(n // BATCH):
            (x, y), rng = rows(seed, BATCH)
            yield tuple(
                s.astype(np.float32) @ m + np.float32(noise) * rng.standard_normal((BATCH, d), np.float32)
                for s, m in zip((x, y), maps, strict=True)
            )

    both = [rows(seed, BATCH)[0] for seed in range(n // BATCH)]
    Lx, Ly = (np.concatenate([b[v] for b in both]) for v in range(2))
    exact = correlations(Lx, Ly)[:k].sum()

    def captured(V: np.ndarray) -> float:
        # Noise of the columns beside that of the latent block, exactly.
        projected = []
        for s, v, m in zip((Lx, Ly), np.split(V.astype(np.float64), 2), maps, strict=True):
            C = (m @ v).T @ (np.cov(s.T) @ (m @ v)) + noise**2 * v.T @ v
            projected.append((s @ (m @ v), C))
        (a, Ca), (b, Cb) = projected
        cross = (a - a.mean(0)).T @ (b - b.mean(0)) / (len(a) - 1)
        ra, rb = np.linalg.cholesky(Ca), np.linalg.cholesky(Cb)
        M = np.linalg.solve(ra, np.linalg.solve(rb, cross.T).T)
        return float(np.linalg.svd(M, compute_uv=False).sum() / exact)

    # A small run first, so that what grows is this problem's.
    es.solve(es.problems.cca(), batches(*planted(2000, (500, 500)), 0), k, "game")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    game = es.solve(es.problems.cca(), stream(), k, "game")
    seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    out = {"game": captured(game.V), "seconds": seconds, "GB beyond the data's maps": memory}
    if d <= 20_000:
        adam = es.solvers.Paper(learning_rate=1e-3, optimizer=optax.adam)
        out["Paper, Adam 1e-3"] = captured(es.solve(es.problems.cca(), stream(), k, adam).V)
    return out


def larger() -> dict[str, Any]:
    """The same at 100,000 columns a view."""
    return large(100_000, 10_000)


def knowing() -> dict[str, Any]:
    """A hundred planted problems of four spectra, two tails, four sizes, and up to three passes."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(100):
        n = int(rng.choice([2000, 5000, 10_000, 20_000]))
        condition = 10 ** rng.uniform(0, 3.5)
        rho = [np.linspace(0.95, 0.5, 8), np.linspace(0.99, 0.9, 8), np.full(6, 0.8), [0.9, 0.85, 0.3, 0.28, 0.2]]
        X, Y = planted(n, (250, 180), condition, rho[rng.integers(4)], seed=i)
        if rng.uniform() < 0.3:
            tail = np.sqrt(5 / rng.chisquare(5, size=(n, 1))).astype(np.float32)
            X, Y = X * tail, Y * tail
        epochs = int(rng.choice([1, 1, 2, 3]))
        result = es.solve(es.problems.cca(), batches(X, Y, i), 4, "game", max_epochs=epochs)
        rows.append([result.converged, tcc(X, Y, result.V, correlations(X, Y))])
    yes = np.array([r[0] for r in rows])
    reached = np.array([r[1] for r in rows])
    return {
        "said yes": int(yes.sum()),
        "of these, TCC of .99 or more": float((reached[yes] >= 0.99).mean()),
        "TCC of .995 or more": int((reached >= 0.995).sum()),
        "of these, said yes": float(yes[reached >= 0.995].mean()),
        "runs": rows,
    }


def ablation() -> dict[str, Any]:
    """One part left out at a time."""

    def no_penalties(V: Any, pairs: Any, BV: Any, norms: Any, shift: Any) -> Any:
        ((AV, _), _), *_ = pairs
        a, b = players.dot(V, AV), players.dot(V, BV)
        return players.subtract(players.scale(b, AV), players.scale(a, BV))

    def nowhere(X: Any, C: Any, G: Any, cutoff: float) -> Any:
        return jnp.zeros_like(X)

    def forgetful(N: Any, fresh: Any, anew: Any) -> Any:
        return jnp.eye(len(N))

    variants: dict[str, tuple[dict[str, Any], tuple[Any, str, Any] | None]] = {
        "all of it": ({}, None),
        "without the players' penalties": ({}, (move, "direction", no_penalties)),
        "without moves on the first rows": ({"opening": 0.0}, None),
        "without where they came from": ({}, (move, "orthogonal", nowhere)),
        "without tracked products": ({}, (filter, "gain", forgetful)),
        "sketch of rank 32": ({"rank": 32}, None),
        "sketch of rank 128": ({"rank": 128}, None),
        "no extra players": ({"extra": 0}, None),
        "without doubt": ({}, (move, "DOUBT", 0.0)),
        "moves half as often": ({}, (move, "PACE", 1.0)),
        "moves twice as often": ({}, (move, "PACE", 16.0)),
        "waits of one length, however clear residuals are": ({}, (move, "UNCLEAR", 1.0)),
    }
    out: dict[str, Any] = {}
    for label, (settings, patch) in variants.items():
        with mock.patch.object(*patch) if patch else nullcontext():
            # Compiled programs hold what is patched.
            jax.clear_caches()
            out[label] = {
                f"{name}, k={k}": solved(name, k, solver=es.solvers.Game(**settings))[1]
                for name, k in (("mnist", 32), ("synthetic", 4))
            }
    jax.clear_caches()
    return out


HEAD = """# The accelerated game, measured

Made by `python benchmarks/acceleration.py`, or `... acceleration.py SECTION`; every figure, raw, is in
[acceleration.json](acceleration.json). Two CPU cores, JAX in float32. TCC: canonical correlations of the projected
views, summed, over the exact top-k sum (1 is perfect). Batches of 100, raw data centred as they stream, the last short
batch used, defaults only, and one pass unless it says otherwise.

The defaults were chosen on planted problems of other shapes (power-law, log-uniform and flat spectra, Gaussian and
Student rows), word counts of random topics and scikit-learn's digits. These were settled with the problems below in
view: the pace of moves, the rank of a sketch and up to where it is whole, how often it learns, the guard of the noise,
the number of extra players, and the rows that are kept and moves made on them.
[accelerated.md](../accelerated.md) says what remains to be mended.

"""

SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        accuracy,
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
        if section == "accuracy":
            lines.append(f"| {label} | least {min(value):.4f} of {shown(value)} |")
        elif section == "timing":
            unit = "" if "over" in label else " s"
            spread = f"{min(value):.2f} to {max(value):.2f}"
            lines.append(f"| {label} | median {statistics.median(value):.2f}{unit}, {spread} |")
        elif label != "runs":
            lines.append(f"| {label} | {shown(value)} |")
    return [*lines, ""]


def main(names: list[str]) -> None:
    path = RESULTS / "acceleration.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names or SECTIONS:
        known[name] = SECTIONS[name]()
        path.write_text(json.dumps(known, indent=1) + "\n")
        print("\n".join(table(name, known[name])), flush=True)
    lines = [line for name in SECTIONS if name in known for line in table(name, known[name])]
    (RESULTS / "acceleration.md").write_text(HEAD + "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])

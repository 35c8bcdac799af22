"""The paper's ICA experiments on three mixed signals: their matrices, and Algorithm 2 on minibatches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from scipy.optimize import linear_sum_assignment

import eigenstream as es
from experiments.common import STYLES

#: Length of the series, and the number of seeds.
N, SEEDS = 2000, 10
#: The paper's passes over the data, and how many times as many the last player needs to converge.
PASSES, LONGER = 1000, 4
#: The paper minimises kurtosis, so its players maximise -A.
PROBLEM = es.problems.ica(center=False).with_sign(-1)


class Signals(NamedTuple):
    """Mixed signals, their sources, and the exact matrices of the mixed signals."""

    X: np.ndarray
    S: np.ndarray
    A: np.ndarray
    B: np.ndarray

    @property
    def eigenvalues(self) -> np.ndarray:
        return scipy.linalg.eigh(self.A, self.B, eigvals_only=True)


def signals(seed: int = 0) -> Signals:
    X, S = es.datasets.mixed_signals(N, seed)
    return Signals(X, S, *matrices(X))


def matrices(X: np.ndarray, epsilon_A: float = 0.0, epsilon_B: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """``A`` and ``B`` with the two regularisations of appendix F.1, of the covariance in ``A`` and of ``B``.

    Not by `eigenstream.problems`, which has no ``ε`` within ``A``.
    """
    C, eye = X.T @ X / len(X), np.eye(X.shape[1])
    D = C + epsilon_A * eye
    fourth = (X * (X**2).sum(1, keepdims=True)).T @ X / len(X)
    return fourth - np.trace(D) * D - 2 * D @ D, C + epsilon_B * eye


class Setting(NamedTuple):
    """The settings of Algorithm 2 in the paper's tables, for batches of ``b`` rows."""

    b: int
    steps: int
    learning_rate: float
    averaging: float
    independent: bool = True

    @classmethod
    def of(cls, b: int, independent: bool = True, passes: int = 1000) -> Setting:
        return cls(b, passes * N // b, 1e-2 * b / N, b / N, independent and b < N)


def play(setting: Setting, X: np.ndarray, looks: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Players of Algorithm 2 during its runs on mixed signals (seeds, n, 3), one run for each seed.

    Returns snapshots of the players (seeds, looks, 3, 3), and their steps (looks,).
    """
    solver = es.solvers.Paper(
        learning_rate=setting.learning_rate, averaging=setting.averaging, independent=setting.independent
    )
    return trajectories(solver.init, partial(solver.step, PROBLEM), setting, X, looks)


def trajectories(
    init: Any, step: Any, setting: Setting, X: np.ndarray, looks: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Players during runs of any step ``(state, batch) -> (state, info)``, as in `play`.

    Rows of a batch are drawn with replacement; a batch of ``n`` rows is the data itself.
    """
    every, n = setting.steps // looks, X.shape[1]

    @jax.jit
    def run(key: Any, X: Any) -> Any:
        def one(state: Any, key: Any) -> tuple[Any, None]:
            batch = X if setting.b == n else X[jax.random.randint(key, (setting.b,), 0, n)]
            return step(state, batch)[0], None

        def look(state: Any, key: Any) -> tuple[Any, Any]:
            state, _ = jax.lax.scan(one, state, jax.random.split(key, every))
            return state, state.V

        first, stream = jax.random.split(key)
        return jax.lax.scan(look, init(PROBLEM, X, 3, first), jax.random.split(stream, looks))[1]

    keys = jnp.stack([jax.random.key(seed) for seed in range(len(X))])
    return np.asarray(jax.vmap(run)(keys, jnp.asarray(X, jnp.float32)), np.float64), every * np.arange(1, looks + 1)


def quotients(V: np.ndarray, data: Signals) -> np.ndarray:
    """Rayleigh quotients of players (..., 3) on the whole data."""
    return np.einsum("...i,ij,...j->...", V, data.A, V) / np.einsum("...i,ij,...j->...", V, data.B, V)


def draw_players(axes: Any, passes: np.ndarray, curves: np.ndarray, data: Signals) -> None:
    """Plot Rayleigh quotients (seeds, looks, 3): mean, standard deviation, and the exact eigenvalues."""
    for i, style in enumerate(STYLES[:3]):
        middle, wide = curves[:, :, i].mean(0), curves[:, :, i].std(0)
        axes.plot(passes, middle, linestyle=style, color=f"C{i}", label=f"player {i + 1}")
        axes.fill_between(passes, middle - wide, middle + wide, color=f"C{i}", alpha=0.25)
        axes.axhline(data.eigenvalues[i], color="black", linewidth=0.6)
    axes.axvline(PASSES, color="grey", linestyle=":", linewidth=0.8)
    axes.set_xscale("log")


def columns(kind: str, runs: list[tuple[int, Any, np.ndarray, np.ndarray]], every: int = 1) -> dict[str, list[Any]]:
    """Every tenth snapshot of runs ``(batch, kind, passes, quotients)``, of some seeds, as columns of a table."""
    rows = [
        [b, which, seed, float(passes[look]), *curves[seed, look].tolist()]
        for b, which, passes, curves in runs
        for seed in range(0, len(curves), every)
        for look in range(9, curves.shape[1], 10)
    ]
    names = ("batch", kind, "seed", "passes", "eigenvalue 1", "eigenvalue 2", "eigenvalue 3")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def unmixed(data: Signals, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signals recovered by players (3, 3), matched to the sources in order and sign, and their correlations."""
    Z = data.X @ V.T
    correlations = np.corrcoef(Z.T, data.S.T)[:3, 3:]
    recovered, sources = linear_sum_assignment(-np.abs(correlations))
    order = recovered[np.argsort(sources)]
    best = correlations[order, np.arange(3)]
    Z = Z[:, order] * np.sign(best)
    return Z / Z.std(0), np.abs(best)

"""Appendix F.2: players that learn one after another, each when its parent is within 0.1 of its eigenvalue."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import eigenstream as es
from experiments.common import STYLES, command_line, save, table, write_csv, write_page
from experiments.signals import PROBLEM, N, Setting, Signals, play, quotients, signals, trajectories

SIZES = (N, N // 2, N // 4)
SEEDS = 20
#: The paper's passes over the data, and how many times longer runs are followed.
PASSES, LONGER = 1000, 4
#: How near a parent's Rayleigh quotient has to come before the next player may move.
NEAR = 0.1


class Found(NamedTuple):
    passes: dict[int, np.ndarray]
    #: (seeds, looks, 3) Rayleigh quotients by batch size.
    parallel: dict[int, np.ndarray]
    sequential: dict[int, np.ndarray]
    data: Signals

    def errors(self, curves: np.ndarray, part: float = 1.0) -> np.ndarray:
        """(seeds, 3): how far the players are from their eigenvalues after a part of the run."""
        return np.abs(curves[:, int(part * curves.shape[1]) - 1] - self.data.eigenvalues)


def run(sizes: tuple[int, ...] = SIZES, seeds: int = SEEDS, passes: int = LONGER * PASSES) -> Found:
    data = signals()
    X = np.stack([data.X] * seeds)
    parallel, sequential, times = {}, {}, {}
    for b in sizes:
        setting = Setting.of(b, passes=passes)
        V, steps = play(setting, X)
        parallel[b], times[b] = quotients(V, data), steps * b / N
        V, _ = trajectories(*one_by_one(setting, data), setting, X)
        sequential[b] = quotients(V, data)
    return Found(times, parallel, sequential, data)


def one_by_one(setting: Setting, data: Signals) -> tuple[Any, Any]:
    """Algorithm 2 of which only one player moves: the first whose parents have all come near, which then stay."""
    solver = es.solvers.Paper(
        learning_rate=setting.learning_rate, averaging=setting.averaging, independent=setting.independent
    )
    A, B, true = (jnp.asarray(x, jnp.float32) for x in (data.A, data.B, data.eigenvalues))

    def init(problem: Any, X: Any, k: int, key: Any) -> Any:
        return _Turns(solver.init(problem, X, k, key), jnp.zeros((), jnp.int32))

    def step(turns: Any, batch: Any) -> tuple[Any, None]:
        state, now = turns
        new, _ = solver.step(PROBLEM, state, batch)
        V = jnp.where((jnp.arange(3) == now)[:, None], new.V, state.V)
        v = V[now]
        near = jnp.abs(v @ A @ v / (v @ B @ v) - true[now]) < NEAR
        # The last player goes on to the end, as all do who learn together.
        return _Turns(new._replace(V=V), jnp.where(near & (now < 2), now + 1, now)), None

    return init, step


class _Turns(NamedTuple):
    state: Any
    now: jax.Array

    @property
    def V(self) -> jax.Array:
        return self.state.V


def draw(found: Found, path: Path) -> None:
    sizes = list(found.passes)
    figure = Figure(figsize=(3.4 * len(sizes), 5.6), layout="constrained")
    grid = figure.subplots(2, len(sizes), sharex=True, sharey=True, squeeze=False)
    for column, b in enumerate(sizes):
        for axes, curves in zip(grid[:, column], (found.parallel[b], found.sequential[b]), strict=True):
            for i, style in enumerate(STYLES[:3]):
                middle, wide = curves[:, :, i].mean(0), curves[:, :, i].std(0)
                axes.plot(found.passes[b], middle, linestyle=style, color=f"C{i}", label=f"player {i + 1}")
                axes.fill_between(found.passes[b], middle - wide, middle + wide, color=f"C{i}", alpha=0.25)
                axes.axhline(found.data.eigenvalues[i], color="black", linewidth=0.6)
            axes.axvline(PASSES, color="grey", linestyle=":", linewidth=0.8)
            axes.set_xscale("log")
        grid[0, column].set_title(f"b = {sized(b)}")
        grid[1, column].set_xlabel("passes over the data")
    for row, name in enumerate(("together", "one after another")):
        grid[row, 0].set_ylabel(f"{name}\nRayleigh quotient")
    grid[0, 0].legend(fontsize="small")
    save(figure, path)


def main(out: Path) -> None:
    found = run()
    draw(found, out / "sequential")
    rows: dict[str, list[Any]] = {"batch": [], "players": [], "seed": [], "passes": []}
    rows |= {f"eigenvalue {i}": [] for i in (1, 2, 3)}
    lines, third = [], {}
    for b in found.passes:
        both = {"together": found.parallel[b], "one after another": found.sequential[b]}
        for name, curves in both.items():
            cells: list[Any] = []
            for part in (1 / LONGER, 1.0):
                errors = found.errors(curves, part)
                cells += [f"{int((errors[:, i] < NEAR).sum())} of {SEEDS}" for i in range(3)]
                cells.append(float(np.median(errors[:, 2])))
            third[b, name] = cells[3], cells[7], (found.errors(curves, 1 / LONGER)[:, 2] < NEAR).sum()
            lines.append([f"{sized(b)}, {name}", *cells])
            for seed in range(0, SEEDS, 2):
                for look in range(9, curves.shape[1], 10):
                    values = [b, name, seed, float(found.passes[b][look]), *curves[seed, look].tolist()]
                    for column, value in zip(rows.values(), values, strict=True):
                        column.append(value)
    write_csv(out / "sequential.csv", rows)
    worse = [third[b, "one after another"][1] > third[b, "together"][1] for b in found.passes]
    near = {b: third[b, "one after another"][2] for b in found.passes if b < N}

    def told(column: int) -> str:
        return ", ".join(
            f"{third[b, 'one after another'][column]:.3f} against {third[b, 'together'][column]:.3f} at {sized(b)}"
            for b in found.passes
        )

    write_page(
        out / "sequential.md",
        "One after another, or together (appendix F.2)",
        f"Players that learn one after another, each once its parent's Rayleigh quotient is within {NEAR} of the "
        "truth, do not learn the third eigenvalue to that accuracy with minibatches; players that learn together do.",
        f"{'Holds' if all(worse) else 'Does not hold'} that learning one after another is worse, once runs are long "
        f"enough to tell: after {LONGER * PASSES:,} passes the third player's median distance from its eigenvalue is "
        f"{told(1)}. After the paper's {PASSES:,} passes, when many are still on their way, it is {told(0)}. "
        f"{'Does not hold' if any(near.values()) else 'Holds'} that with minibatches no run one after another comes "
        f"within {NEAR} in the paper's time: {', '.join(f'{n} of {SEEDS} do at {sized(b)}' for b, n in near.items())}.",
        f"""
![Rayleigh quotients of players that learn together and one after another](sequential.png)

Seeds, of {SEEDS}, whose player is within {NEAR} of its eigenvalue
({", ".join(f"{x:.3f}" for x in found.data.eigenvalues)}) after {PASSES:,} passes and after {LONGER * PASSES:,}, and the
third one's median distance from it:

{table(["batch, players learn", "λ₁ at 1,000", "λ₂", "λ₃", "distance", "λ₁ at 4,000", "λ₂", "λ₃", "distance"], lines)}

Settings as for [batch sizes](batch_size.md), independent rows. A player that waits stays at its random start; its
parents, once near, stay where they are. Shading: one standard deviation over seeds; dotted line: the end of the paper's
runs. Data of every second seed, every tenth look: [sequential.csv](sequential.csv).
""",
    )


def sized(b: int) -> str:
    return "n" if b == N else f"n/{N // b}"


if __name__ == "__main__":
    command_line(main)

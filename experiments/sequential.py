"""Appendix F.2: players that learn one after another, each once its parent is within 0.1 of its eigenvalue."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import eigenstream as es
from experiments.common import command_line, save, table, write_csv, write_page
from experiments.signals import (
    LONGER,
    PASSES,
    PROBLEM,
    N,
    Setting,
    Signals,
    columns,
    draw_players,
    play,
    quotients,
    signals,
    trajectories,
)

SIZES = (N, N // 2, N // 4)
SEEDS = 20
#: The next player moves once its parent's Rayleigh quotient is within this distance of the eigenvalue.
NEAR = 0.1


class Found(NamedTuple):
    passes: dict[int, np.ndarray]
    #: (seeds, snapshots, 3) Rayleigh quotients by batch size.
    parallel: dict[int, np.ndarray]
    sequential: dict[int, np.ndarray]
    data: Signals

    def errors(self, curves: np.ndarray, part: float = 1.0) -> np.ndarray:
        """(seeds, 3): distance of the players from their eigenvalues after a part of the run."""
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
    """Algorithm 2 with one moving player: the first whose parents are all within NEAR. The parents stay fixed."""
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
        # The last player learns to the end, like all players that learn together.
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
            draw_players(axes, found.passes[b], curves, found.data)
        grid[0, column].set_title(f"b = {sized(b)}")
        grid[1, column].set_xlabel("passes over the data")
    for row, name in enumerate(("together", "one after another")):
        grid[row, 0].set_ylabel(f"{name}\nRayleigh quotient")
    grid[0, 0].legend(fontsize="small")
    save(figure, path)


def report(found: Found, out: Path) -> None:
    draw(found, out / "sequential")
    seeds = len(next(iter(found.parallel.values())))
    both = [("together", found.parallel), ("one after another", found.sequential)]
    runs = [(b, name, found.passes[b], curves[b]) for b in found.passes for name, curves in both]
    write_csv(out / "sequential.csv", columns("players", runs, every=2))
    lines, third = [], {}
    for b in found.passes:
        for name, curves in both:
            cells: list[Any] = []
            for part in (1 / LONGER, 1.0):
                errors = found.errors(curves[b], part)
                cells += [f"{int((errors[:, i] < NEAR).sum())} of {seeds}" for i in range(3)]
                cells.append(float(np.median(errors[:, 2])))
            third[b, name] = cells[3], cells[7], (found.errors(curves[b], 1 / LONGER)[:, 2] < NEAR).sum()
            lines.append([f"{sized(b)}, {name}", *cells])
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
        "eigenvalue, do not learn the third eigenvalue to that accuracy with minibatches. Players that learn together "
        "do.",
        f"{'Holds' if all(worse) else 'Does not hold'} that learning one after another is worse in a long run: "
        f"after {LONGER * PASSES:,} passes the third player's median distance from its eigenvalue is {told(1)}. After "
        f"the paper's {PASSES:,} passes, when many players have not converged, it is {told(0)}. "
        f"{'Does not hold' if any(near.values()) else 'Holds'} that with minibatches no run one after another comes "
        f"within {NEAR} in the paper's time: {', '.join(f'{n} of {seeds} do at {sized(b)}' for b, n in near.items())}.",
        f"""
![Rayleigh quotients of players that learn together and one after another](sequential.png)

The number of seeds, of {seeds}, whose player is within {NEAR} of its eigenvalue
({", ".join(f"{x:.3f}" for x in found.data.eigenvalues)}) after {PASSES:,} passes and after {LONGER * PASSES:,}, and the
median distance of the third player:

{table(["batch, players learn", "λ₁ at 1,000", "λ₂", "λ₃", "distance", "λ₁ at 4,000", "λ₂", "λ₃", "distance"], lines)}

Settings as for [batch sizes](batch_size.md), with independent rows. A player stays at its random start until its
parents are near their eigenvalues; the parents then stay fixed. Shading: one standard deviation over seeds. Dotted
line: the end of the paper's runs. Data of every second seed, every tenth snapshot: [sequential.csv](sequential.csv).
""",
    )


def sized(b: int) -> str:
    return "n" if b == N else f"n/{N // b}"


if __name__ == "__main__":
    command_line(lambda out: report(run(), out))

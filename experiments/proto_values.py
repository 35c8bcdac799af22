"""Section 1, reinforcement learning: proto-value functions of a grid world from a stream of transitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import scipy.linalg
from matplotlib.figure import Figure

import eigenstream as es
from experiments.common import command_line, save, spread, table, write_json, write_page

#: Four rooms joined by doors; '.' is free. Their sizes differ, so that no two leading eigenvalues are close.
ROOMS = """
....#.........
....#.........
..............
#.###.########
....#.........
..............
....#.........
....#.........
....#.........
....#.........
....#.........
"""
K, BATCH, STEPS, SEEDS, DISCOUNT = 8, 100, 200_000, 5, 0.95
GAME, PAPER, EXACT = "accelerated game", "Algorithm 2 with Adam", "exact sums of the same stream"


class World(NamedTuple):
    """A grid world: its free cells (n, 2) and their adjacency matrix."""

    shape: tuple[int, int]
    cells: np.ndarray
    adjacency: np.ndarray

    @property
    def degrees(self) -> np.ndarray:
        return self.adjacency.sum(1)

    def solved(self) -> tuple[np.ndarray, np.ndarray]:
        """All eigenpairs of ``L v = λ D v``, in ascending order."""
        D = np.diag(self.degrees)
        return scipy.linalg.eigh(D - self.adjacency, D)

    def successors(self) -> np.ndarray:
        """``(I - γ P)⁻¹``: discounted visits of every cell from every other, on a random walk."""
        return np.linalg.inv(np.eye(len(self.cells)) - DISCOUNT * self.adjacency / self.degrees[:, None])

    def on_grid(self, v: np.ndarray) -> np.ndarray:
        image = np.full(self.shape, np.nan)
        image[tuple(self.cells.T)] = v
        return image


def world(rooms: str = ROOMS) -> World:
    free = np.array([list(line) for line in rooms.split()]) == "."
    cells = np.argwhere(free)
    return World(free.shape, cells, (np.abs(cells[:, None] - cells[None]).sum(-1) == 1).astype(float))


def walk(grid: World, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """States before and after each step of a random walk, uniform over the free neighbours."""
    rng = np.random.default_rng(seed)
    neighbours = [np.flatnonzero(row) for row in grid.adjacency]
    states, chances = np.empty(steps + 1, np.int64), rng.random(steps)
    states[0] = rng.integers(len(neighbours))
    for t in range(steps):
        near = neighbours[states[t]]
        states[t + 1] = near[int(chances[t] * len(near))]
    return states[:-1], states[1:]


class Found(NamedTuple):
    grid: World
    #: Steps of the walk.
    steps: int
    #: (n, k) eigenvectors of seed 0, by method.
    vectors: dict[str, np.ndarray]
    #: Errors of the subspace, and of the successor representation within it, by method and seed.
    errors: dict[str, list[float]]
    successor_errors: dict[str, list[float]]
    #: The latter for the true eigenvectors.
    best_successor_error: float


def run(steps: int = STEPS, seeds: int = SEEDS, k: int = K) -> Found:
    grid = world()
    _, true = grid.solved()
    D = np.diag(grid.degrees)
    vectors: dict[str, np.ndarray] = {}
    errors: dict[str, list[float]] = {name: [] for name in (GAME, PAPER, EXACT)}
    successor_errors: dict[str, list[float]] = {name: [] for name in errors}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(steps)
        transitions = [end[order] for end in walk(grid, steps, seed)]
        batches = [tuple(end[lo : lo + BATCH] for end in transitions) for lo in range(0, steps, BATCH)]
        for name in errors:
            V = solved(name, grid, batches, k, seed)
            vectors.setdefault(name, V)
            errors[name].append(es.metrics.subspace_error(V, true[:, :k], D))
            successor_errors[name].append(successor_error(grid, V))
    return Found(grid, steps, vectors, errors, successor_errors, successor_error(grid, true[:, :k]))


def solved(name: str, grid: World, batches: list[Any], k: int, seed: int) -> np.ndarray:
    total = len(batches)
    rate = es.solvers.warmup_harmonic(base=1e-2, final=1e-4, warmup=total // 20, total=total)
    solver = {GAME: "game", PAPER: es.solvers.Paper(learning_rate=rate, optimizer=optax.adam), EXACT: "exact"}[name]
    problem = es.problems.laplacian(n_nodes=len(grid.cells))
    return es.solve(problem, batches, k, solver, which="smallest", random_state=seed).V


def successor_error(grid: World, V: np.ndarray) -> float:
    """The share of the norm of the successor representation outside the span of ``V``."""
    root = np.sqrt(grid.degrees)[:, None]
    Q = np.linalg.qr(root * V)[0]
    # Symmetric in the metric of the degrees; its eigenvectors are those of the Laplacian.
    M = root * grid.successors() / root.T
    return float(np.linalg.norm(M - Q @ (Q.T @ M @ Q) @ Q.T) / np.linalg.norm(M))


def draw(found: Found, path: Path) -> None:
    grid, k = found.grid, next(iter(found.vectors.values())).shape[1]
    _, true = grid.solved()
    rows = {"true graph": true[:, :k]} | {name: found.vectors[name] for name in (GAME, PAPER)}
    figure = Figure(figsize=(1.35 * k, 1.5 * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), k, squeeze=False)
    D = np.diag(grid.degrees)
    for row, (name, V) in enumerate(rows.items()):
        for i in range(k):
            v = V[:, i] / np.sqrt(V[:, i] @ D @ V[:, i])
            v = v * (np.sign(v @ D @ true[:, i]) or 1)
            limit = np.abs(true[:, i]).max()
            axes[row, i].imshow(grid.on_grid(v), cmap="RdBu", vmin=-limit, vmax=limit)
            axes[row, i].set_facecolor("0.4")
            axes[row, i].set(xticks=[], yticks=[])
            if not row:
                axes[row, i].set_title(f"v{i + 1}", fontsize="small")
        axes[row, 0].set_ylabel(name.replace(" with", "\nwith"), fontsize="small")
    save(figure, path)


def report(found: Found, out: Path) -> None:
    draw(found, out / "proto_values")
    write_json(
        out / "proto_values.json",
        {
            "subspace error, by seed": found.errors,
            "error of the successor representation, by seed": found.successor_errors,
            "the same with the true eigenvectors": found.best_successor_error,
            "vectors of the first seed": {name: V.round(6) for name, V in found.vectors.items()},
        },
    )
    k, seeds = found.vectors[GAME].shape[1], len(found.errors[GAME])
    least, most = np.mean(found.errors[EXACT]), np.mean(found.errors[GAME])
    rows = [[name, spread(found.errors[name]), spread(found.successor_errors[name])] for name in found.errors]
    rows.append(["true eigenvectors", "0", f"{found.best_successor_error:.4f}"])
    write_page(
        out / "proto_values.md",
        "Proto-value functions from a stream of transitions (section 1)",
        "Normalized graph Laplacians are generalized eigenvalue problems, `A = L` and `B` the degrees, whose smallest "
        "eigenvectors are representations for learning value functions (proto-value functions, successor features).",
        f"{'Holds' if most < 0.05 else 'Does not hold'}: from {found.steps:,} steps of a random walk through "
        f"four rooms with {len(found.grid.cells)} cells in all, the eigenvectors of the {k} smallest eigenvalues have "
        f"a subspace error of {most:.4f}; exact sums of the same stream have {least:.4f}. In this small world the "
        "accelerated game has a player for every dimension and keeps a running mean of the whole problem.",
        f"""
![eigenvectors on the grid, true and learned](proto_values.png)

| | |
| --- | --- |
| transitions | one random walk, uniform over the free neighbours; shuffled, in batches of {BATCH}, read once |
| Algorithm 2 | with Adam, step sizes from 10⁻² to 10⁻⁴ after a warm-up, not tuned |
| subspace error | against the true graph, in the metric of the degrees |
| successor representation | `(I - γP)⁻¹`, γ = {DISCOUNT}: the share of its norm outside the span of the {k} vectors |

Mean ± standard deviation over {seeds} seeds:

{table(["method", "subspace error", "successor representation, share outside"], rows)}

Data: [proto_values.json](proto_values.json).
""",
    )


if __name__ == "__main__":
    command_line(lambda out: report(run(), out))

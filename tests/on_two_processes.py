"""Run by test_distributed.py, in each of two processes and in one alone: solve the same files."""

import contextlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import eigenstream as es
from eigenstream.core import device_moments, device_sums, krylov
from eigenstream.streams.batching import Batches

PAPER = {"optimizer": optax.adam, "learning_rate": 1e-2}
#: Problem, number of views, solver and mesh.
CASES = {
    "cca paper": (es.problems.cca(), 2, es.solvers.Paper(**PAPER), "auto"),
    "cca paper data=4": (es.problems.cca(), 2, es.solvers.Paper(**PAPER, independent=False), "data=4"),
    "cca paper feature=4": (es.problems.cca(), 2, es.solvers.Paper(**PAPER), "data=1,feature=4"),
    "pca exact": (es.problems.pca(), 1, "exact", "auto"),
    "cca exact": (es.problems.cca(), 2, "exact", "auto"),
    "cca exact feature=4": (es.problems.cca(), 2, "exact", "data=1,feature=4"),
    "cca exact without a mesh": (es.problems.cca(), 2, "exact", None),
    "lda exact without a mesh": (es.problems.lda(3), "labels", "exact", None),
    "lda paper": (es.problems.lda(3), "labels", es.solvers.Paper(**PAPER), "auto"),
}


def run(folder: Path, name: str, mesh: str | None) -> np.ndarray:
    problem, views, solver, _ = CASES[name]
    files = ["x.npy", "labels.npy"] if views == "labels" else ["x.npy", "y.npy"][:views]
    batches = es.streams.batches(*(folder / f for f in files), batch_size=53)
    return es.solve(problem, batches, 2, solver, mesh=mesh, max_epochs=2).V


class Counted:
    """A source that records which of its rows were read."""

    def __init__(self, array: np.ndarray):
        self.array, self.read = array, set()
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index: slice) -> np.ndarray:
        self.read |= set(range(*index.indices(len(self.array))))
        return self.array[index]


def solve_all(folder: Path, several: bool) -> None:
    mesh = "auto" if several else None
    out = {name: run(folder, name, case[3] if several else None).tolist() for name, case in CASES.items()}
    source = Counted(np.load(folder / "x.npy"))
    es.solve(es.problems.pca(), Batches((source,), 53, False), 2, es.solvers.Paper(**PAPER), mesh=mesh)
    out["read"] = len(source.read)
    model = es.PCA(2, solver=es.solvers.Paper(**PAPER), mesh=mesh)
    model.fit_stream(es.streams.batches(folder / "x.npy", batch_size=53))
    out["means"], out["variances"] = model.mean_.tolist(), model.explained_variance_.tolist()
    name = f"process{jax.process_index()}.json" if several else "alone.json"
    (folder / name).write_text(json.dumps(out))


def spread(folder: Path, several: bool) -> None:
    """Matrices that no process holds whole: by Lanczos, by the shifted inverse of few rows, and of a singular B."""
    device_moments.GATHERED, device_sums.WIDTH, krylov.SMALL = 0, 16, 1
    rng = np.random.default_rng(1)
    z = rng.normal(size=(1013, 3))
    x, y = (z @ rng.normal(size=(3, d)) + rng.normal(size=(1013, d)) for d in (211, 157))
    twice = np.c_[x[:, :120], x[:, :30]]
    for name, views, mesh in (
        ("lanczos", (x, y), "auto"),
        ("crowded", (x[:420], y[:420]), "data=1,feature=4"),
        ("singular", (twice, y), "auto"),
    ):
        found = es.solve(es.problems.cca(), es.streams.batches(*views), 2, "exact", mesh=mesh if several else None)
        who = jax.process_index() if several else "alone"
        np.savez(folder / f"spread_{name}_{who}.npz", found.eigenvalues, found.V)


def game(folder: Path, several: bool) -> None:
    # Batches so large that one process would not join them.
    views = [np.load(folder / f"{name}.npy")[:900] for name in "xy"]
    batches, solver = es.streams.batches(*views, batch_size=300), es.solvers.Game(extra=2, rank=12)
    result = es.solve(es.problems.cca(), batches, 2, solver, mesh="auto" if several else None, max_epochs=3)
    np.save(folder / f"game{jax.process_index() if several else 'alone'}.npy", result.V)


def killed(folder: Path, several: bool) -> None:
    """Several processes stop after a checkpoint, from which one process goes on."""
    problem, _, solver, mesh = CASES["cca paper"]
    batches = es.streams.batches(folder / "x.npy", folder / "y.npy", batch_size=53)
    options = {"folder": folder / "run", "checkpoint_every": 0}
    if several:

        def fail(record: dict) -> None:
            if record["step"] >= 50:
                raise RuntimeError("as if it had been killed")

        with contextlib.suppress(RuntimeError):
            es.solve(problem, batches, 2, solver, mesh=mesh, max_epochs=4, callbacks=[fail], **options)
    else:
        resumed = es.solve(problem, batches, 2, solver, max_epochs=4, resume=True, **options)
        alone = es.solve(problem, batches, 2, solver, max_epochs=4)
        np.save(folder / "resumed.npy", [resumed.V, alone.V])


def killed_exact(folder: Path, several: bool) -> None:
    """The same with exact sums, on a mesh and without one."""
    views = [np.load(folder / f"{name}.npy") for name in "xy"]
    pieces = [tuple(view[i : i + 53] for view in views) for i in range(0, 1013, 53)]

    def failing():
        yield from pieces[:15]
        raise RuntimeError("as if it had been killed")

    alone = es.solve(es.problems.cca(), pieces, 2, "exact").V
    for name, mesh in (("mesh", "auto"), ("apart", None)):
        options = {"solver": "exact", "folder": folder / name, "checkpoint_every": 0}
        if several:
            with contextlib.suppress(RuntimeError):
                es.solve(es.problems.cca(), failing(), 2, mesh=mesh, **options)
        else:
            resumed = es.solve(es.problems.cca(), iter(pieces), 2, resume=True, **options)
            np.save(folder / f"exact_{name}.npy", [resumed.V, alone])
            # Nothing was read twice, and the sums before the checkpoint count.
            assert resumed.n_samples_seen == 1013


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    several = "JAX_PROCESS_ID" in os.environ
    if several:
        es.distributed.initialize()
    for task in (solve_all, game, killed, killed_exact, spread):
        task(Path(sys.argv[1]), several)


if __name__ == "__main__":
    main()

"""Run by test_distributed.py, once for every process: what several of them make of the same files."""

import contextlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import eigenstream as es
from eigenstream.streams.batching import Batches

PAPER = {"optimizer": optax.adam, "learning_rate": 1e-2}
#: Solvers, and how far apart one process and several may end.
CASES = {
    "cca paper": (es.problems.cca(), 2, es.solvers.Paper(**PAPER), "auto"),
    "cca paper data=4": (es.problems.cca(), 2, es.solvers.Paper(**PAPER, independent=False), "data=4"),
    "cca paper feature=4": (es.problems.cca(), 2, es.solvers.Paper(**PAPER), "data=1,feature=4"),
    "pca exact": (es.problems.pca(), 1, "exact", "auto"),
    "lda paper": (es.problems.lda(3), "labels", es.solvers.Paper(**PAPER), "auto"),
}


def run(folder: Path, name: str, mesh: str | None) -> np.ndarray:
    problem, views, solver, _ = CASES[name]
    files = ["x.npy", "labels.npy"] if views == "labels" else ["x.npy", "y.npy"][:views]
    batches = es.streams.batches(*(folder / f for f in files), batch_size=53)
    return es.solve(problem, batches, 2, solver, mesh=mesh, max_epochs=2).V


class Counted:
    """A source that says which of its rows were read."""

    def __init__(self, array: np.ndarray):
        self.array, self.read = array, set()
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index: slice) -> np.ndarray:
        self.read |= set(range(*index.indices(len(self.array))))
        return self.array[index]


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_enable_x64", True)
    several = "JAX_PROCESS_ID" in os.environ
    if several:
        es.distributed.initialize()
    if what == "solve":
        out = {name: run(folder, name, case[3] if several else None).tolist() for name, case in CASES.items()}
        source = Counted(np.load(folder / "x.npy"))
        batches = Batches((source,), 53, False)
        es.solve(es.problems.pca(), batches, 2, es.solvers.Paper(**PAPER), mesh="auto" if several else None)
        out["read"] = len(source.read)
        model = es.PCA(2, solver=es.solvers.Paper(**PAPER), mesh="auto" if several else None)
        model.fit_stream(es.streams.batches(folder / "x.npy", batch_size=53))
        out["means"], out["variances"] = model.mean_.tolist(), model.explained_variance_.tolist()
        name = f"process{jax.process_index()}.json" if several else "alone.json"
        (folder / name).write_text(json.dumps(out))
    elif what == "game":
        # Batches that one process would not join.
        views = [np.load(folder / f"{name}.npy")[:900] for name in "xy"]
        batches, game = es.streams.batches(*views, batch_size=300), es.solvers.Game(extra=2, rank=12, opening=0.5)
        result = es.solve(es.problems.cca(), batches, 2, game, mesh="auto" if several else None, max_epochs=3)
        np.save(folder / f"game{jax.process_index() if several else 'alone'}.npy", result.V)
    else:
        # Stopped after a checkpoint, from which one process is to go on.
        problem, _, solver, mesh = CASES[what]
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


if __name__ == "__main__":
    main()

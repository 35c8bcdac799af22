"""Run by test_placement.py in a process with eight devices: how far answers on meshes are from those of one device."""

import contextlib
import json
import pickle
import re
import sys
import tempfile

import jax
import numpy as np
import optax

import eigenstream as es
from eigenstream.core import device_moments, device_sums, krylov
from eigenstream.core.moments import NotFinite
from eigenstream.run.engine import Setup
from eigenstream.run.placement import Placement, make_mesh
from eigenstream.run.stepping_engine import SteppingEngine, _step

MESHES = ["data=8,feature=1", "data=1,feature=8", "data=4,feature=2", "data=2,feature=4"]
#: Rows, features and players, all prime.
B, D, E, K, STEPS = 53, 37, 41, 5, 60


def problems(dtype):
    rng = np.random.default_rng(0)

    def views(*sizes):
        z = rng.normal(size=(B * 4, K))
        return [
            0.2 * (z @ rng.normal(size=(K, d)) + rng.normal(size=(B * 4, d)) * np.linspace(0.5, 2, d)).astype(dtype)
            for d in sizes
        ]

    def parts(*arrays):
        split = [np.split(a, 4) for a in arrays]
        return [p if len(p) > 1 else p[0] for p in zip(*split, strict=True)]

    x, y, z = views(D, E, 31)
    labels = rng.integers(0, 7, B * 4)
    x[np.arange(B * 4), labels] += 3
    edges = rng.integers(0, 43, size=(2, B * 4))
    A, C = (q @ q.T for q in (rng.normal(size=(D, D)) for _ in range(2)))
    return {
        "pca": (es.problems.pca(), parts(x), K),
        "cca": (es.problems.cca(), parts(x, y), K),
        "ridge": (es.problems.cca(ridge=0.1, center="running"), parts(x, y), K),
        "multiview": (es.problems.multiview(), parts(x, y, z), K),
        "pls": (es.problems.pls(), parts(x, y), K),
        "lda": (es.problems.lda(7), parts(x, labels), K),
        "ica": (es.problems.ica(), parts(0.7 * rng.laplace(size=(B * 4, 11)).astype(dtype)), K),
        "laplacian": (es.problems.laplacian(n_nodes=43), parts(*edges), K),
        "matrices": (es.problems.matrices(A.astype(dtype), (C + D * np.eye(D)).astype(dtype)), None, K),
    }


def players(name, solver, mesh, dtype):
    problem, batches, k = problems(dtype)[name]
    epochs = 1 if batches is None else STEPS // len(batches)
    steps = STEPS if batches is None else None
    result = es.solve(problem, batches, k, solver, mesh=mesh, max_epochs=epochs, max_steps=steps)
    return np.asarray(result.V, np.float64)


def resumed():
    """A run that was stopped on one mesh and resumed on another, against one device."""

    def stop(record):
        if record["step"] >= 50:
            raise InterruptedError

    problem, batches, k = problems(np.float64)["cca"]
    solver = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam)
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_epochs": STEPS // 4, "folder": folder, "checkpoint_every": 0}
        try:
            es.solve(problem, batches, k, solver, mesh=MESHES[3], callbacks=[stop], **options)
        except InterruptedError:
            rest = es.solve(problem, batches, k, solver, mesh=MESHES[1], resume=True, **options)
    return apart(rest.V, es.solve(problem, batches, k, solver, max_epochs=STEPS // 4).V)


def apart(V, W):
    """The largest difference between two sets of players, relative to their size; and that of their spans."""
    return float(np.abs(V - W).max() / np.abs(W).max()), float(es.metrics.subspace_error(V, W))


def collectives(mesh, d):
    """The sizes of all arrays that a compiled step of CCA sends, with 64 rows, d features a view and 16 players."""
    x = np.zeros((64, d), np.float32)
    solver, problem = es.solvers.Paper(independent=False), es.problems.cca()
    engine = SteppingEngine(Setup(problem, solver, 16, (x, x), placement=Placement(make_mesh(mesh))))
    text = _step.lower(solver, problem, engine.state, engine._prepared((x, x), 0, len(x))).compile().as_text()
    sizes = []
    for line in text.splitlines():
        found = re.search(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)", line)
        if found and "-done" not in line:
            shapes = re.findall(r"\w+\[([\d,]*)\]", found[1])
            sizes += [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]
    return sorted(sizes, reverse=True)


def travelled():
    """How far runs and models are from one device that were resumed, opened, pickled or fitted on a mesh."""
    game = es.solvers.Game(extra=3, rank=8)
    alone, opened = (players("cca", game, mesh, np.float64) for mesh in (None, MESHES[3]))
    X = np.random.default_rng(0).normal(size=(300, 37)) * np.linspace(3, 0.5, 37)
    mesh = jax.make_mesh((2, 4), ("data", "feature"))
    # One pass: after passes to rounding the search directions are rounding errors, from which more rows would go on.
    options = {"solver": es.solvers.Game(rank=4), "memory_budget": 1, "max_epochs": 1}
    model = pickle.loads(pickle.dumps(es.PCA(2, mesh="auto", **options).fit(X)))
    given = es.PCA(2, mesh=mesh, **options).fit(X)
    plain = es.PCA(2, **options).fit(X)
    return {
        "resumed": resumed(),
        "opened": apart(opened, alone),
        "given": apart(given.components_.T, plain.components_.T),
        "pickled": apart(model.partial_fit(X).components_.T, plain.partial_fit(X).components_.T),
    }


#: Meshes of 1, 2, 4 and 8 devices.
EXACT_MESHES = [jax.make_mesh((1, 1), ("data", "feature")), "data=1,feature=2", "data=2,feature=2", *MESHES[:2]]


def exact():
    """How far exact eigenvalues and vectors on meshes are from those of one process, and of a resumed run.

    No device holds whole matrices, except in the case "gathered". See `spread` for other problems.
    """
    gathered, device_moments.GATHERED = device_moments.GATHERED, 0
    device_sums.WIDTH, krylov.SMALL = 16, 1
    rng = np.random.default_rng(0)
    z = rng.normal(size=(900, 6))
    x, y = (z @ rng.normal(size=(6, d)) + rng.normal(size=(900, d)) + 1e3 for d in (211, 157))
    labels = (z[:, 0] > 0) + 2 * (z[:, 1] > 0)
    cases = {
        "cca": (es.problems.cca(), (x, y)),
        "lda": (es.problems.lda(4), (x, labels.astype(int))),
        "pls": (es.problems.pls(), (y, x)),
        "singular": (es.problems.cca(), (np.c_[x[:, :150], x[:, :20], np.ones(900)], y)),
        "gathered": (es.problems.cca(), (x, y)),
    }
    out = {}
    for name, (problem, views) in cases.items():
        device_moments.GATHERED = gathered if name == "gathered" else 0
        batches = es.streams.batches(*views)
        alone = es.solve(problem, batches, 3, "exact")
        for mesh in EXACT_MESHES if name == "cca" else EXACT_MESHES[2:3]:
            found = es.solve(problem, batches, 3, "exact", mesh=mesh)
            far = float(np.abs(found.eigenvalues / alone.eigenvalues - 1).max())
            out[f"{name} {mesh}"] = far, apart(found.V, alone.V)[0]
    pieces = [(x[i : i + 90], y[i : i + 90]) for i in range(0, 900, 90)]

    def stopping():
        yield from pieces[:7]
        raise InterruptedError

    with tempfile.TemporaryDirectory() as folder:
        options = {"solver": "exact", "folder": folder, "checkpoint_every": 0}
        with contextlib.suppress(InterruptedError):
            es.solve(es.problems.cca(), stopping(), 3, mesh=MESHES[2], **options)
        found = es.solve(es.problems.cca(), iter(pieces), 3, mesh=MESHES[1], resume=True, **options)
    alone = es.solve(es.problems.cca(), pieces, 3, "exact")
    out["resumed"] = float(np.abs(found.eigenvalues / alone.eigenvalues - 1).max()), apart(found.V, alone.V)[0]
    return out


def spread():
    """Solutions whose programs the caller reads, their errors, and the rows of a refused batch that were summed."""
    device_moments.GATHERED, device_sums.WIDTH, krylov.SMALL = 0, 16, 1
    rng = np.random.default_rng(0)
    z = rng.normal(size=(900, 6))
    x, y, w = (z @ rng.normal(size=(6, d)) + rng.normal(size=(900, d)) for d in (211, 197, 163))
    few = np.c_[x[:430, :-1], np.ones(430)], y[:430]
    cases = {
        "pca": (es.problems.pca(), x),
        "ridge": (es.problems.cca(ridge=0.1, center=False), (x, y)),
        "multiview": (es.problems.multiview(), (x, y, w)),
        "crowded": (es.problems.cca(), few),
        "leaves": (es.problems.cca(), ({"a": x[:, :103], "b": x[:, 103:]}, y)),
    }
    out = {}
    for name, (problem, batch) in cases.items():
        alone, found = (es.solve(problem, [batch], 3, "exact", mesh=mesh) for mesh in (None, MESHES[3]))
        out[name] = float(np.abs(found.eigenvalues / alone.eigenvalues - 1).max())
    broken, sums = x.copy(), device_moments.DeviceMoments(211, mesh=make_mesh(MESHES[2])).add(x)
    broken[-1, -1] = np.nan
    with contextlib.suppress(NotFinite):
        sums.add(broken)
    return out | {"refused": sums.n - len(x)}


def main(what):
    if what in ("exact", "spread"):
        print(json.dumps(exact() if what == "exact" else spread()))
        return
    if what == "collectives":
        print(json.dumps({mesh: [collectives(mesh, d) for d in (1024, 4096)] for mesh in MESHES[:2]}))
        return
    wide = what == "float64"
    dtype = np.float64 if wide else np.float32
    jax.config.update("jax_enable_x64", wide)
    solvers = {"paper": es.solvers.Paper(learning_rate=0.02), "game": es.solvers.Game(extra=3, rank=8)}
    # In float64 all meshes for two problems, and two for the others; in float32 the types are at stake, for which one
    # mesh will do.
    meshes = {name: MESHES if name in ("cca", "lda") else MESHES[1:3] for name in problems(dtype)}
    cases = [(name, "paper", meshes[name] if wide else MESHES[-1:]) for name in meshes]
    # The game compiles several programs a mesh.
    cases += [(name, "game", MESHES[-1:]) for name in ("cca", "laplacian") if wide]
    out = {}
    for name, label, meshes in cases:
        alone = players(name, solvers[label], None, dtype)
        for mesh in meshes:
            out[f"{name} {label} {mesh}"] = apart(players(name, solvers[label], mesh, dtype), alone)
    print(json.dumps({"meshes": out, "travelled": travelled() if wide else {}}))


if __name__ == "__main__":
    main(sys.argv[1])

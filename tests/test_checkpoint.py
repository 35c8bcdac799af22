"""A run that was killed goes on as if it had not been."""

import json
import os

import jax
import numpy as np
import optax
import pytest
import scipy.sparse

import eigenstream as es
import kills
from conftest import quick
from data import latent_views
from eigenstream.run.checkpoint import Checkpoints, write_atomically
from eigenstream.solvers import SGHA, EckartYoung, Oja, Paper, RSGPlus, Smooth

LATENT, X, Y = latent_views(1010, 6, 5, np.float32)
CLASSES = (LATENT[:, 0] > 0).astype(int) + (LATENT[:, 1] > 0)
EDGES = np.random.default_rng(0).integers(0, 30, (1010, 2))

PROBLEMS = {
    "pca": (es.problems.pca(), (X,)),
    "pca, far from zero": (es.problems.pca(center="running"), (X + 1000,)),
    "cca": (es.problems.cca(), (X, Y)),
    "multiview": (es.problems.multiview(ridge=0.1), (X, Y, X[:, :3])),
    "pls": (es.problems.pls(), (X, Y)),
    "lda": (es.problems.lda(3), (X, CLASSES)),
    "ica": (es.problems.ica(), (X,)),
    "ica in two passes": (es.problems.ica(), (np.hstack([X, Y, X**2]),)),
    "sparse": (es.problems.pca(), (scipy.sparse.csr_array(np.where(X > 1, X, 0)),)),
}


ADAM = Paper(learning_rate=0.01, optimizer=optax.adam)
#: Scattered sums add up in whatever order a GPU's threads come, unless XLA is told to be deterministic.
scattered = pytest.mark.skipif(jax.default_backend() == "gpu", reason="scattered sums on a GPU differ from run to run")


class Killed(Exception):
    pass


def killed_at(step):
    def callback(record):
        if record["step"] >= step:
            raise Killed

    return callback


def runs(problem, batches, tmp_path, at, **options):
    """The result without an interruption, and with one after step ``at``."""
    whole = es.solve(problem, batches(), **options)
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        es.solve(problem, batches(), **options, folder=folder, checkpoint_every=0, callbacks=[killed_at(at)])
    return whole, es.solve(problem, batches(), **options, folder=folder, resume=True)


def five_times(view):
    return scipy.sparse.vstack(5 * [view]) if scipy.sparse.issparse(view) else np.concatenate(5 * [view])


def assert_same(first, second):
    assert first.V.tobytes() == second.V.tobytes()
    assert first.eigenvalues.tobytes() == second.eigenvalues.tobytes()
    assert first.residuals.tobytes() == second.residuals.tobytes()
    for name in ("n_iter", "n_samples_seen", "converged", "status", "message"):
        assert getattr(first, name) == getattr(second, name)
    assert len(first.history) == len(second.history)
    for a, b in zip(first.history, second.history, strict=True):
        np.testing.assert_equal({**a, "seconds": 0}, {**b, "seconds": 0})


@pytest.mark.parametrize("solver", [ADAM, "exact"], ids=["paper", "exact"])
@pytest.mark.parametrize(
    "name",
    [
        *quick([n for n in PROBLEMS if n != "sparse"], "cca", "lda"),
        pytest.param("sparse", marks=[pytest.mark.slow, scattered]),
    ],
)
def test_every_problem_resumes_to_the_same_bits(name, solver, tmp_path):
    problem, views = PROBLEMS[name]
    options = {"k": 2, "solver": solver, "max_epochs": 3}
    stream, at = es.streams.batches(*views, batch_size=40), 50
    if solver == "exact":
        # Each batch is large enough to be summed at once, so every step can be saved.
        large = tuple(five_times(view) for view in views)
        stream, at = 6 * [large if len(large) > 1 else large[0]], 4
    whole, resumed = runs(problem, lambda: stream, tmp_path, at, **options)
    assert_same(whole, resumed)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [record["step"] for record in whole.history]


SOLVERS = [
    Paper(averaging=None),
    Smooth(),
    EckartYoung(shift=1.0),
    SGHA(),
    RSGPlus(),
    Paper(shards=2, polish=True),
    Oja(),
]


@pytest.mark.parametrize("solver", quick(SOLVERS, SOLVERS[0]), ids=lambda s: type(s).__name__)
def test_every_solver_resumes_to_the_same_bits(solver, tmp_path):
    # Oja needs B = I.
    problem, views = (es.problems.pca(), (X,)) if isinstance(solver, Oja) else (es.problems.cca(), (X, Y))
    options = {"k": 2, "solver": solver, "max_epochs": 2}
    assert_same(*runs(problem, lambda: es.streams.batches(*views), tmp_path, 5, **options))


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 12])
def test_the_accelerated_game_resumes_to_the_same_bits(at, tmp_path):
    wide = np.random.default_rng(0).normal(size=(6000, 260)).astype(np.float32) * np.linspace(2, 0.2, 260, dtype="f4")
    wide[4321] *= 50

    def stream():
        return es.streams.batches(wide[:, :140], wide[:, 140:], batch_size=70, random_state=1)

    solver = es.solvers.Game(outlier=100.0)
    with pytest.warns(UserWarning, match="mean squared norm"):
        assert_same(*runs(es.problems.cca(), stream, tmp_path, at, k=3, solver=solver, max_epochs=2))


@pytest.mark.slow
def test_the_accelerated_game_resumes_where_no_row_is_an_outlier(tmp_path):
    wide = np.random.default_rng(0).normal(size=(6000, 260)).astype(np.float32)
    stream = [(wide[i : i + 70, :140], wide[i : i + 70, 140:]) for i in range(0, 6000, 70)]
    game = es.solvers.Game(outlier=np.inf)
    assert_same(*runs(es.problems.cca(), lambda: stream, tmp_path, 8, k=3, solver=game))


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 5])
def test_streams_of_all_kinds_resume(at, tmp_path):
    """A list, a generator, batches too small for a step, given matrices."""
    pairs = [(X[i : i + 50], Y[i : i + 50]) for i in range(0, 1010, 50)]
    options = {"k": 2, "solver": ADAM}
    assert_same(*runs(es.problems.cca(), lambda: pairs, tmp_path / "a", at, **options, max_epochs=2))
    assert_same(*runs(es.problems.cca(), lambda: iter(pairs), tmp_path / "b", at, **options))
    for size in (1, 3):
        stream = es.streams.batches(X[:41], Y[:41], batch_size=size)
        assert_same(
            *runs(es.problems.cca(), lambda stream=stream: stream, tmp_path / f"c{size}", at, **options, max_epochs=2)
        )
    matrix = es.problems.matrices(np.diag(np.arange(1.0, 9.0)))
    assert_same(*runs(matrix, lambda: None, tmp_path / "e", at, **options, max_steps=220))


@scattered
@pytest.mark.slow
def test_a_stream_of_edges_resumes(tmp_path):
    graph = es.problems.laplacian(n_nodes=30)
    options = {"k": 2, "solver": ADAM, "which": "smallest"}
    assert_same(*runs(graph, lambda: es.streams.edges(EDGES, 50), tmp_path, 3, **options))


def test_summed_edges_resume(tmp_path):
    """Batches of more than a block, so that nothing is queued and a checkpoint is written."""
    edges = np.random.default_rng(0).integers(0, 30, (2, 15_000))
    batches = [tuple(part) for part in np.split(edges, 3, axis=1)]
    options = {"k": 2, "solver": "exact", "which": "smallest"}
    problem = es.problems.laplacian(n_nodes=30)
    whole, resumed = runs(problem, lambda: iter(batches), tmp_path, 2, **options)
    assert_same(whole, resumed)


def test_an_estimator_resumes_to_the_same_bits(tmp_path):
    def fit(**options):
        model = es.CCA(n_components=2, solver=ADAM, max_epochs=3)
        return model.fit_stream(es.streams.batches(X, Y, batch_size=40), **options)

    whole = fit()
    with pytest.raises(Killed):
        fit(folder=tmp_path, checkpoint_every=0, callbacks=[killed_at(50)])
    resumed = fit(folder=tmp_path, resume=True)
    for name in ("x_weights_", "y_weights_", "correlations_", "x_mean_", "coef_"):
        assert getattr(whole, name).tobytes() == getattr(resumed, name).tobytes(), name


def test_a_run_that_has_converged_is_not_continued(tmp_path):
    options = {"k": 1, "solver": ADAM, "tol": 0.9, "max_epochs": 50}
    whole = es.solve(es.problems.pca(), es.streams.batches(X), **options)
    assert whole.converged
    es.solve(es.problems.pca(), es.streams.batches(X), **options, folder=tmp_path, checkpoint_every=0)
    assert_same(whole, es.solve(es.problems.pca(), es.streams.batches(X), **options, folder=tmp_path, resume=True))


def test_only_the_newest_checkpoints_are_kept_and_half_written_ones_ignored(tmp_path):
    options = {"k": 2, "solver": ADAM, "folder": tmp_path}
    with pytest.raises(Killed):
        es.solve(es.problems.pca(), es.streams.batches(X), **options, checkpoint_every=0, callbacks=[killed_at(5)])
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert kept == [2, 3, 4]
    (tmp_path / "checkpoints" / "99.orbax-checkpoint-tmp").mkdir()
    resumed = es.solve(es.problems.pca(), es.streams.batches(X), **options, resume=True)
    assert_same(es.solve(es.problems.pca(), es.streams.batches(X), 2, ADAM), resumed)


def test_a_folder_with_checkpoints_is_not_taken_by_mistake(tmp_path):
    stream = es.streams.batches(X)
    with pytest.raises(Killed):
        es.solve(es.problems.pca(), stream, 2, ADAM, folder=tmp_path, checkpoint_every=0, callbacks=[killed_at(3)])
    with pytest.raises(ValueError, match="resume=True"):
        es.solve(es.problems.pca(), stream, 2, ADAM, folder=tmp_path)
    with pytest.raises(ValueError, match="k 2, now 3"):
        es.solve(es.problems.pca(), stream, 3, ADAM, folder=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"other settings.*solver"):
        es.solve(es.problems.pca(), stream, 2, Paper(learning_rate=0.5), folder=tmp_path, resume=True)


def test_resume_without_a_checkpoint_starts(tmp_path):
    found = es.solve(es.problems.pca(), es.streams.batches(X), 2, ADAM, folder=tmp_path, resume=True)
    assert_same(es.solve(es.problems.pca(), es.streams.batches(X), 2, ADAM), found)


def test_metrics_survive_a_cut_line(tmp_path):
    stream = es.streams.batches(X)
    with pytest.raises(Killed):
        es.solve(es.problems.pca(), stream, 2, ADAM, folder=tmp_path, checkpoint_every=0, callbacks=[killed_at(4)])
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 5, "ro')
    es.solve(es.problems.pca(), stream, 2, ADAM, folder=tmp_path, resume=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert set(records[0]) == {"step", "epoch", "rows", "seconds", "eigenvalues", "residual"}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_atomically(tmp_path / "f", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_checkpoints_hold_every_bit(tmp_path):
    arrays = [np.random.default_rng(0).normal(size=(3, 4)), np.array(7, np.int32), np.zeros((0, 2)), np.array([True])]
    keeper = Checkpoints(tmp_path, every=1e9)
    assert keeper.latest() is None
    assert not keeper.due()
    keeper.save(3, arrays, {"note": [1.5, None, "x"]})
    found, values = keeper.latest()
    assert sorted(found) == [0, 1, 3]
    for i in found:
        assert found[i].tobytes() == arrays[i].tobytes()
        assert found[i].dtype == arrays[i].dtype
    assert values == {"note": [1.5, None, "x"]}
    keeper.close()


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["paper", "exact"])
def test_sigkill_at_random_moments(solver, tmp_path):
    """``make soak`` does this twenty times, and writes docs/results/kills.md."""
    found = kills.experiment(tmp_path, solver, 2)
    assert [record["same"] for record in found["kills"]] == [True] * 2


def test_another_schedule_is_another_run(tmp_path):
    def fit(base, **options):
        rate = es.solvers.warmup_harmonic(base=base, final=1e-4, warmup=2, total=100)
        solver = es.solvers.Paper(learning_rate=rate)
        return es.solve(es.problems.pca(), es.streams.batches(X), 1, solver, folder=tmp_path, **options)

    fit(1e-2, checkpoint_every=0)
    with pytest.raises(ValueError, match="other settings"):
        fit(1e-3, resume=True)
    with pytest.raises(ValueError, match="holds a run"):
        fit(1e-2)

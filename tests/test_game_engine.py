"""The game in the loop: blocks of few sizes, results on the way, passes."""

import numpy as np
import pytest

import eigenstream as es
from data import GAME, POWER, batched, captured
from eigenstream.run import game_engine
from eigenstream.run.engine import Setup
from eigenstream.run.loop import Run
from eigenstream.run.placement import n_rows
from test_checkpoint import assert_same, runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pca", "lda"])
def test_the_game_takes_blocks_of_few_sizes(kind):
    taken = []

    class Watched(game_engine.GameEngine):
        def _learn(self, block, *more):
            taken.append(n_rows(block))
            super()._learn(block, *more)

    rng = np.random.default_rng(1)
    sizes = rng.integers(150, 500, size=30)
    batches = [(rng.normal(size=(b, 40)) * np.r_[4, 3, np.ones(38)]).astype("f4") for b in sizes]
    X, problem = np.concatenate(batches), es.problems.pca()
    if kind == "lda":
        problem = es.problems.lda(3)
        batches = [(x, (x[:, 0] > 0) + (x[:, 1] > 0).astype(int)) for x in batches]
    engine = Watched(Setup(problem, es.solvers.Game(extra=0), 2, batches[0]))
    for batch, b in zip(batches, sizes, strict=True):
        engine.take(problem.accept(batch), 0, b)
    assert sum(taken) > len(X) - 512
    assert len(set(taken)) <= game_engine.FEW + 10
    assert all(size.bit_count() == 1 for size in set(taken) - set(taken[: game_engine.FEW]))
    if kind == "pca":
        exact = es.solve(problem, [X], 2, "exact")
        assert es.metrics.subspace_error(engine.finish(len(X), "", None).eigenvectors.T, exact.V) < 0.01


@pytest.mark.slow
def test_batches_of_unequal_sizes_are_checkpointed(tmp_path):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(b, 40)).astype("f4") for b in rng.integers(150, 400, size=30)]
    solver = es.solvers.Game(rank=32)
    result = es.solve(es.problems.pca(), batches, 2, solver, folder=tmp_path, checkpoint_every=0, memory_budget=1)
    steps = [int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")]
    assert max(steps) > result.n_iter - 5


def test_a_result_is_not_overwritten_by_later_batches():
    run = Run(es.problems.cca(), 4, es.solvers.Game(rank=64))
    run.take(tuple(v[:300] for v in POWER))
    first = run.result()
    run.take(tuple(v[300:600] for v in POWER))
    run.result()
    assert np.isfinite(np.asarray(first.state.lam)).all()


def test_results_read_on_the_way_change_nothing():
    read, unread = (Run(es.problems.cca(), 4, es.solvers.Game(rank=64)) for _ in range(2))
    for i, batch in enumerate(batched(POWER)):
        read.take(batch)
        unread.take(batch)
        if i > 30 and i % 7 == 0:
            read.result()
    np.testing.assert_array_equal(read.result().V, unread.result().V)


@pytest.mark.slow
def test_rows_are_new_again_after_a_fit_of_several_passes():
    model = es.CCA(4, **GAME).fit(*POWER)
    before = float(model._run.engine.state.heldout.batches)
    model.partial_fit(*(v[:3000] for v in POWER))
    assert float(model._run.engine.state.heldout.batches) > before


class Loader(list):
    """Batches that are neither a list nor a generator to the stream: they are made anew at each reading."""

    def __init__(self, items):
        super().__init__(items)
        self.opened = 0

    def read(self):
        self.opened += 1
        yield from self


@pytest.mark.parametrize("budget", [None, 1e9])
def test_a_generator_that_fits_is_kept_and_solved(budget):
    stream = Loader(batched(POWER))
    exact = es.solve(es.problems.cca(), batched(POWER), 4, "exact")
    game = es.solve(es.problems.cca(), stream.read(), 4, es.solvers.Game(rank=40), memory_budget=budget)
    assert stream.opened == 1
    assert game.converged
    np.testing.assert_allclose(game.eigenvalues, exact.eigenvalues, atol=1e-4)


def test_a_stream_that_outgrows_its_budget_is_not_kept():
    game = es.solve(es.problems.cca(), iter(batched(POWER)), 4, es.solvers.Game(rank=40), memory_budget=1e6)
    assert not game.state.exact
    assert captured(POWER, game.V, 4) > 0.95


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("rank", [10, 16])
def test_a_sketch_may_have_fewer_rows_than_players(rank, which):
    views = POWER[0][:, :61], POWER[1][:, :40]
    exact = es.solve(es.problems.cca(), batched(views), 4, "exact", which=which).eigenvalues.sum()
    found = es.solve(es.problems.cca(), batched(views), 4, es.solvers.Game(rank=rank), which=which, memory_budget=1)
    assert abs(found.heldout.sum() / exact - 1) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("at", [20, 35])
def test_a_run_killed_in_a_later_pass_resumes_to_the_same_bits(at, tmp_path):
    """Blocks of 400 rows: 15 steps a pass."""
    options = {"k": 4, "solver": es.solvers.Game(rank=40), "memory_budget": 1, "max_epochs": 4}
    whole, resumed = runs(es.problems.cca(), lambda: batched(POWER), tmp_path, at, **options)
    assert resumed.state.exact
    assert_same(whole, resumed)

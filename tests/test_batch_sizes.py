"""Batches of any sizes: no row lost, none counted twice, and no program compiled for each."""

from unittest import mock

import jax
import numpy as np
import pytest

import eigenstream as es
from conftest import quick
from eigenstream.core import host_batches, views
from eigenstream.run import game_engine
from eigenstream.run.stepping_engine import SteppingEngine, _step

RNG = np.random.default_rng(0)
SIZES = [60, 31, 60, 7, 59, 12, 45, 83, 5, 60, 33, 58, 100, 21]


def stream(*dims, dtype="f8"):
    z = RNG.normal(size=(sum(SIZES), 3))
    views = [(z @ RNG.normal(size=(3, d)) + RNG.normal(size=(len(z), d)) + 1).astype(dtype) for d in dims]
    cuts = np.cumsum(SIZES)[:-1]
    parts = list(zip(*(np.split(v, cuts) for v in views), strict=True))
    return parts if len(dims) > 1 else [p for (p,) in parts]


STREAMS = {"pca": stream(11), "cca": stream(11, 7), "pls": stream(11, 7), "multiview": stream(11, 7, 5)}


@pytest.mark.parametrize(
    ("kind", "center", "independent", "shards"),
    quick(
        [
            ("pca", True, True, 1),
            ("cca", True, True, 2),
            ("cca", "running", True, 1),
            ("cca", True, False, 1),
            ("pls", False, False, 2),
            ("multiview", "running", False, 1),
        ],
        ("pca", True, True, 1),
    ),
)
def test_batches_filled_up_give_what_they_gave(kind, center, independent, shards):
    problem = getattr(es.problems, kind)(center=center, ridge=0.1)
    solver = es.solvers.Paper(learning_rate=0.01, independent=independent, shards=shards)
    with jax.enable_x64(True):
        filled = es.solve(problem, STREAMS[kind], 2, solver)
        with mock.patch.object(SteppingEngine, "_padded", lambda self, batch: batch):
            plain = es.solve(problem, STREAMS[kind], 2, solver)
    np.testing.assert_allclose(filled.V, plain.V, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(filled.eigenvalues, plain.eigenvalues, rtol=1e-9)
    np.testing.assert_allclose(filled.residuals, plain.residuals, rtol=1e-8)


def test_rows_that_are_filled_in_are_not_counted():
    x = RNG.normal(size=(13, 4))
    full = host_batches.filled(x, 2, 20)
    assert views.n_rows(full) == 20
    assert float(views.count(full)) == 13
    assert np.asarray(views.present(full)).tolist() == [1] * 6 + [0] * 4 + [1] * 7 + [0] * 3
    first, second = views.split(full, (1, 1))
    np.testing.assert_array_equal(first.rows[:6], x[:6])
    np.testing.assert_array_equal(second.rows[:7], x[6:])
    assert (first.counts.tolist(), second.counts.tolist()) == ([6], [7])


@pytest.mark.parametrize(
    ("n", "least", "sizes"), [(300, 1, [256, 32, 8, 4]), (300, 6, [256, 32, 12]), (6, 6, [6]), (7, 6, [7]), (1, 1, [1])]
)
def test_blocks_of_powers_of_two_lose_no_row(n, least, sizes):
    assert host_batches.in_powers_of_two(n, least) == sizes
    x = np.arange(n)
    np.testing.assert_array_equal(np.concatenate(list(host_batches.cut(x, sizes))), x)


def test_two_programs_serve_all_batches_up_to_the_first():
    sizes = [64, 11, 63, 2, 30, 47, 5, 64, 17]
    batches = [RNG.normal(size=(b, 6)).astype("f4") for b in sizes]
    solver = es.solvers.Paper(learning_rate=0.01, independent=False)
    before = _step._cache_size()
    es.solve(es.problems.pca(center=False), batches, 2, solver)
    assert _step._cache_size() - before == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pca", "lda"])
def test_the_game_takes_blocks_of_few_sizes(kind):
    taken = []
    learn = game_engine.GameEngine._learn

    def watched(self, block, *more):
        taken.append(game_engine.n_rows(block))
        learn(self, block, *more)

    rng = np.random.default_rng(1)
    sizes = rng.integers(150, 500, size=30)
    batches = [(rng.normal(size=(b, 40)) * np.r_[4, 3, np.ones(38)]).astype("f4") for b in sizes]
    X, problem = np.concatenate(batches), es.problems.pca()
    if kind == "lda":
        problem = es.problems.lda(3)
        batches = [(x, (x[:, 0] > 0) + (x[:, 1] > 0).astype(int)) for x in batches]
    with mock.patch.object(game_engine.GameEngine, "_learn", watched):
        result = es.solve(problem, batches, 2, es.solvers.Game(extra=0, opening=0.05))
    assert result.n_samples_seen == sizes.sum() == len(X)
    assert sum(taken) > len(X) - 512
    assert len(set(taken)) <= game_engine.FEW + 10
    assert all(size.bit_count() == 1 for size in set(taken) - set(taken[: game_engine.FEW]))
    if kind == "pca":
        exact = es.solve(problem, [X], 2, "exact")
        assert es.metrics.subspace_error(result.V, exact.V) < 0.01


@pytest.mark.slow
def test_the_game_keeps_checkpoints_of_such_a_stream(tmp_path):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(b, 40)).astype("f4") for b in rng.integers(150, 400, size=30)]
    solver = es.solvers.Game(opening=0.05)
    result = es.solve(es.problems.pca(), batches, 2, solver, folder=tmp_path, checkpoint_every=0)
    steps = [int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")]
    assert max(steps) > result.n_iter - 5

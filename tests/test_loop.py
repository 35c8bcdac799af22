"""The loop: batches in, when it stops, and calls that are refused."""

import pickle

import jax
import numpy as np
import optax
import pytest

import eigenstream as es
import oracles
from conftest import check_refused
from data import FEW, X, scaled
from eigenstream.run.loop import Run
from eigenstream.solvers import Game, Paper


def test_the_same_seed_and_stream_give_the_same_bits():
    pieces = np.split(scaled(), 10)
    for problem, batches in ((es.problems.pca(), pieces), (es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in pieces])):
        runs = [es.solve(problem, batches, 2, solver=Paper(learning_rate=0.01), random_state=7) for _ in range(2)]
        assert runs[0].V.tobytes() == runs[1].V.tobytes()
        other = es.solve(problem, batches, 2, solver=Paper(learning_rate=0.01), random_state=8)
        assert runs[0].V.tobytes() != other.V.tobytes()


def test_a_run_on_matrices_stops_at_its_tolerance_and_says_so():
    A, B = oracles.pencil(np.array([1.0, 0.5, 0.1]))
    result = es.solve(es.problems.matrices(A, B), None, 2, solver=Paper(averaging=None), tol=1e-4, max_steps=5000)
    assert result.converged
    assert result.message.startswith("the residual is below tol=0.0001 after ")
    assert 0 < result.n_iter < 5000
    assert result.residuals.max() < 1e-4
    short = es.solve(es.problems.matrices(A, B), None, 2, solver=Paper(averaging=None), tol=1e-12, max_steps=20)
    assert not short.converged
    assert "stopped after 20 steps" in short.message
    assert "tol=1e-12 was not reached" in short.message


def test_a_stream_that_ends_says_how_far_it_came():
    result = es.solve(es.problems.pca(), iter(np.split(scaled(), 10)), 2, solver="paper")
    assert not result.converged
    assert "1000 rows in 10 batches" in result.message
    assert "sampling noise included" in result.message
    assert result.n_samples_seen == 1000
    assert result.n_iter == 10
    assert [h["step"] for h in result.history][:3] == [1, 2, 3]
    assert result.history[-1]["eigenvalues"].shape == (2,)


def test_epochs_read_the_stream_again():
    result = es.solve(es.problems.pca(), np.split(scaled(), 10), 2, solver="paper", max_epochs=3)
    assert (result.n_iter, result.n_samples_seen) == (30, 3000)
    capped = es.solve(es.problems.pca(), np.split(scaled(), 10), 2, solver="paper", max_epochs=3, max_steps=12)
    assert capped.n_iter == 12


def test_callbacks_see_every_snapshot_and_may_stop():
    seen = []
    result = es.solve(
        es.problems.pca(),
        es.streams.batches(X),
        2,
        Paper(learning_rate=0.01, optimizer=optax.adam),
        callbacks=[seen.append],
    )
    assert seen == result.history
    stopped = es.solve(
        es.problems.pca(),
        es.streams.batches(X),
        2,
        Paper(learning_rate=0.01, optimizer=optax.adam),
        callbacks=[lambda r: r["step"] == 3],
    )
    assert stopped.n_iter == 3
    assert stopped.message == "stopped by a callback after 300 rows"


def test_the_library_leaves_global_settings_alone():
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("solver", ["exact", Paper(learning_rate=0.01), Game(rank=4)], ids=["exact", "paper", "game"])
def test_a_pickled_run_goes_on(solver):
    first, second = np.split(scaled(), 2)
    run = Run(es.problems.pca(), 2, solver)
    run.take(first)
    again = pickle.loads(pickle.dumps(run))
    assert set(vars(again)) <= set(vars(run))
    assert set(vars(again.engine)) <= set(vars(run.engine))
    for one in (run, again):
        one.take(second)
    np.testing.assert_array_equal(again.result().V, run.result().V)


MISTAKES = {
    "width changes": (lambda: es.solve(es.problems.pca(), [FEW, FEW[:, :3]], 2), "changed shape"),
    "width changes in Paper": (
        lambda: es.solve(es.problems.pca(), [FEW, FEW[:, :3]], 2, solver="paper"),
        "changed shape",
    ),
    "k too large": (lambda: es.solve(es.problems.pca(), [FEW], 5), "k=5 is too large.*at most 4"),
    "k too large for views": (lambda: es.solve(es.problems.cca(), [(FEW, FEW[:, :3])], 4), "at most 3"),
    "k of zero": (lambda: es.solve(es.problems.pca(), [FEW], 0), "k=0.*at least 1"),
    "k a fraction": (lambda: es.solve(es.problems.pca(), [FEW], 1.5), "k=1.5.*whole number"),
    "fewer rows than asked": (lambda: es.solve(es.problems.pca(), [FEW[:3]], 4, solver="exact"), "3 rows.*k=4"),
    "a single row": (lambda: es.solve(es.problems.pca(), [FEW[:1]], 1), "too few rows: at least 2"),
    "a single row in Paper": (
        lambda: es.solve(es.problems.cca(), [(FEW[:1], FEW[:, :3][:1])], 1, solver="paper"),
        "too few rows: at least 4",
    ),
    "which": (lambda: es.solve(es.problems.pca(), [FEW], 2, which="middle"), "which='middle'"),
    "epochs": (lambda: es.solve(es.problems.pca(), [FEW], 2, max_epochs=0), "max_epochs=0"),
    "a problem not called": (lambda: es.solve(es.problems.pca, [FEW], 1), r"es.problems.pca\(\)"),
    "max_steps of 0": (lambda: es.solve(es.problems.pca(), [FEW], 1, "paper", max_steps=0), "max_steps=0"),
    "max_steps a fraction": (lambda: es.solve(es.problems.pca(), [FEW], 1, "paper", max_steps=2.5), "max_steps=2.5"),
    "no seed": (lambda: es.solve(es.problems.pca(), [FEW], 1, "paper", random_state=None), "random_state=None"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])


@pytest.mark.parametrize("solver", ["paper", Game(rank=50)], ids=["paper", "game"])
def test_all_components_may_be_more_than_the_rows(solver):
    X = np.random.default_rng(0).normal(size=(30, 40))
    assert len(es.solve(es.problems.pca(), [X], None, solver).eigenvalues) == 40

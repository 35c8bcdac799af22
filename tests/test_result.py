"""Results: status, residuals, history."""

import os
import signal

import numpy as np
import pytest

import data
import eigenstream as es
from data import scaled
from eigenstream.solvers import Paper


def test_exact_residuals_are_measured():
    views = scaled(500)[:, :3], scaled(500, seed=1)
    result = es.solve(es.problems.cca(), [views], 2)
    assert 0 < result.residuals.max() < 1e-10
    assert len(repr(result)) < 400


X = scaled()
PAPER = Paper(learning_rate=0.01)


def interrupt(record):
    os.kill(os.getpid(), signal.SIGINT)


def runs(k, solver, **options):
    """The same run by `es.solve` and by an estimator: their statuses."""
    callbacks = options.pop("callbacks", ())
    result = es.solve(es.problems.pca(), es.streams.batches(X), k, solver, callbacks=callbacks, **options)
    model = es.PCA(k, solver=solver, **options).fit_stream(es.streams.batches(X), callbacks=callbacks)
    assert model.converged_ == result.converged
    return [result.status, model.status_]


def test_an_exact_run_is_solved():
    assert runs(2, "exact") == ["solved"] * 2


@pytest.mark.parametrize(("tol", "status"), [(10.0, "converged"), (1e-9, "not converged"), (None, "not converged")])
def test_a_run_has_converged_when_its_residual_is_below_tol(tol, status):
    assert runs(2, PAPER, tol=tol) == [status] * 2


def test_a_callback_stops_a_run():
    assert runs(2, PAPER, callbacks=[lambda record: record["step"] == 3]) == ["stopped"] * 2


@pytest.mark.filterwarnings("ignore:interrupted")
def test_ctrl_c_interrupts_a_run():
    assert runs(2, PAPER, callbacks=[interrupt]) == ["interrupted"] * 2


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_step_that_is_not_finite_fails_a_run():
    assert runs(2, Paper(learning_rate=lambda step: 0.01 / step)) == ["failed"] * 2


def game_on_rows(**options):
    """Seven tracked features, so that the game has converged after its first move."""
    return es.solve(es.problems.pca(), np.split(data.X, 6), 2, es.solvers.Game(rank=4), **options)


def test_an_interrupted_game_has_not_converged():
    whole = game_on_rows()
    assert (whole.converged, whole.status) == (True, "converged")
    with pytest.warns(UserWarning, match="interrupted"):
        half = game_on_rows(callbacks=[interrupt])
    assert half.n_samples_seen < 600
    assert (half.converged, half.status) == (False, "interrupted")


def test_the_games_history_has_residuals_and_shortfalls():
    solver = es.solvers.Game(extra=0, rank=8)
    result = es.solve(es.problems.pca(), np.split(scaled(n=600, d=20), 6), 2, solver)
    assert result.history
    for record in result.history:
        assert 0 <= record["residual"] <= 1
        assert 0 <= record["shortfall"] <= 1

"""The loop and its `Result`: why it stopped, what it used, and what it does with a bad step."""

import contextlib
import os
import pty
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eigenstream as es
import oracles
from conftest import quick
from eigenstream.solvers import Paper


def data(n=1000, d=5, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)) * np.geomspace(3, 0.5, d)


def test_the_same_seed_and_stream_give_the_same_bits():
    pieces = np.split(data(), 10)
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
    result = es.solve(es.problems.pca(), iter(np.split(data(), 10)), 2, solver="paper")
    assert not result.converged
    assert "1000 rows in 10 batches" in result.message
    assert "sampling noise included" in result.message
    assert result.n_samples_seen == 1000
    assert result.n_iter == 10
    assert [h["step"] for h in result.history][:3] == [1, 2, 3]
    assert result.history[-1]["eigenvalues"].shape == (2,)


def test_epochs_read_the_stream_again():
    result = es.solve(es.problems.pca(), np.split(data(), 10), 2, solver="paper", max_epochs=3)
    assert (result.n_iter, result.n_samples_seen) == (30, 3000)
    capped = es.solve(es.problems.pca(), np.split(data(), 10), 2, solver="paper", max_epochs=3, max_steps=12)
    assert capped.n_iter == 12


def test_exact_reads_once_and_counts_rows_once():
    result = es.solve(es.problems.pca(), np.split(data(), 10), 2, max_epochs=5)
    assert result.n_samples_seen == 1000
    assert result.message == "solved exactly from 1000 rows in 1 pass"
    assert result.converged


def test_the_last_short_batch_is_used_even_if_it_is_a_single_row():
    X = data(1001)
    batches = [X[i : i + 100] for i in range(0, 1001, 100)]
    assert len(batches[-1]) == 1
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in batches], 1, solver="paper")
    assert result.n_samples_seen == 1001
    small_first = [X[:1], X[1:3], X[3:]]
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in small_first], 1, solver="paper")
    assert result.n_samples_seen == 1001


def test_a_step_that_goes_non_finite_keeps_the_last_finite_state():
    """A device array is not checked on the host, so its NaN reaches the step."""
    good = jnp.asarray(data(100, 4), jnp.float32)
    bad = good.at[3, 2].set(jnp.nan)
    solver = Paper(learning_rate=0.01)
    result = es.solve(es.problems.pca(), [good] * 5 + [bad] + [good] * 5, 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert "not finite" in result.message
    assert not result.converged
    before = es.solve(es.problems.pca(), [good] * 5, 2, solver=solver)
    np.testing.assert_array_equal(result.state.V, before.state.V)


def test_a_diverging_run_stops_early_with_finite_players():
    X = (1e4 * data(2000, 6)).astype(np.float32)
    solver = es.solvers.SGHA(learning_rate=10.0)
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in np.split(X, 200)], 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert "lower learning_rate" in result.message
    assert result.n_iter < 200


@pytest.mark.slow
def test_smallest_eigenvalues_from_a_stream_of_edges():
    """The Fiedler vector of two rings joined by one edge splits them, from minibatches of edges."""
    n = 12
    ring = np.arange(n)
    i = np.concatenate([ring, n + ring, [0]])
    j = np.concatenate([np.roll(ring, -1), n + np.roll(ring, -1), [n]])
    extra = np.random.default_rng(0).integers(0, n, (2, 60))
    i, j = np.concatenate([i, extra[0], n + extra[0]]), np.concatenate([j, extra[1], n + extra[1]])
    rng = np.random.default_rng(1)
    picks = [rng.integers(0, len(i), 256) for _ in range(2000)]
    problem = es.problems.laplacian(n_nodes=2 * n)
    exact = es.solve(problem, [(i, j)], 2, which="smallest")
    result = es.solve(
        problem, [(i[p], j[p]) for p in picks], 2, which="smallest", solver=Paper(learning_rate=30.0, averaging=0.1)
    )
    np.testing.assert_allclose(result.eigenvalues, exact.eigenvalues, atol=0.02)
    fiedler = result.eigenvectors[1]
    assert len(set(np.sign(fiedler[:n]))) == 1
    assert np.sign(fiedler[0]) != np.sign(fiedler[-1])


@pytest.mark.slow
def test_lda_from_a_stream_learns_its_classes():
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X = (X / 16 + 0.1 * np.random.default_rng(0).normal(size=X.shape)).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    pieces = [(X[i : i + 100], y[i : i + 100]) for i in range(0, len(X), 100)]
    A, B = oracles.lda(X.astype(np.float64), y)
    exact = es.solve(es.problems.lda(10), pieces, 9)
    np.testing.assert_allclose(exact.eigenvalues, oracles.leading(A, B, 9)[0], rtol=1e-4)
    solver = Paper(learning_rate=1.0, averaging=0.1)
    result = es.solve(es.problems.lda(10), pieces, 2, solver=solver, max_epochs=60)
    assert es.metrics.proportion_captured(result.V, A, B) > 0.97


def test_polish_orders_what_the_players_span():
    A, B = oracles.pencil(np.array([1.0, 0.8, 0.3, 0.1]))
    problem = es.problems.matrices(A, B)
    rough, fine = (
        es.solve(problem, None, 2, solver=es.solvers.SGHA(shift=0.0, polish=p), max_steps=3000) for p in (False, True)
    )
    np.testing.assert_allclose(fine.eigenvalues, [1, 0.8], atol=1e-5)
    assert abs(rough.eigenvalues[0] - 1) > 1e-3
    np.testing.assert_allclose(rough.eigenvalues.sum(), 1.8, atol=1e-4)


def test_auto_is_exact_within_its_budget_and_the_game_beyond():
    X = data()
    assert isinstance(es.solve(es.problems.pca(), [X], 2, solver="auto").solver, es.solvers.Exact)
    assert isinstance(es.solve(es.problems.pca(), [X], 2, memory_budget=100).solver, es.solvers.Game)
    with pytest.raises(ValueError, match=r"magnitude.*memory_budget"):
        es.solve(es.problems.pca(), [X], 2, which="magnitude", memory_budget=100)


@pytest.mark.parametrize("name", quick(["paper", "smooth", "eckart_young", "sgha", "oja", "exact"], "paper", "exact"))
def test_solvers_by_name(name):
    X = data() / 3
    result = es.solve(es.problems.pca(), np.split(X, 20), 1, solver=name, max_epochs=10)
    assert es.metrics.angles(result.V, np.eye(5)[:, :1])[0] < 0.3


def test_a_hopeless_step_size_is_said():
    """Finite, but nowhere near an eigenvector: the message names the cure."""
    X = 20 * data(2000, 60)
    views = [(x[:, :30], x[:, 30:]) for x in np.split(X, 20)]
    result = es.solve(es.problems.cca(), views, 2, solver=Paper(learning_rate=0.1, optimizer=optax.sign_sgd))
    assert np.isfinite(result.V).all()
    assert "lower learning_rate, scale the features alike or use Adam" in result.message


def test_exact_residuals_are_measured():
    views = data(500)[:, :3], data(500, seed=1)
    result = es.solve(es.problems.cca(), [views], 2)
    assert 0 < result.residuals.max() < 1e-10
    assert len(repr(result)) < 400


def test_labels_may_be_whole_floats():
    X, y = data(200), np.arange(200) % 2
    a, b = (es.solve(es.problems.lda(2), [(X, labels)], 1).eigenvalues for labels in (y, y.astype(float)))
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_any_optax_optimizer():
    X = data(4000)
    for optimizer in (
        optax.adam,
        optax.rmsprop,
        optax.lion,
        lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
    ):
        solver = Paper(learning_rate=0.01, optimizer=optimizer)
        result = es.solve(es.problems.pca(), np.split(X, 40), 1, solver=solver, max_epochs=4)
        assert es.metrics.angles(result.V, np.eye(5)[:, :1])[0] < 0.1


def test_views_as_lists_and_tensors_of_other_libraries():
    torch = pytest.importorskip("torch", reason="PyTorch is an extra")
    X = data()
    batches = [[torch.tensor(x[:, :3]), torch.tensor(x[:, 3:])] for x in np.split(X, 10)]
    found = es.solve(es.problems.cca(), batches, 2)
    wanted = es.solve(es.problems.cca(), [(X[:, :3], X[:, 3:])], 2)
    np.testing.assert_allclose(found.eigenvalues, wanted.eigenvalues, rtol=1e-10)


def test_verbose_shows_a_bar_on_a_terminal_and_nothing_elsewhere(capfd):
    code = (
        "import numpy as np, eigenstream as es; X = np.random.default_rng(0).normal(size=(1000, 5));"
        "es.solve(es.problems.pca(), np.split(X, 10), 2, solver='paper', verbose=True)"
    )
    terminal, end = pty.openpty()
    subprocess.run([sys.executable, "-c", code], check=True, stderr=end, env={**os.environ, "COLUMNS": "200"})
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            shown += piece
    assert re.search(rb"1,000 rows .* rows/s .*residual .*eigenvalues \S+", shown), shown
    es.solve(es.problems.pca(), np.split(data(), 10), 2, solver="paper", verbose=True)
    assert capfd.readouterr() == ("", "")


def test_rayleigh_quotients_on_a_larger_batch():
    X = data(3000)
    problem = es.problems.cca()
    views = X[:, :3], X[:, 3:]
    V = es.solve(problem, [views], 2).eigenvectors
    A, B = oracles.views(list(views))
    columns = np.vstack([v.T for v in V])
    wanted = np.diag(columns.T @ A @ columns) / np.diag(columns.T @ B @ columns)
    np.testing.assert_allclose(es.rayleigh_quotients(problem, views, V), wanted, atol=1e-5)


def test_rayleigh_quotients_say_which_form_of_the_eigenvectors_they_take():
    views = tuple(np.random.default_rng(i).normal(size=(200, 5)) for i in range(2))
    result = es.solve(es.problems.cca(), [views], 2)
    with pytest.raises(ValueError, match=r"result\.eigenvectors"):
        es.rayleigh_quotients(es.problems.cca(), views, result.V)
    # A row's shape is another matter: the same numbers in the same order.
    images = tuple(x.reshape(200, 5, 1) for x in views)
    found = es.rayleigh_quotients(es.problems.cca(), images, result.eigenvectors)
    np.testing.assert_allclose(found, result.eigenvalues, atol=1e-5)
    A = np.diag([3.0, 2.0, 1.0])
    given = es.solve(es.problems.matrices(A), None, k=2, max_steps=100)
    with pytest.raises(ValueError, match=r"result\.eigenvectors"):
        es.rayleigh_quotients(es.problems.matrices(A), None, given.V)


@pytest.mark.parametrize("name", ["pca", "ica", "lda"])
def test_a_far_mean_changes_nothing_in_float32(name):
    """Deviations in 64ths stay exact beside 65536 and beside 0, so only the arithmetic can tell the two apart."""
    X = (np.round(64 * data(400, 4)) / 64).astype(np.float32)
    labels = (X[:, 0] > 0).astype(int)
    problem = es.problems.lda(2) if name == "lda" else getattr(es.problems, name)()
    results = []
    for offset in (0, 65536):
        rows = [(x + np.float32(offset), y) for x, y in zip(np.split(X, 8), np.split(labels, 8), strict=True)]
        batches = rows if name == "lda" else [x for x, _ in rows]
        results.append(es.solve(problem, batches, 1, solver=Paper(learning_rate=1e-3), max_epochs=2))
    np.testing.assert_allclose(results[1].V, results[0].V, rtol=2e-3, atol=2e-4)


def test_the_library_leaves_global_settings_alone():
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("solver", [es.solvers.Paper, es.solvers.EckartYoung])
def test_an_optimizer_that_makes_a_finite_direction_infinite_keeps_the_last_finite_state(solver):
    X = np.random.default_rng(0).normal(size=(20, 5, 4)).astype("f4")
    result = es.solve(es.problems.pca(), list(X), 2, solver(learning_rate=lambda step: 0.03 / step))
    assert "not finite" in result.message
    assert np.isfinite(result.V).all()

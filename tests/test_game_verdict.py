"""How far the game says it is from its limit."""

import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import POWER, batched, power_law
from eigenstream.solvers.game import opening, verdict
from planted import planted


@pytest.mark.slow
def test_it_says_whether_it_has_converged(game_on_power):
    wide = planted(4000, (400, 300), power_law, np.linspace(0.95, 0.5, 8))
    few = es.solve(es.problems.cca(), batched(wide), k=4, solver="game")
    assert game_on_power.converged
    assert not few.converged
    assert "more rows are needed" in few.message


@pytest.mark.slow
def test_eigenvalues_are_near_those_of_new_rows_whatever_the_rank():
    rng, n, d, shared, k = np.random.default_rng(0), 5000, 1200, 600, 60
    strength = np.linspace(1, 0.15, shared)
    Z = rng.normal(size=(n, shared)) * strength

    def view():
        U = Z + np.sqrt(1 - strength**2) * rng.normal(size=(n, shared))
        X = np.hstack([U, rng.normal(size=(n, d - shared))]) * np.arange(1, d + 1) ** -0.4
        return (X @ np.linalg.qr(rng.normal(size=(d, d)))[0]).astype(np.float32)

    X, Y = view(), view()
    batches = [(X[i : i + 500], Y[i : i + 500]) for i in range(0, 4000, 500)]
    reported = []
    for rank in (24, 384):
        result = es.solve(es.problems.cca(ridge=1e-2), batches, k, es.solvers.Game(rank=rank), max_epochs=2)
        x, y = X[4000:] @ result.V[:d], Y[4000:] @ result.V[d:]
        shown = [np.corrcoef(a, b)[0, 1] for a, b in zip(x.T, y.T, strict=True)]
        reported.append(result.eigenvalues.mean())
        assert abs(reported[-1] - np.mean(shown)) < 0.06
    assert abs(reported[0] - reported[1]) < 0.06


@pytest.mark.slow
def test_heldout_eigenvalues_are_near_the_population_s(game_on_power):
    truth = np.linspace(0.95, 0.5, 8)[:4]
    assert (np.abs(game_on_power.heldout - truth) < 4 * game_on_power.heldout_error + 0.05).all()
    assert (game_on_power.heldout_error > 0).all()


@pytest.mark.slow
def test_standard_errors_of_heldout_eigenvalues_are_those_of_repeated_streams():
    rng = np.random.default_rng(0)

    def estimate():
        held = verdict.HeldOut.empty(1, jnp.float32)
        for i in range(60):
            b = rng.uniform(0.5, 1.5)
            held = held.add(jnp.array([0.7 * b + 0.1 * rng.normal()]), jnp.array([b]))
            held = held.fade(0.7) if i % 20 == 19 else held
        return held.eigenvalues()

    found = np.array([np.concatenate(estimate()) for _ in range(100)])
    assert abs(found[:, 0].mean() - 0.7) < 0.01
    assert 0.8 < found[:, 1].mean() / found[:, 0].std() < 1.25


@pytest.mark.slow
def test_rows_of_a_second_epoch_are_not_held_out():
    twice, thrice = (es.solve(es.problems.cca(), batched(POWER), 4, "game", max_epochs=e) for e in (2, 3))
    assert int(thrice.state.moves) > int(twice.state.moves)
    np.testing.assert_array_equal(thrice.state.heldout.a, twice.state.heldout.a)


def test_eigenvalues_that_cannot_be_told_apart_are_named():
    lam, errors = np.array([0.9, 0.8, 0.799, 0.5]), np.full(4, 0.01)
    assert verdict.clusters(lam, errors) == [(1, 2)]
    assert verdict.clusters(np.array([3.0, 2.0, 1.0]), np.zeros(3)) == []


def test_groups_are_numbered_as_the_eigenvalues_are_given():
    X = np.random.default_rng(0).normal(size=(400, 60)) / np.arange(1, 61)
    state = es.solve(es.problems.pca(), [X], 3, "game").state
    # The first two players share an eigenvalue, and the third has a larger one.
    lam = np.asarray(state.lam).copy()
    lam[:3] = 1.0, 1.0, 2.0
    assert "eigenvalues 2 to 3 differ" in verdict.verdict(state._replace(lam=lam), 400).words


def kept(X, k=3):
    """Rows that the game keeps whole."""
    return es.solve(es.problems.pca(), np.array_split(X, 4), k, es.solvers.Game(extra=2, opening=1e9))


@pytest.mark.parametrize("moves", [2, 3, 5, 100])
def test_a_kept_stream_does_not_understate_its_shortfall(monkeypatch, moves):
    monkeypatch.setattr(opening, "WHOLE_MOVES", moves)
    X = np.random.default_rng(0).normal(size=(400, 300)) / np.arange(1, 301) ** 0.5
    game, exact = kept(X), es.solve(es.problems.pca(), [X], 3, "exact")
    stated, missing = game.history[-1]["shortfall"], 1 - game.eigenvalues.sum() / exact.eigenvalues.sum()
    # Without the bound by the residuals, the gains of so few moves would state 1.
    assert missing - 1e-6 < stated < 0.5
    assert missing > 0.1 or moves > 2


def test_no_bound_without_a_size_or_eigenvalues():
    result = kept(np.random.default_rng(0).normal(size=(400, 300)))
    state = result.state._replace(gains=np.full(16, np.nan))
    assert verdict.verdict(state, 400, solved=True).shortfall < 1e-3
    # No move has been made.
    assert verdict.verdict(state._replace(size=np.float32(0)), 400, solved=True).shortfall == 1
    none = state._replace(lam=np.zeros_like(state.lam), size=np.float32(1e38))
    assert verdict.verdict(none, 400, solved=True).shortfall == 1


def test_rows_of_zeros_lack_nothing():
    result = kept(np.zeros((400, 300)))
    assert result.history[-1]["shortfall"] == 0
    assert result.converged


def test_a_message_names_few_of_many_groups():
    groups = [(i, i + 1) for i in range(0, 20, 2)]
    assert verdict.named(groups[:2]) == "1 to 2, 3 to 4"
    assert verdict.named(groups) == "1 to 2, 3 to 4, 5 to 6, 7 to 8 and 6 more groups"


@pytest.mark.slow
def test_tol_stops_a_run_that_has_converged():
    result = es.solve(es.problems.cca(), batched(POWER), k=4, solver="game", max_epochs=5, tol=0.02)
    assert result.converged
    assert result.n_samples_seen < 5 * 6000
    assert "shortfall is below tol" in result.message


@pytest.mark.slow
def test_a_tolerance_does_not_stop_players_that_have_not_moved():
    X = np.random.default_rng(0).normal(size=(6000, 400)) / np.arange(1, 401) ** 0.5
    result = es.solve(es.problems.pca(), np.split(X, 60), 2, "game", half_life=5000, tol=0.05)
    exact = es.solve(es.problems.pca(), [X], 2, "exact")
    assert es.metrics.subspace_error(result.V, exact.V) < 0.2


def test_tol_does_not_stop_the_game_before_the_last_row_if_every_dimension_plays():
    """The answer is then that of the rows so far, and only more rows improve it."""
    X = np.random.default_rng(0).normal(size=(2000, 6)) * [3, 2, 1, 1, 1, 1]
    result = es.solve(es.problems.pca(), np.split(X, 20), 2, "game", tol=0.1)
    assert result.state.plays_all
    assert result.n_samples_seen == 2000
    assert result.status == "converged"

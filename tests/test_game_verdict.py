"""How far the game says it is from its limit."""

import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, POWER, batched, captured, power_law
from eigenstream.run import game_engine
from eigenstream.solvers.game import verdict
from planted import planted

X = np.random.default_rng(0).normal(size=(400, 60)) / np.arange(1, 61)


@pytest.mark.slow
def test_it_says_whether_it_has_converged():
    wide = planted(4000, (400, 300), power_law, np.linspace(0.95, 0.5, 8))
    few = es.solve(es.problems.cca(), batched(wide), 4, **GAME)
    done = es.solve(es.problems.cca(), batched(POWER), 4, max_epochs=None, **GAME)
    assert done.converged
    assert 6000 <= done.n_samples_seen < 60_000
    assert captured(POWER, done.V, 4) > 0.99
    assert not few.converged
    assert "read the rows again" in few.message


@pytest.mark.slow
def test_the_stated_shortfall_is_right_to_a_factor_of_three():
    """The median of planted problems of three spectra."""
    ratios = []
    for seed, spectrum in enumerate((power_law, lambda d: np.logspace(0, -1, d), np.ones)):
        views = planted(4000, (90, 70), spectrum, np.linspace(0.9, 0.4, 8), seed)
        for rank in (24, 64):
            result = es.solve(es.problems.cca(), batched(views), 6, es.solvers.Game(rank=rank), memory_budget=1)
            true = 1 - captured(views, result.V, 6)
            assert not (result.converged and true > 0.01)
            ratios += [result.shortfall / true] if true > 0.005 else []
    assert len(ratios) > 3
    assert 1 / 3 < np.median(ratios) < 3


def test_a_residual_far_above_its_noise_has_not_converged():
    state = es.solve(es.problems.pca(), [X], 3, **GAME).state._replace(gains=np.zeros(8), cover=np.float32(1))
    calm = state._replace(preconditioned_residuals=np.zeros(3), floors=np.zeros(3))
    assert verdict.verdict(calm).converged
    assert not verdict.verdict(calm._replace(preconditioned_residuals=np.array([0, 0, 0.4]))).converged


@pytest.mark.slow
def test_one_pass_with_a_sketch_has_not_converged(game_on_power):
    """Players may stay on eigenvectors that are not the leading ones."""
    still = game_on_power.state._replace(gains=np.zeros(3), floors=np.zeros(4), preconditioned_residuals=np.zeros(4))
    known = verdict.verdict(still)
    assert known.shortfall == 0
    assert not known.converged
    # The gain of a move by part of the rows says nothing of a move by all.
    reread = es.solvers.Game(rank=100).reread(es.problems.cca(), still._replace(gains=np.full(3, -0.1)))
    assert not verdict.verdict(reread).converged
    quarter, half = (verdict.verdict(game_on_power.state._replace(cover=np.float32(c))).shortfall for c in (0.25, 0.5))
    assert quarter / (1 - quarter) == pytest.approx(2 * half / (1 - half))


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
            held = held.after_move() if i % 20 == 19 else held
        return held.eigenvalues()

    found = np.array([np.concatenate(estimate()) for _ in range(100)])
    assert abs(found[:, 0].mean() - 0.7) < 0.01
    assert 0.8 < found[:, 1].mean() / found[:, 0].std() < 1.25


@pytest.mark.slow
def test_rows_of_a_second_epoch_are_not_held_out():
    once, twice = (es.solve(es.problems.cca(), batched(POWER), 4, max_epochs=e, **GAME) for e in (1, 2))
    assert int(twice.state.moves) > int(once.state.moves)
    np.testing.assert_array_equal(once.state.heldout.a, twice.state.heldout.a)


def test_eigenvalues_that_cannot_be_told_apart_are_named():
    lam, errors = np.array([0.9, 0.8, 0.799, 0.5]), np.full(4, 0.01)
    assert verdict.clusters(lam, errors) == [(1, 2)]
    assert verdict.clusters(np.array([3.0, 2.0, 1.0]), np.zeros(3)) == []


def test_groups_are_numbered_as_the_eigenvalues_are_given():
    state = es.solve(es.problems.pca(), [X], 3, **GAME).state
    # The first two players share an eigenvalue, and the third has a larger one.
    lam = np.asarray(state.lam).copy()
    lam[:3] = 1.0, 1.0, 2.0
    assert "eigenvalues 2 to 3 differ" in verdict.verdict(state._replace(lam=lam)).words


def test_the_residual_of_a_state_that_has_not_moved_says_nothing():
    state = es.solve(es.problems.pca(), [X], 3, **GAME).state
    assert verdict.verdict(state._replace(moves=np.int32(0))).shortfall == 1


@pytest.mark.parametrize("moves", [1, 2, 3, 100])
def test_rows_that_fit_do_not_understate_their_shortfall(monkeypatch, moves):
    """Generated rows, which are kept, with too few moves to solve them but for the last case."""
    monkeypatch.setattr(game_engine, "PASSES_IN_MEMORY", moves)
    rows = np.random.default_rng(0).normal(size=(400, 300)) / np.arange(1, 301) ** 0.5
    game = es.solve(es.problems.pca(), iter(np.array_split(rows, 4)), 3, es.solvers.Game(extra=2, rank=16))
    exact = es.solve(es.problems.pca(), [rows], 3, "exact")
    missing = 1 - game.eigenvalues.sum() / exact.eigenvalues.sum()
    assert missing - 1e-6 < game.shortfall < 0.5
    assert game.converged == (moves == 100)


def test_rows_that_fit_have_converged_only_with_a_residual_at_rounding():
    """Moves that gain nothing may also mean a poor preconditioner."""
    state = es.solve(es.problems.pca(), [X], 3, es.solvers.Game(rank=8)).state
    assert verdict.verdict(state, True).converged
    stuck = state._replace(cover=np.float32(1), preconditioned_residuals=np.full(3, 1e-3), gains=np.zeros(3))
    assert verdict.verdict(stuck).converged
    assert not verdict.verdict(stuck, True).converged
    assert "left a residual above" in verdict.verdict(stuck, True).words


def test_rows_of_zeros_lack_nothing():
    result = es.solve(es.problems.pca(), [np.zeros((400, 300))], 3, es.solvers.Game(rank=8))
    assert result.shortfall == 0
    assert result.converged


def test_a_message_names_few_of_many_groups():
    groups = [(i, i + 1) for i in range(0, 20, 2)]
    assert verdict.named(groups[:2]) == "1 to 2, 3 to 4"
    assert verdict.named(groups) == "1 to 2, 3 to 4, 5 to 6, 7 to 8 and 6 more groups"


@pytest.mark.slow
def test_tol_stops_a_run_that_has_converged():
    result = es.solve(es.problems.cca(), batched(POWER), 4, max_epochs=5, tol=0.02, **GAME)
    assert result.converged
    assert result.n_samples_seen < 5 * 6000
    assert "shortfall is below tol" in result.message

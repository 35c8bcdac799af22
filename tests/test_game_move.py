"""One move of the game."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from conftest import quick
from data import batched, block_edges


def inputs_behind(jaxpr):
    """Which arguments each result of a program depends on."""
    behind = {v: {i} for i, v in enumerate(jaxpr.invars)}

    def known(v):
        return set() if hasattr(v, "val") else behind.get(v, set())

    for equation in jaxpr.eqns:
        read = set().union(*map(known, equation.invars))
        behind.update((v, read) for v in equation.outvars)
    return [known(v) for v in jaxpr.outvars]


@pytest.mark.parametrize("d", [1200, 60, 12])
def test_every_new_array_depends_on_the_one_it_replaces(d):
    """Arrays are donated: XLA merges equal constants that replace several of them, and has mixed them up on a GPU."""
    problem, solver = es.problems.cca(), es.solvers.Game(extra=2)
    views = tuple(np.ones((8, d), np.float32) for _ in range(2))
    state = solver.init(problem, views, 2, jax.random.key(0))
    assert state.plays_all == (d == 12)
    programs = [
        lambda s: solver.move(problem, s),
        lambda s: solver.gather(problem, s, views),
        lambda s: solver.update_sketch(problem, s),
    ]
    for program in programs:
        behind = inputs_behind(jax.make_jaxpr(program)(state).jaxpr)
        leaves = jax.tree.leaves(state)
        assert len(behind) == len(leaves)
        long = [i for i, leaf in enumerate(leaves) if leaf.size >= d]
        assert [i for i in long if i not in behind[i]] == []


def test_a_full_set_of_players_averages_like_the_exact_solver():
    X = np.random.default_rng(0).normal(size=(3000, 6)).astype("f4") * [6, 5, 4, 3, 2, 1] + 7
    game = es.solve(es.problems.pca(), np.split(X.astype("f4"), 30), k=2, solver="game")
    exact = es.solve(es.problems.pca(), [X], k=2, solver="exact")
    assert es.metrics.subspace_error(game.V, exact.V) < 1e-4


@pytest.mark.parametrize("units", quick([1.0, 1e3], 1e3))
@pytest.mark.parametrize("flaw", quick(["none", "dead", "copies"], "copies"))
def test_a_full_set_of_players_keeps_its_digits(flaw, units):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2000, 12))
    views = []
    for unit in (units, 1 / units):
        X = np.maximum(z @ rng.normal(size=(12, 23)), 0) * np.logspace(0, 2, 23)
        if flaw != "none":
            X[:, 0] = 0
        if flaw == "copies":
            X[:, 1] = 2 * X[:, 2]
        views.append((unit * X).astype("f4"))
    exact, game = (es.solve(es.problems.cca(), batched(views), k=4, solver=s) for s in ("exact", "game"))
    assert game.state.plays_all
    np.testing.assert_allclose(game.eigenvalues, exact.eigenvalues, atol=2e-3)
    assert game.residuals.max() < 1e-4


def test_a_full_set_of_players_averages_edges_like_the_exact_solver():
    stream, degrees = block_edges(100, 3, 0.4, 0.05)
    problem, options = es.problems.laplacian(n_nodes=100), {"k": 3, "which": "smallest"}
    game = es.solve(problem, 5 * stream, solver=es.solvers.Game(opening=0), **options)
    exact = es.solve(problem, 5 * stream, solver="exact", **options)
    assert game.state.plays_all
    assert game.state.moves > 2
    np.testing.assert_allclose(game.eigenvalues, exact.eigenvalues, atol=1e-5)
    assert es.metrics.subspace_error(game.V, exact.V, np.diag(degrees)) < 1e-6


@pytest.mark.slow
def test_rows_that_are_not_finite_on_a_device_are_not_learned_from():
    X = np.random.default_rng(0).normal(size=(4000, 200)).astype("f4") * np.linspace(3, 1, 200).astype("f4")
    batches = [jnp.asarray(x) for x in np.split(X, 40)]
    batches[20] = batches[20].at[3, 3].set(jnp.nan)
    result = es.solve(es.problems.pca(center=False), batches, k=2, solver="game")
    assert np.isfinite(result.V).all()
    assert "moves skipped because they were not finite" in result.message

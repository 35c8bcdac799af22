"""One move of the game."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, batched, latent_views


def inputs_behind(jaxpr):
    """Which arguments each result of a program depends on."""
    behind = {v: {i} for i, v in enumerate(jaxpr.invars)}

    def known(v):
        return set() if hasattr(v, "val") else behind.get(v, set())

    for equation in jaxpr.eqns:
        read = set().union(*map(known, equation.invars))
        behind.update((v, read) for v in equation.outvars)
    return [known(v) for v in jaxpr.outvars]


@pytest.mark.parametrize("d", [1200, 60])
def test_every_new_array_depends_on_the_one_it_replaces(d):
    """Arrays are donated: XLA merges equal constants that replace several of them, and has mixed them up on a GPU."""
    problem, solver = es.problems.cca(), es.solvers.Game(extra=2, rank=384)
    views = tuple(np.ones((8, d), np.float32) for _ in range(2))
    stream = solver.init(problem, views, 2, jax.random.key(0))
    for state in (stream, solver.reread(problem, stream)):
        for program in (lambda s: solver.move(problem, s), lambda s: solver.gather(problem, s, views)):
            behind = inputs_behind(jax.make_jaxpr(program)(state).jaxpr)
            leaves = jax.tree.leaves(state)
            assert len(behind) == len(leaves)
            long = [i for i, leaf in enumerate(leaves) if leaf.size >= d]
            # Players come from rows alone in a pass over all rows: their tracked products are replaced.
            tracked = {id(leaf) for leaf in jax.tree.leaves((state.MA, state.MB))} if state.exact else set()
            assert [i for i in long if i not in behind[i] and id(leaves[i]) not in tracked] == []


def test_rows_that_can_be_read_again_are_solved_to_rounding():
    """Constant, dead and copied columns, and units over six decades."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2000, 12))
    views = []
    for unit in (1e3, 1e-3):
        X = np.maximum(z @ rng.normal(size=(12, 23)), 0) * np.logspace(0, 2, 23)
        X[:, 0], X[:, 1] = 5.0, 2 * X[:, 2]
        views.append((unit * X).astype("f4"))
    exact = es.solve(es.problems.cca(), batched(views), 4, "exact")
    game = es.solve(es.problems.cca(), batched(views), 4, es.solvers.Game(rank=64))
    assert game.state.exact
    assert game.converged
    np.testing.assert_allclose(game.eigenvalues, exact.eigenvalues, atol=2e-3)


def test_passes_go_on_where_a_stream_ended():
    """A pass over all rows does not lose what was learned, and new rows after it do not either."""
    views = latent_views(4000, 60, 50, np.float32)[1:]
    problem, solver = es.problems.cca(), es.solvers.Game(rank=64)
    state = solver.init(problem, views, 2, jax.random.key(0))
    step = jax.jit(lambda s, b: solver.step(problem, s, b)[0])
    for batch in batched(views, 200):
        state = step(state, batch)
    before = np.asarray(state.lam)[:2]
    again = solver.reread(problem, solver.move(problem, state))
    for _ in range(6):
        for batch in batched(views, 200):
            again = solver.gather(problem, again, batch)
        again = solver.move(problem, again)
    exact = es.solve(problem, [views], 2, "exact").eigenvalues
    np.testing.assert_allclose(np.asarray(again.lam)[:2], exact, atol=1e-4)
    new = solver.reopen(problem, again)
    assert not new.exact
    for batch in batched(views, 200):
        new = step(new, batch)
    assert abs(np.asarray(new.lam)[:2] - exact).max() < 0.02
    assert (before < 1).all()


@pytest.mark.slow
def test_rows_that_are_not_finite_on_a_device_are_not_learned_from():
    X = np.random.default_rng(0).normal(size=(4000, 200)).astype("f4") * np.linspace(3, 1, 200).astype("f4")
    batches = [jnp.asarray(x) for x in np.split(X, 40)]
    batches[20] = batches[20].at[3, 3].set(jnp.nan)
    result = es.solve(es.problems.pca(center=False), batches, 2, **GAME)
    assert np.isfinite(result.V).all()
    assert "moves skipped because they were not finite" in result.message

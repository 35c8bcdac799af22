"""One move of the game."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, batched, latent_views
from eigenstream.core.ritz import small_svd
from eigenstream.solvers.game import preconditioner
from planted import planted


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


@pytest.mark.parametrize("dims", [(12, 9), (9, 12)])
def test_singular_vectors_between_two_metrics(dims):
    """Both metrics have null directions, and one is badly scaled."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(d, d - 2)) for d in dims)
    GX, GY, C = a @ a.T, b @ b.T * 1e6, a @ rng.normal(size=(dims[0] - 2, dims[1] - 2)) @ b.T
    most = max(dims)
    padded = [np.pad(M, [(0, most - n) for n in M.shape]).astype("f4") for M in (C, GX, GY)]
    values, (X, Y) = map(np.asarray, small_svd(*map(jnp.asarray, padded), 1e-5))
    rank = min(dims) - 2
    (ex, ux), (ey, uy) = (np.linalg.eigh(G) for G in (GX, GY))
    wx, wy = ux[:, 2:] / np.sqrt(ex[2:]), uy[:, 2:] / np.sqrt(ey[2:])
    exact = np.linalg.svd(wx.T @ C @ wy, compute_uv=False)
    np.testing.assert_allclose(values[:rank], exact[:rank], rtol=1e-3)
    assert (values[rank:] == -np.inf).all()
    assert not X[:, rank:].any()
    for V, G in ((X, padded[1]), (Y, padded[2])):
        np.testing.assert_allclose((V.T @ G @ V)[:rank, :rank], np.eye(rank), atol=5e-3)
    np.testing.assert_allclose((X.T @ padded[0] @ Y)[:rank, :rank], np.diag(exact[:rank]), atol=5e-3 * exact[0])


def missing_after(passes, problem=es.problems.cca):
    """What the game lacks of the exact sum after so many passes over rows of two views."""
    views = planted(4000, (120, 100), lambda d: np.logspace(0, -1, d), np.linspace(0.9, 0.5, 8))
    jax.clear_caches()
    exact = es.solve(problem(), [views], 4, "exact")
    game = es.solve(problem(), batched(views), 4, es.solvers.Game(extra=8, rank=24), max_epochs=passes, memory_budget=1)
    return 1 - game.eigenvalues.sum() / exact.eigenvalues.sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cca", "pls"])
def test_two_views_with_coefficients_of_their_own_converge_faster(kind, monkeypatch):
    problem = getattr(es.problems, kind)
    apart = missing_after(5, problem)
    monkeypatch.setattr(type(problem()), "parts", lambda self, V: (V,))
    together = missing_after(5, problem)
    monkeypatch.undo()
    jax.clear_caches()
    assert -1e-3 < apart < 0.5 * together


@pytest.mark.slow
def test_a_second_search_direction_outside_the_sketch_speeds_up_passes(monkeypatch):
    both = missing_after(5)
    known = preconditioner.Sketch.factor

    def one_way(self, problem, exactly, count):
        found = known(self, problem, exactly, count)
        # The second is that of the first once more.
        return found._replace(solves=found.solves[:1] * len(found.solves))

    monkeypatch.setattr(preconditioner.Sketch, "factor", one_way)
    one = missing_after(5)
    monkeypatch.undo()
    jax.clear_caches()
    assert -1e-3 < both < 0.8 * one


@pytest.mark.parametrize("k", [4, 16, 20])
def test_players_that_span_a_view_do_not_contradict_one_another(k):
    """With as many search directions they would outnumber the columns of the second view."""
    views = planted(6000, (30, 20), np.ones, np.linspace(0.9, 0.2, 20))
    exact = es.solve(es.problems.cca(), [views], k, "exact")
    game = es.solve(es.problems.cca(), batched(views), k, es.solvers.Game(rank=12), memory_budget=1)
    assert int(game.state.refused) == 0
    assert (np.abs(game.eigenvalues) < 1.05).all()
    assert abs(game.eigenvalues.sum() / exact.eigenvalues.sum() - 1) < 0.1

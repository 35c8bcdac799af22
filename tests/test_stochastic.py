"""Every iterative solver: prescribed spectra, streams, shards, and steps that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eigenstream as es
import oracles
from conftest import check_refused, quick
from data import captured, scaled, two_views
from eigenstream.core import players, views
from eigenstream.solvers import SGHA, EckartYoung, Exact, Oja, Paper, Smooth

pytestmark = pytest.mark.usefixtures("x64")
K = 3


#: Solver, whether it orders the eigenvectors, whether it needs B = I.
SOLVERS = {
    "exact": (Exact(), True, False),
    "algorithm 1": (Paper(learning_rate=0.4, averaging=None), True, False),
    "algorithm 2": (Paper(learning_rate=0.3, averaging=1.0), True, False),
    "algorithm 3": (Smooth(learning_rate=0.3, averaging=0.2, floor=0.1, ceiling=10.0), True, False),
    "eckart-young": (EckartYoung(learning_rate=0.05, shift=0.0, polish=True), True, False),
    "eckart-young nested": (EckartYoung(learning_rate=0.05, shift=0.0, nested=True), True, False),
    "sgha": (SGHA(learning_rate=0.3, shift=0.0, polish=True), True, False),
    "sgha ordered": (SGHA(learning_rate=0.3, shift=0.0, ordered=True), True, False),
    "oja": (Oja(learning_rate=5.0, shift=0.0), True, True),
}


@pytest.mark.parametrize("d", quick((3, 20, 100), 3))
@pytest.mark.parametrize("kind", oracles.SPECTRA)
@pytest.mark.parametrize("name", SOLVERS)
def test_prescribed_spectra(name, kind, d):
    solver, ordered, identity = SOLVERS[name]
    lam = oracles.spectrum(kind, d, K)
    A, B = oracles.pencil(lam, seed=d, identity=identity)
    _, V = oracles.leading(A, B, K)
    options = {} if isinstance(solver, Exact) else {"max_steps": 6000, "tol": 1e-9}
    result = es.solve(es.problems.matrices(A, B), None, K, solver=solver, **options)
    np.testing.assert_allclose(result.eigenvalues, lam[:K], atol=2e-4 if kind == "clustered" else 1e-6)
    assert oracles.same_space(result.V, V, B) < 1e-8
    if ordered and kind in ("stepped", "decaying"):
        assert es.metrics.angles(result.V, V, B).max() < 1e-4
    norms = np.einsum("ik,ik->k", result.V, result.V if B is None else B @ result.V)
    np.testing.assert_allclose(norms, 1, atol=1e-6)


STREAMING = {
    "paper": Paper(learning_rate=0.3),
    "smooth": Smooth(learning_rate=0.3, floor=1e-2, ceiling=1e2),
    "eckart-young": EckartYoung(learning_rate=0.01, polish=True),
    "sgha": SGHA(learning_rate=0.05, polish=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMING)
def test_streams_of_two_views(name):
    X, Y = two_views(40_000)
    X, Y = X / 4, Y / 4
    batches = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100)]
    result = es.solve(es.problems.cca(), batches, 2, solver=STREAMING[name])
    assert captured((X, Y), result.V, 2) > 0.97
    assert result.n_samples_seen == 40_000


@pytest.mark.parametrize("name", quick([*STREAMING, "oja"], "paper"))
def test_state_keeps_its_structure_and_types_through_scan_and_cond(name):
    solver = STREAMING.get(name, Oja())
    problem = es.problems.pca(center="running") if name == "oja" else es.problems.cca(center="running")
    X = np.random.default_rng(0).normal(size=(5, 40, 6))
    data = X if name == "oja" else (X, X[..., :4])
    batch = jax.tree.map(lambda leaf: leaf[0], data)
    state = solver.init(problem, batch, 2, jax.random.key(0))

    def body(state, batch):
        return solver.step(problem, state, batch)

    scanned, _ = jax.lax.scan(body, state, data)
    stepped, step = state, jax.jit(body)
    for i in range(5):
        stepped, _ = step(stepped, jax.tree.map(lambda leaf, i=i: leaf[i], data))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    kept = jax.lax.cond(True, lambda: body(state, batch)[0], lambda: state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), kept) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


def test_float32_stays_float32():
    with jax.enable_x64(False):
        X = np.random.default_rng(0).normal(size=(400, 6))
        for solver in (Paper(), Smooth(), EckartYoung(), SGHA()):
            result = es.solve(es.problems.cca(), [(X, X[:, :4])], 2, solver=solver)
            floats = [leaf for leaf in jax.tree.leaves(result.state) if leaf.dtype.kind == "f"]
            assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}


def test_shards_average_directions_and_use_every_row():
    """Three shards of the same rows give the step of one; shards of 11 rows hold 3, 4 and 4."""
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(12, 5)), rng.normal(size=(12, 4))
    problem = es.problems.cca(center=False)
    one = Paper(shards=1)
    three = Paper(shards=3)
    state = one.init(problem, (X, Y), 2, jax.random.key(0))
    tripled = (np.vstack([X] * 3), np.vstack([Y] * 3))
    a, b = one.step(problem, state, (X, Y))[0], three.step(problem, state, tripled)[0]
    np.testing.assert_allclose(players.to_matrix(a.V), players.to_matrix(b.V), atol=1e-12)
    assert [views.n_rows(part) for part in views.split((X[:11], Y[:11]), (1, 1, 1))] == [3, 4, 4]


def test_shards_do_not_change_given_matrices():
    result = es.solve(es.problems.matrices(np.diag([3.0, 1.0])), None, 1, solver=Paper(shards=2), max_steps=200)
    np.testing.assert_allclose(result.eigenvalues, 3, atol=1e-3)


def test_a_step_that_is_not_finite_keeps_the_last_finite_state():
    """A device array is not checked on the host, so its NaN reaches the step."""
    good = jnp.asarray(scaled(100, 4), jnp.float32)
    bad = good.at[3, 2].set(jnp.nan)
    solver = Paper(learning_rate=0.01)
    result = es.solve(es.problems.pca(), [good] * 5 + [bad] + [good] * 5, 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert "not finite" in result.message
    assert not result.converged
    before = es.solve(es.problems.pca(), [good] * 5, 2, solver=solver)
    np.testing.assert_array_equal(result.state.V, before.state.V)


@pytest.mark.parametrize("solver", [es.solvers.Paper, es.solvers.EckartYoung])
def test_an_optimizer_that_overflows_keeps_the_last_finite_state(solver):
    X = np.random.default_rng(0).normal(size=(20, 5, 4)).astype("f4")
    result = es.solve(es.problems.pca(), list(X), 2, solver(learning_rate=lambda step: 0.03 / step))
    assert "not finite" in result.message
    assert np.isfinite(result.V).all()


def test_a_diverging_run_stops_early_with_finite_players():
    X = (1e4 * scaled(2000, 6)).astype(np.float32)
    solver = es.solvers.SGHA(learning_rate=10.0)
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in np.split(X, 200)], 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert "lower learning_rate" in result.message
    assert result.n_iter < 200


def test_a_step_size_that_is_far_too_large_is_named():
    """Finite, but nowhere near an eigenvector: the message names the cure."""
    X = 20 * scaled(2000, 60)
    views = [(x[:, :30], x[:, 30:]) for x in np.split(X, 20)]
    result = es.solve(es.problems.cca(), views, 2, solver=Paper(learning_rate=0.1, optimizer=optax.sign_sgd))
    assert np.isfinite(result.V).all()
    assert "lower learning_rate, standardise features, or use Adam" in result.message


def test_polish_orders_the_eigenvectors_in_the_span():
    A, B = oracles.pencil(np.array([1.0, 0.8, 0.3, 0.1]))
    problem = es.problems.matrices(A, B)
    rough, fine = (
        es.solve(problem, None, 2, solver=es.solvers.SGHA(shift=0.0, polish=p), max_steps=3000) for p in (False, True)
    )
    np.testing.assert_allclose(fine.eigenvalues, [1, 0.8], atol=1e-5)
    assert abs(rough.eigenvalues[0] - 1) > 1e-3
    np.testing.assert_allclose(rough.eigenvalues.sum(), 1.8, atol=1e-4)


@pytest.mark.slow
def test_any_optax_optimizer():
    X = scaled(4000)
    for optimizer in (
        optax.adam,
        optax.rmsprop,
        optax.lion,
        lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
    ):
        solver = Paper(learning_rate=0.01, optimizer=optimizer)
        result = es.solve(es.problems.pca(), np.split(X, 40), 1, solver=solver, max_epochs=4)
        assert es.metrics.angles(result.V, np.eye(5)[:, :1])[0] < 0.1


def test_epsilon_is_added_to_b():
    A, B = oracles.pencil(np.array([2.0, 1.0, 0.5]), 2.0)
    result = es.solve(es.problems.matrices(A, B), None, 2, solver=Paper(averaging=None, epsilon=0.7), max_steps=3000)
    np.testing.assert_allclose(result.eigenvalues, oracles.leading(A, B + 0.7 * np.eye(3), 2)[0], atol=1e-6)


MISTAKES = {
    "learning rate": (lambda: Paper(learning_rate=-1.0), "learning_rate=-1.0"),
    "shards": (lambda: Paper(shards=0), "shards=0"),
    "epsilon": (lambda: Paper(epsilon=-1.0), "epsilon=-1.0"),
    "a made optimizer": (lambda: Paper(optimizer=optax.adam(1e-3)), "optax.adam and not"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

"""Every baseline rests at its own paper's fixed point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
import oracles
from conftest import check_refused
from data import FEW
from eigenstream.solvers import SGHA, EckartYoung, Oja

pytestmark = pytest.mark.usefixtures("x64")
K = 3


def at_fixed_point(solver, problem, V, k):
    state = solver.init(problem, None, k, jax.random.key(0))._replace(V=V)
    return solver.step(problem, state, None)[0].V


def pencil():
    lam = np.array([0.9, 0.7, 0.5, 0.2, 0.1, 0.05])
    A, B = oracles.pencil(lam, 5.0)
    return lam, A, B, oracles.leading(A, B, K)[1].T


ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(K, K)))[0]


def test_eckart_young_rests_at_eigenvectors_of_squared_norm_lambda():
    lam, A, B, V = pencil()
    problem = es.problems.matrices(A, B)
    W = jnp.asarray(np.sqrt(lam[:K])[:, None] * V)
    for nested in (False, True):
        solver = EckartYoung(shift=0.0, nested=nested)
        np.testing.assert_allclose(at_fixed_point(solver, problem, W, K), W, atol=1e-12)
    # The loss depends on the subspace alone: a rotation of W rests too, but not in the ordered form.
    turned = ROTATION @ W
    np.testing.assert_allclose(at_fixed_point(EckartYoung(shift=0.0), problem, turned, K), turned, atol=1e-12)
    moved = at_fixed_point(EckartYoung(shift=0.0, nested=True), problem, turned, K)
    assert np.abs(moved - turned).max() > 1e-2


def test_eckart_young_descends_the_gradient_of_its_loss():
    _, A, B, _ = pencil()
    W = jnp.asarray(np.random.default_rng(0).normal(size=(6, K)))

    def loss(W):
        return -2 * jnp.trace(W.T @ A @ W) + jnp.trace(jnp.linalg.matrix_power(W.T @ B @ W, 2))

    problem = es.problems.matrices(A, B)
    first = problem.products(None, W.T)
    found = EckartYoung().direction(W.T, (), [(first, first)])
    np.testing.assert_allclose(found, -jax.grad(loss)(W).T, rtol=1e-10)


def test_sgha_rests_at_b_orthonormal_eigenvectors():
    _, A, B, V = pencil()
    problem, V = es.problems.matrices(A, B), jnp.asarray(V)
    for ordered in (False, True):
        np.testing.assert_allclose(at_fixed_point(SGHA(shift=0.0, ordered=ordered), problem, V, K), V, atol=1e-12)
    turned = ROTATION @ V
    np.testing.assert_allclose(at_fixed_point(SGHA(shift=0.0), problem, turned, K), turned, atol=1e-12)
    assert np.abs(at_fixed_point(SGHA(shift=0.0, ordered=True), problem, turned, K) - turned).max() > 1e-3
    # Eigenvectors of another length do not rest.
    assert np.abs(at_fixed_point(SGHA(shift=0.0), problem, 2 * V, K) - 2 * V).max() > 1e-2


def test_oja_rests_at_ordered_eigenvectors_and_keeps_orthonormal_rows():
    A, _ = oracles.pencil(np.array([0.9, 0.7, 0.5, 0.2, 0.1]), identity=True)
    V = jnp.asarray(oracles.leading(A, None, K)[1].T)
    problem, solver = es.problems.matrices(A), Oja(shift=0.0)
    np.testing.assert_allclose(at_fixed_point(solver, problem, V, K), V, atol=1e-12)
    start = solver.init(problem, None, K, jax.random.key(0)).V
    moved = at_fixed_point(solver, problem, start, K)
    np.testing.assert_allclose(moved @ moved.T, np.eye(K), atol=1e-12)
    Q, R = np.linalg.qr((start + 0.1 * start @ A).T)
    np.testing.assert_allclose(moved, (Q * np.sign(np.diag(R))).T, atol=1e-12)


MISTAKES = {
    "signs for a baseline": (
        lambda: es.solve(es.problems.matrices(np.eye(3)), None, 1, solver=SGHA()),
        "positive leading eigenvalues.*shift",
    ),
    "smallest for a baseline": (
        lambda: es.solve(es.problems.pca(), [FEW], 1, solver=EckartYoung(), which="smallest"),
        "positive leading eigenvalues.*shift",
    ),
    "Oja with a metric": (lambda: es.solve(es.problems.cca(), [(FEW, FEW[:, :3])], 1, solver=Oja()), "B = I"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

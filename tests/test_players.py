"""Trees of players against the matrices that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import players

RNG = np.random.default_rng(0)
TEMPLATE = {"image": jax.ShapeDtypeStruct((2, 2), jnp.float32), "rest": jax.ShapeDtypeStruct((3,), jnp.float32)}


def drawn(k):
    return {"image": RNG.normal(size=(k, 2, 2)).astype("f4"), "rest": RNG.normal(size=(k, 3)).astype("f4")}


def test_products_are_those_of_the_matrices():
    U, V, W = drawn(3), drawn(4), RNG.normal(size=(5, 4))
    a, b = players.to_matrix(U), players.to_matrix(V)
    assert a.shape == (7, 3)
    np.testing.assert_allclose(players.gram(U, V), a.T @ b, rtol=1e-5)
    np.testing.assert_allclose(players.dot(V, V), (b * b).sum(0), rtol=1e-5)
    np.testing.assert_allclose(players.norms(V), np.linalg.norm(b, axis=0), rtol=1e-5)
    np.testing.assert_allclose(players.to_matrix(players.combine(W, V)).T, W @ b.T, rtol=1e-5)
    np.testing.assert_allclose(players.to_matrix(players.scale(W[0], V)), b * W[0], rtol=1e-5)
    np.testing.assert_allclose(players.to_matrix(players.subtract(V, players.mean([V, V]))), 0)


def test_matrices_and_players_are_converted_without_loss():
    V = drawn(4)
    back = players.from_matrix(players.to_matrix(V), TEMPLATE)
    for name in V:
        np.testing.assert_allclose(back[name], V[name], rtol=1e-6)
    np.testing.assert_array_equal(players.to_matrix(players.identity(TEMPLATE)), np.eye(7))
    assert players.size(TEMPLATE) == 7


def test_players_are_drawn_from_the_unit_sphere_whatever_their_leaves():
    V = players.normal(jax.random.key(0), 2000, TEMPLATE)
    np.testing.assert_allclose(players.norms(V), 1, rtol=1e-5)
    # On the sphere in 7 dimensions a coordinate has variance 1/7, here known to about 4%.
    np.testing.assert_allclose(players.to_matrix(V).var(1), 1 / 7, rtol=0.15)


def test_one_newton_step_makes_nearly_orthonormal_players_orthonormal():
    exact = np.linalg.qr(RNG.normal(size=(7, 3)))[0]
    V = players.from_matrix((exact + 1e-3 * RNG.normal(size=(7, 3))).astype("f4"), TEMPLATE)
    Q, matrix = players.to_matrix(players.orthonormal(V)), players.to_matrix(V)
    # The error of a Newton step is of the order of the square of the error before.
    np.testing.assert_allclose(Q.T @ Q, np.eye(3), atol=3e-5)
    np.testing.assert_allclose(Q @ (Q.T @ matrix), matrix, atol=1e-4)

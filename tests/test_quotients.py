"""Rayleigh quotients on given rows."""

import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
import oracles
from data import X, scaled


def test_quotients_are_those_of_the_dense_matrices():
    X = scaled(3000)
    problem = es.problems.cca()
    views = X[:, :3], X[:, 3:]
    V = es.solve(problem, [views], 2).eigenvectors
    A, B = oracles.views(list(views))
    columns = np.vstack([v.T for v in V])
    wanted = np.diag(columns.T @ A @ columns) / np.diag(columns.T @ B @ columns)
    np.testing.assert_allclose(es.rayleigh_quotients(problem, views, V), wanted, atol=1e-5)


def test_eigenvectors_in_another_form_are_refused():
    views = tuple(np.random.default_rng(i).normal(size=(200, 5)) for i in range(2))
    result = es.solve(es.problems.cca(), [views], 2)
    with pytest.raises(ValueError, match=r"result\.eigenvectors"):
        es.rayleigh_quotients(es.problems.cca(), views, result.V)
    # Rows may have another shape with the same numbers in the same order.
    images = tuple(x.reshape(200, 5, 1) for x in views)
    found = es.rayleigh_quotients(es.problems.cca(), images, result.eigenvectors)
    np.testing.assert_allclose(found, result.eigenvalues, atol=1e-5)
    A = np.diag([3.0, 2.0, 1.0])
    given = es.solve(es.problems.matrices(A), None, k=2, max_steps=100)
    with pytest.raises(ValueError, match=r"result\.eigenvectors"):
        es.rayleigh_quotients(es.problems.matrices(A), None, given.V)


def test_quotients_of_far_rows():
    problem = es.problems.pca()
    far = X + 1e5
    V = es.solve(problem, [far], 3).eigenvectors
    np.testing.assert_allclose(
        es.rayleigh_quotients(problem, far, V), np.linalg.eigvalsh(np.cov(X.T))[::-1][:3], rtol=1e-4
    )
    with pytest.raises(ValueError, match="too few rows"):
        es.rayleigh_quotients(problem, far[:1], V)


def test_a_far_feature_beside_a_wide_one_keeps_its_variance():
    rng = np.random.default_rng(0)
    rows = np.c_[1e5 + rng.normal(size=200), 2e4 * rng.normal(size=200)].astype(np.float32)
    rows[-1] = 0
    problem = es.problems.pca()
    point = problem.pilot(rows[:-1])
    assert point[0, 0] != 0
    assert point[0, 1] == 0
    for matrix in (rows[:-1], jnp.asarray(rows[:-1])):
        found = es.rayleigh_quotients(problem, matrix, np.eye(2, dtype=np.float32))
        np.testing.assert_allclose(found, rows[:-1].astype(np.float64).var(0, ddof=1), rtol=1e-4)

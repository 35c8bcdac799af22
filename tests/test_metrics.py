"""Metrics against their definitions, and the laws they obey."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
import oracles
from conftest import check_refused

seeds = st.integers(0, 10**6)


@settings(deadline=None, max_examples=30)
@given(seeds, st.integers(2, 9), st.data())
def test_subspace_error_is_its_definition_through_the_root_of_b(seed, d, data):
    k = data.draw(st.integers(1, d))
    rng = np.random.default_rng(seed)
    V, W = rng.normal(size=(2, d, k))
    R = rng.normal(size=(d, d))
    B = R @ R.T + 0.1 * np.eye(d)
    root = np.real(scipy.linalg.sqrtm(B))
    P, U = (root @ M @ np.linalg.pinv(root @ M) for M in (V, W))
    wanted = 1 - np.trace(U @ P) / k
    found = es.metrics.subspace_error(V, W, B)
    np.testing.assert_allclose(found, wanted, atol=1e-7)
    mixed = V @ rng.normal(size=(k, k))
    np.testing.assert_allclose(es.metrics.subspace_error(mixed, W, B), found, atol=1e-5)
    assert -1e-12 <= found <= 1 + 1e-12


def test_subspace_error_counts_lost_directions_and_resolves_tiny_errors():
    eye = np.eye(5)
    assert es.metrics.subspace_error(eye[:, [0, 0]], eye[:, :2]) == 0.5
    assert es.metrics.subspace_error(eye[:, :2] * [1, 0], eye[:, :2]) == 0.5
    tilted = eye[:, :2].copy()
    tilted[4, 0] = 1e-9
    np.testing.assert_allclose(es.metrics.subspace_error(tilted, eye[:, :2]), 0.5e-18, rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_angles_ignore_sign_and_length(seed):
    rng = np.random.default_rng(seed)
    V, W = rng.normal(size=(2, 6, 3))
    R = rng.normal(size=(6, 6))
    B = R @ R.T + np.eye(6)
    base = es.metrics.angles(V, W, B)
    np.testing.assert_allclose(es.metrics.angles(-3 * V, W, B), base, atol=1e-9)
    cosine = np.abs(np.einsum("ik,ik->k", V, B @ W))
    cosine /= np.sqrt(np.einsum("ik,ik->k", V, B @ V) * np.einsum("ik,ik->k", W, B @ W))
    np.testing.assert_allclose(np.cos(base), cosine, atol=1e-10)


def test_proportion_captured_is_one_at_the_truth_and_less_elsewhere():
    A, B = oracles.pencil(np.array([1.0, 0.8, 0.5, 0.1]))
    lam, V = oracles.leading(A, B, 2)
    np.testing.assert_allclose(es.metrics.proportion_captured(V, A, B), 1)
    np.testing.assert_allclose(es.metrics.proportion_captured(V, A, B, eigenvalues=lam), 1)
    others = oracles.leading(A, B, 4)[1][:, [1, 2]]
    np.testing.assert_allclose(es.metrics.proportion_captured(others, A, B), 1.3 / 1.8)


def test_tcc_sees_the_subspace_only():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 4))
    Y = X[:, :3] + rng.normal(size=(500, 3))
    exact = es.solve(es.problems.cca(), [(X, Y)], 2)
    V = exact.V
    scores = X @ V[:4], Y @ V[4:]
    np.testing.assert_allclose(es.metrics.tcc(*scores, exact.eigenvalues), 1, atol=1e-10)
    M, N = rng.normal(size=(2, 2, 2))
    np.testing.assert_allclose(es.metrics.tcc(scores[0] @ M + 3, scores[1] @ N, exact.eigenvalues), 1, atol=1e-10)
    doubled = scores[0][:, [0, 0]]
    found = es.metrics.tcc(doubled, scores[1], exact.eigenvalues)
    np.testing.assert_allclose(found, exact.eigenvalues[0] / exact.eigenvalues.sum(), atol=1e-8)


def test_residuals_vanish_at_eigenpairs_alone():
    A, B = oracles.pencil(np.linspace(1, 2, 5))
    lam, V = oracles.leading(A, B, 3)
    assert es.metrics.residuals(V, lam, A, B).max() < 1e-12
    assert es.metrics.residuals(V, lam + 0.1, A, B).min() > 1e-3


MISTAKES = {
    "residuals of unequal length": (lambda: es.metrics.residuals(np.eye(3), [1.0], np.eye(3)), "k values"),
    "shapes of metrics": (lambda: es.metrics.subspace_error(np.eye(3), np.eye(2)), r"\(d, k\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

"""Small dense eigenproblems."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
import oracles
from eigenstream.core.ritz import fix_signs, rayleigh_ritz


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_rayleigh_ritz_recovers_eigenvectors_within_the_span(seed):
    A, B = oracles.pencil(np.array([1.0, 0.6, 0.2, -0.5, -1.0]), seed=seed % 100)
    lam, V = oracles.leading(A, B, 3)
    mixed = np.random.default_rng(seed).normal(size=(3, 3)) @ V.T
    ritz, W = rayleigh_ritz(mixed @ A @ mixed.T, mixed @ B @ mixed.T)
    np.testing.assert_allclose(ritz, lam, atol=1e-6)
    assert es.metrics.angles((W @ mixed).T, V, B).max() < 1e-3


def test_signs_are_deterministic_over_all_leaves():
    V = (np.array([[1.0, -0.5], [0.2, 0.1]]), np.array([[-3.0], [0.1]]))
    fixed = fix_signs(V)
    np.testing.assert_array_equal(fixed[0], [[-1.0, 0.5], [0.2, 0.1]])
    np.testing.assert_array_equal(fixed[1], [[3.0], [0.1]])

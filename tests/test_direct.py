"""LAPACK, ARPACK and LOBPCG at their limits."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from data import ring
from eigenstream.solvers import Paper


def test_null_vectors_have_small_residuals_and_converge():
    L = scipy.sparse.csgraph.laplacian(ring(60))
    for A in (L, L.toarray(), sla.aslinearoperator(L)):
        w, _, info = es.eigh(A, k=2, which="smallest")
        np.testing.assert_allclose(w[0], 0, atol=1e-9)
        assert info.residuals.max() < 1e-6
        assert info.converged
    in_jax = jsparse.BCOO.from_scipy_sparse(L.astype(np.float32))
    w, _, info = es.eigh(in_jax, k=2, which="smallest", max_steps=500)
    assert info.converged, info.message
    np.testing.assert_allclose(w, oracles.leading(L.toarray(), None, 2, "smallest")[0], atol=1e-4)
    result = es.solve(es.problems.matrices(L), None, 1, solver=Paper(averaging=None), which="smallest", max_steps=3000)
    assert abs(result.eigenvalues[0]) < 1e-3
    assert "no eigenvectors" not in result.message


def test_exact_on_an_iteration_cut_short_does_not_claim_success():
    L = scipy.sparse.csgraph.laplacian(ring(2000)).astype(np.float32)
    problem = es.problems.matrices(jsparse.BCOO.from_scipy_sparse(L))
    result = es.solve(problem, None, 2, which="smallest")
    if not result.converged:
        assert "steps" in result.message
    assert "exactly" not in result.message


@pytest.mark.slow
def test_the_crowded_end_of_a_path_is_found_by_inversion():
    n = 1500
    path = scipy.sparse.diags_array([1.0] * (n - 1), offsets=1, shape=(n, n))
    problem = es.problems.laplacian((path + path.T).tocsr())
    result = es.solve(problem, None, 3, which="smallest")
    # The normalised path's eigenvalues are 1 - cos(π j / (n - 1)).
    np.testing.assert_allclose(result.eigenvalues, 1 - np.cos(np.pi * np.arange(3) / (n - 1)), atol=1e-9)
    shifted, _, info = es.eigh(
        scipy.sparse.csgraph.laplacian(path + path.T) - 3 * scipy.sparse.eye_array(n), k=3, which="smallest"
    )
    np.testing.assert_allclose(shifted, 2 - 2 * np.cos(np.pi * np.arange(3) / n) - 3, atol=1e-9)
    assert "sigma" in info.method


def test_a_singular_b_in_jax_is_refused():
    d = 60
    B = jnp.diag(jnp.array([0.0] * 30 + [-1.0] * 30))
    with pytest.raises(ValueError, match="not positive definite"):
        es.eigh(lambda v: v, lambda v: B @ v, k=2, size=d)

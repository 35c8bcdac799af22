"""Inputs at the edge of what is sensible: each must be answered rightly or refused in words."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from eigenstream.solvers import Paper

X = np.random.default_rng(0).normal(size=(1000, 5)) * [3, 2, 1, 0.5, 0.2]


def test_large_integers_keep_their_digits():
    stamps = 1_700_000_000 + np.random.default_rng(0).integers(0, 60, (1000, 2))
    found = es.solve(es.problems.pca(), [stamps], 2).eigenvalues
    np.testing.assert_allclose(found, np.linalg.eigvalsh(np.cov(stamps.T))[::-1], rtol=1e-9)
    streamed = es.solve(es.problems.pca(), np.split(stamps, 10), 2, solver=Paper(learning_rate=1e-4), max_epochs=5)
    np.testing.assert_allclose(streamed.eigenvalues.sum(), found.sum(), rtol=0.05)


@pytest.mark.parametrize("solver", ["exact", Paper(learning_rate=1e-5)])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.longdouble])
def test_other_floats_are_taken_as_float32_or_float64(dtype, solver):
    rows = (30 * X).astype(dtype)
    result = es.solve(es.problems.pca(), np.split(rows, 10), 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert result.V.dtype.itemsize >= 4
    if solver == "exact":
        wanted = np.linalg.eigvalsh(np.cov(rows.astype(np.float64).T))[::-1][:2]
        np.testing.assert_allclose(result.eigenvalues, wanted, rtol=1e-5)


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


def test_rayleigh_quotients_of_far_rows():
    problem = es.problems.pca()
    far = X + 1e5
    V = es.solve(problem, [far], 3).eigenvectors
    np.testing.assert_allclose(
        es.rayleigh_quotients(problem, far, V), np.linalg.eigvalsh(np.cov(X.T))[::-1][:3], rtol=1e-4
    )
    with pytest.raises(ValueError, match="too few rows"):
        es.rayleigh_quotients(problem, far[:1], V)


@pytest.mark.parametrize("constant", [0.1, 0.3, 7.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_sparse_column_does_not_count(dtype, constant):
    left = np.c_[X[:, :3], np.full(len(X), constant)].astype(dtype)
    right = X[:, 3:].astype(dtype)
    thin = [
        (scipy.sparse.csr_matrix(left[i : i + 300]), scipy.sparse.csr_matrix(right[i : i + 300]))
        for i in range(0, 1000, 300)
    ]
    sparse, dense = es.solve(es.problems.cca(), thin, 2), es.solve(es.problems.cca(), [(left, right)], 2)
    np.testing.assert_allclose(sparse.eigenvalues, dense.eigenvalues, rtol=1e-4)
    assert "rank 5 of 6" in sparse.message
    assert "rank 5 of 6" in dense.message


def test_a_shift_does_not_make_a_residual_small():
    problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0, 0.5]))
    solver = Paper(shift=1e4, learning_rate=1e-8)
    result = es.solve(problem, None, 2, solver=solver, tol=1e-3, max_steps=50)
    assert not result.converged
    assert result.residuals.max() > 0.05


def ring(n):
    W = scipy.sparse.diags_array([1.0] * (n - 1), offsets=1, shape=(n, n)).tolil()
    W[0, n - 1] = 1
    W = W.tocsr()
    return W + W.T


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


@pytest.mark.slow
def test_edges_of_many_nodes_are_solved_exactly_by_default():
    n = 20_000
    nodes = np.arange(n)
    result = es.solve(es.problems.laplacian(n_nodes=n), [(nodes, (nodes + s) % n) for s in (1, 5, 77)], 1)
    assert isinstance(result.solver, es.solvers.Exact)
    assert 1 < result.eigenvalues[0] <= 2 + 1e-9


class Once:
    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        yield from self.items


@pytest.mark.parametrize(
    ("problem", "options"), [(es.problems.ica(), {}), (es.problems.pca(), {"solver": "paper", "max_epochs": 3})]
)
def test_batches_that_only_look_repeatable_are_noticed(problem, options):
    with pytest.raises(ValueError, match="gave nothing when read again"):
        es.solve(problem, Once(np.random.default_rng(0).normal(size=(4, 100, 17))), 2, **options)


class Counted(list):
    opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()


def test_a_stream_is_opened_once_a_pass():
    for options, passes in (({}, 1), ({"solver": "paper", "max_epochs": 3}, 3)):
        batches = Counted(np.split(X, 4))
        es.solve(es.problems.pca(), batches, 2, **options)
        assert batches.opened == passes


def test_numpy_integers_shards_on_matrices_and_lost_columns():
    labels = np.arange(1000) % 2
    assert es.solve(es.problems.lda(labels.max() + 1), [(X, labels)], 1).V.shape == (5, 1)
    result = es.solve(es.problems.matrices(np.diag([3.0, 1.0])), None, 1, solver=Paper(shards=2), max_steps=200)
    np.testing.assert_allclose(result.eigenvalues, 3, atol=1e-3)
    flat = np.eye(3)[:, :2] * [1, 0]
    assert es.metrics.subspace_error(flat, np.eye(3)[:, :2]) == 0.5

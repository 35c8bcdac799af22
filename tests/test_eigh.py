"""`es.eigh` against SciPy's dense answer."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from conftest import check_refused, quick

D, K = 500, 8


def dense_pair(seed):
    rng = np.random.default_rng(seed)
    A, R = rng.normal(size=(2, D, D))
    return (A + A.T) / 2, R @ R.T / D + 0.1 * np.eye(D)


def sparse_pair(seed, d=D):
    rng = np.random.default_rng(seed)
    A = scipy.sparse.random(d, d, 5 / d, random_state=rng, data_rvs=lambda n: rng.normal(size=n))
    R = scipy.sparse.random(d, d, 2 / d, random_state=rng)
    return ((A + A.T) / 2).tocsr(), (R @ R.T + scipy.sparse.eye_array(d)).tocsr()


def assert_solves(w, V, A, B, which, tol=1e-6):
    A, B = (M.toarray() if scipy.sparse.issparse(M) else M for M in (A, B))
    lam, _ = oracles.leading(A, B, K, which)
    scale = np.abs(lam).max()
    np.testing.assert_allclose(w, lam, atol=tol * scale)
    V = np.asarray(V)
    assert V.shape == (D, K)
    BV = V if B is None else B @ V
    np.testing.assert_allclose(V.T @ BV, np.eye(K), atol=tol)
    assert es.metrics.residuals(V, w, A, B).max() < 1e-4


@pytest.mark.parametrize("with_b", [True, False])
@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("seed", range(2))
def test_dense(seed, which, with_b):
    A, B = dense_pair(seed)
    B = B if with_b else None
    w, V, info = es.eigh(A, B, k=K, which=which)
    assert_solves(w, V, A, B, which)
    assert info.method == "scipy.linalg.eigh"
    assert info.converged


@pytest.mark.parametrize("with_b", [True, False])
@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("seed", range(2))
def test_sparse(seed, which, with_b):
    A, B = sparse_pair(seed)
    B = B if with_b else None
    w, V, info = es.eigh(A, B, k=K, which=which)
    assert_solves(w, V, A, B, which)
    assert info.method == "scipy.sparse.linalg.eigsh"


def test_magnitude_takes_both_ends():
    A, B = sparse_pair(0)
    lam, _ = oracles.leading(A.toarray(), B.toarray(), D)
    wanted = lam[np.argsort(-np.abs(lam))[:K]]
    for pair in ((A, B), (A.toarray(), B.toarray())):
        w, _, _ = es.eigh(*pair, k=K, which="magnitude")
        np.testing.assert_allclose(w, wanted, atol=1e-8)
    assert (wanted > 0).any()
    assert (wanted < 0).any()


def test_a_sparse_input_is_never_copied_dense():
    d = 4000
    A, B = sparse_pair(0, d)
    tracemalloc.start()
    w, V, _ = es.eigh(A, B, k=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < d * d * 8 / 4
    assert es.metrics.residuals(V, w, A, B).max() < 1e-8


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("b", ["matrix", "dense", "operator", None])
def test_operators(b, which):
    A, B = sparse_pair(0)
    given = {"matrix": B, "dense": B.toarray(), "operator": sla.aslinearoperator(B), None: None}[b]
    w, V, info = es.eigh(sla.aslinearoperator(A), given, k=K, which=which)
    assert_solves(w, V, A, None if b is None else B, which)
    assert info.method == "scipy.sparse.linalg.eigsh"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("which", quick(["largest", "smallest"], "largest"))
@pytest.mark.parametrize("form", quick(["array", "bcoo", "function", "mixed"], "array"))
@pytest.mark.parametrize("with_b", [True, False])
def test_jax_stays_in_jax(form, which, with_b):
    A, B = dense_pair(0) if form == "array" else sparse_pair(0)
    thick = [M if isinstance(M, np.ndarray) else M.toarray() for M in (A, B)]
    Aj, Bj = (jnp.asarray(M) for M in thick)
    forms = {
        "array": (Aj, Bj),
        "bcoo": (jsparse.BCOO.fromdense(Aj), jsparse.BCOO.fromdense(Bj)),
        "function": (lambda v: Aj @ v, lambda v: Bj @ v),
        "mixed": (lambda v: Aj @ v, B),
    }
    a, b = forms[form]
    w, V, info = es.eigh(a, b if with_b else None, k=K, which=which, size=D)
    assert isinstance(V, jax.Array)
    assert info.converged, info.message
    assert_solves(w, V, thick[0], thick[1] if with_b else None, which)
    assert ("jax" in info.method) == (form == "array")


@pytest.mark.usefixtures("x64")
def test_jax_magnitude_and_small_sizes():
    A, B = oracles.pencil(np.linspace(-2, 1, 9))
    for which in ("largest", "smallest", "magnitude"):
        w, V, _ = es.eigh(lambda v: jnp.asarray(A) @ v, jnp.asarray(B), k=3, which=which, size=9)
        lam = oracles.leading(A, B, 9)[0]
        order = {"largest": -lam, "smallest": lam, "magnitude": -np.abs(lam)}[which]
        np.testing.assert_allclose(w, lam[np.argsort(order)[:3]], atol=1e-10)
        np.testing.assert_allclose(V.T @ B @ V, np.eye(3), atol=1e-10)


@pytest.mark.slow
def test_jax_in_float32_reaches_float32():
    A, B = dense_pair(0)
    w, V, _ = es.eigh(jnp.asarray(A), jnp.asarray(B), k=K)
    assert V.dtype == np.float32
    np.testing.assert_allclose(w, oracles.leading(A, B, K)[0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_an_iteration_cut_short_says_so():
    A, _ = sparse_pair(0)
    Aj = jnp.asarray(A.toarray())
    _, _, info = es.eigh(lambda v: Aj @ v, k=K, size=D, max_steps=2)
    assert not info.converged
    assert "after 2 steps" in info.message


def test_all_pairs_by_default_and_from_a_sparse_matrix():
    A, B = oracles.pencil(np.linspace(-1, 1, 12))
    for a, b in ((A, B), (scipy.sparse.csr_matrix(A), B), (sla.aslinearoperator(A), sla.aslinearoperator(B))):
        w, V, _ = es.eigh(a, b)
        np.testing.assert_allclose(w, np.linspace(1, -1, 12), atol=1e-10)
        np.testing.assert_allclose(V.T @ B @ V, np.eye(12), atol=1e-9)


def test_the_seed_fixes_the_bits():
    A, B = sparse_pair(0)
    first, second = (es.eigh(A, B, k=3)[1] for _ in range(2))
    assert np.array_equal(first, second)


MISTAKES = {
    "not square": (lambda: es.eigh(np.ones((3, 2))), r"A has shape \(3, 2\)"),
    "sizes differ": (lambda: es.eigh(np.eye(3), np.eye(2)), "one size"),
    "not symmetric": (lambda: es.eigh(np.triu(np.ones((3, 3)))), "A is not symmetric"),
    "indefinite": (lambda: es.eigh(np.eye(3), np.diag([1.0, 1, -1])), "not positive definite.*ridge"),
    "indefinite and sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), scipy.sparse.diags_array([1.0] * 8 + [-1]), k=2),
        "not positive definite.*ridge",
    ),
    "singular and sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), scipy.sparse.diags_array([1.0] * 8 + [0]), k=2),
        "singular|not positive definite",
    ),
    "indefinite and dense beside sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), np.diag([1.0] * 8 + [-1]), k=2),
        "not positive definite.*ridge",
    ),
    "indefinite in JAX": (lambda: es.eigh(jnp.eye(9), jnp.diag(jnp.array([1.0] * 8 + [-1])), k=2), "not positive"),
    "NaN in a matrix": (lambda: es.eigh(np.diag([1.0, np.nan])), "A holds NaN"),
    "complex matrix": (lambda: es.eigh(np.eye(2) * 1j), "real numbers"),
    "function without size": (lambda: es.eigh(lambda v: v), "size is needed"),
    "eigh k": (lambda: es.eigh(np.eye(3), k=4), "k=4.*from 1 to the dimension, 3"),
    "eigh which": (lambda: es.eigh(np.eye(3), which="top"), "which='top'"),
    "k a fraction in eigh": (lambda: es.eigh(np.eye(3), k=1.5), "k=1.5"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

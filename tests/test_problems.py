"""`products` of every problem against its dense definition, and the ways a batch may come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from conftest import quick
from eigenstream.core import host_batches, players
from eigenstream.problems.checks import view_sizes

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N = 60
X, Y, Z = (RNG.normal(size=(N, d)) @ RNG.normal(size=(d, d)) + 1 for d in (5, 4, 3))
LABELS = RNG.integers(0, 3, N)
SOURCES, TARGETS = RNG.integers(0, 7, (2, N))
WEIGHTS = RNG.uniform(0.5, 2, N)

PROBLEMS = {
    "pca": (es.problems.pca(), X, oracles.pca(X)),
    "pca-ridge": (es.problems.pca(ridge=0.3), X, oracles.pca(X, ridge=0.3)),
    "pca-uncentred": (es.problems.pca(center=False), X, oracles.pca(X, center=False)),
    "cca": (es.problems.cca(), (X, Y), oracles.views([X, Y])),
    "cca-ridge": (es.problems.cca(ridge=0.1), (X, Y), oracles.views([X, Y], ridge=0.1)),
    "multiview": (es.problems.multiview(), (X, Y, Z), oracles.views([X, Y, Z])),
    "pls": (es.problems.pls(), (X, Y), oracles.pls(X, Y)),
    "lda": (es.problems.lda(3), (X, LABELS), oracles.lda(X, LABELS)),
    "lda-ridge": (es.problems.lda(3, ridge=0.2), (X, LABELS), oracles.lda(X, LABELS, ridge=0.2)),
    "ica": (es.problems.ica(), X, oracles.ica(X)),
    "ica-ridge": (es.problems.ica(ridge=0.1), X, oracles.ica(X, ridge=0.1)),
    "laplacian": (
        es.problems.laplacian(n_nodes=7, n_edges=N),
        (SOURCES, TARGETS, WEIGHTS),
        oracles.laplacian(7, SOURCES, TARGETS, WEIGHTS),
    ),
    "laplacian-plain": (
        es.problems.laplacian(n_nodes=7, normalized=False, n_edges=N),
        (SOURCES, TARGETS, WEIGHTS),
        oracles.laplacian(7, SOURCES, TARGETS, WEIGHTS, normalized=False),
    ),
    "laplacian-ridge": (
        es.problems.laplacian(n_nodes=7, n_edges=N, ridge=0.2),
        (SOURCES, TARGETS, WEIGHTS),
        oracles.laplacian(7, SOURCES, TARGETS, WEIGHTS, ridge=0.2),
    ),
}


def batch_products(problem, batch, V):
    batch = host_batches.to_device(problem.accept(batch))
    memory = problem.observe(problem.start(batch), batch)
    [(products, _)] = problem.estimate(memory, batch, V, independent=False)
    return products


def drawn(problem, batch, k=3, seed=1):
    return players.normal(jax.random.key(seed), k, problem.template(problem.accept(batch)))


def assert_products(found, V, A, B, tol=1e-10):
    V = players.to_matrix(V)
    scale = max(np.abs(A).max(), np.abs(B).max())
    np.testing.assert_allclose(players.to_matrix(found.AV), A @ V, atol=tol * scale)
    np.testing.assert_allclose(players.to_matrix(found.BV), B @ V, atol=tol * scale)


@pytest.mark.parametrize("name", PROBLEMS)
def test_products_equal_the_dense_definition(name):
    problem, batch, (A, B) = PROBLEMS[name]
    V = drawn(problem, batch)
    assert_products(batch_products(problem, batch, V), V, A, B)


@pytest.mark.parametrize("name", PROBLEMS)
def test_negated_problem_negates_a_alone(name):
    problem, batch, (A, B) = PROBLEMS[name]
    V = drawn(problem, batch)
    batch = problem.accept(batch)
    memory = problem.observe(problem.start(batch), batch)
    [(found, _)] = problem.with_sign(-1).estimate(memory, batch, V, False)
    assert_products(found, V, -A, B)


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_statistics_give_the_same_matrices(name):
    problem, batch, (A, B) = PROBLEMS[name]
    pieces = [jax.tree.map(lambda leaf, s=s: leaf[s], batch) for s in (slice(0, 7), slice(7, 40), slice(40, N))]
    k = problem.most_components(view_sizes(problem.template(problem.accept(batch))))
    lam, _ = oracles.leading(A, B, k)
    result = es.solve(problem, pieces, k, solver="exact")
    np.testing.assert_allclose(result.eigenvalues, lam, atol=1e-9 * max(1, np.abs(lam).max()))
    gram = result.V.T @ B @ result.V
    np.testing.assert_allclose(gram, np.eye(k), atol=1e-8)


def sparse(rng, n, d):
    return scipy.sparse.random(n, d, 0.3, format="csr", random_state=rng)


@pytest.mark.parametrize("name", quick(["pca", "cca", "multiview", "pls", "lda", "ica"], "cca", "lda"))
@pytest.mark.parametrize("center", quick([True, "running", False], True))
def test_sparse_batches_give_what_dense_ones_do(name, center):
    rng = np.random.default_rng(3)
    a, b, c = (sparse(rng, 40, d) for d in (6, 5, 4))
    labels = rng.integers(0, 3, 40)
    thin = {"pca": a, "cca": (a, b), "multiview": (a, b, c), "pls": (a, b), "lda": (a, labels), "ica": a}[name]
    thick = jax.tree.map(lambda x: x.toarray() if scipy.sparse.issparse(x) else x, thin, is_leaf=scipy.sparse.issparse)
    problem = es.problems.lda(3) if name == "lda" else getattr(es.problems, name)(center=center, ridge=0.1)
    V = drawn(problem, thick)
    found, wanted = (batch_products(problem, batch, V) for batch in (thin, thick))
    np.testing.assert_allclose(players.to_matrix(found.AV), players.to_matrix(wanted.AV), atol=1e-12)
    np.testing.assert_allclose(players.to_matrix(found.BV), players.to_matrix(wanted.BV), atol=1e-12)
    on_device, batch = host_batches.to_device(problem.accept(thin)), problem.accept(thick)
    memory = problem.observe(problem.start(batch), batch)
    found, wanted = (jax.tree.leaves(problem.estimate(memory, b, V, True)) for b in (on_device, batch))
    for a_leaf, b_leaf in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a_leaf, b_leaf, atol=1e-12)
    exact = [es.solve(problem, [batch], 2, solver="exact").eigenvalues for batch in (thin, thick)]
    np.testing.assert_allclose(*exact, rtol=1e-9)


@pytest.mark.parametrize("independent", [False, True])
def test_a_sparse_batch_is_never_made_dense(independent):
    """The compiled program of a sparse step holds no array of the batch's dense size."""
    d, b, k = 5000, 40, 2
    batch = host_batches.to_device((sparse(np.random.default_rng(0), b, d), sparse(np.random.default_rng(1), b, d)))
    problem = es.problems.cca(ridge=0.1)
    V = players.normal(jax.random.key(0), k, problem.template(batch))

    def products(batch, V):
        return problem.estimate((), batch, V, independent)

    program = jax.jit(products).lower(batch, V).compile().as_text()
    assert f"[{d},{k}]" in program or f"[{k},{d}]" in program
    for rows_of_part in (b, b // 2):
        assert f"[{rows_of_part},{d}]" not in program
        assert f"[{d},{rows_of_part}]" not in program


def test_leaves_of_a_view_are_never_concatenated_and_may_have_any_shape():
    images, extra = X[:, :4].reshape(N, 2, 2), X[:, 4:]
    structured, flat = {"conv": images, "dense": extra}, X
    problem = es.problems.cca(ridge=0.1)
    V = drawn(problem, (structured, Y))
    assert V[0]["conv"].shape == (3, 2, 2)
    assert_products(batch_products(problem, (structured, Y), V), V, *oracles.views([X, Y], ridge=0.1))
    by_leaf, by_matrix = (es.solve(problem, [(view, Y)], 2) for view in (structured, flat))
    np.testing.assert_allclose(by_leaf.eigenvalues, by_matrix.eigenvalues, rtol=1e-12)
    assert by_leaf.eigenvectors[0]["conv"].shape == (2, 2, 2)


def test_running_mean_centres_like_the_whole_stream():
    problem = es.problems.pca(center="running")
    batches = np.split(X, 6)
    memory = problem.start(batches[0])
    for batch in batches:
        memory = problem.observe(memory, batch)
    np.testing.assert_allclose(memory.mean[0], X.mean(0), rtol=1e-12)
    V = drawn(problem, X)
    AV = problem.products(problem.rows(memory, X), V).AV
    np.testing.assert_allclose(AV, V @ np.cov(X.T, ddof=0), rtol=1e-10)


def test_a_pilot_saves_the_digits_of_far_float32_rows():
    rng = np.random.default_rng(0)
    far = (rng.normal(size=(200, 4)) + 1e5).astype(np.float32)
    problem = es.problems.cca()
    batch = (far, rng.normal(size=(200, 3)).astype(np.float32))
    point = problem.pilot(batch)
    assert not point[1].any()
    near = problem.less_pilot(batch, point)
    np.testing.assert_array_equal(near[1], batch[1])
    V = players.normal(jax.random.key(0), 2, problem.template(batch))
    A, B = oracles.views([x.astype(np.float64) for x in batch])
    with jax.default_matmul_precision("highest"):
        found = batch_products(problem, near, V)
    assert_products(found, V, A, B, tol=1e-5)
    assert problem.pilot((far - 1e5, batch[1])) is None
    assert es.problems.cca(center=False).pilot(batch) is None
    assert es.problems.lda(2).pilot((far, np.zeros(200, int))) is not None


A_, B_ = oracles.pencil(np.linspace(-1, 2, 8))
FORMS = {
    "numpy": lambda M: M,
    "csr": scipy.sparse.csr_matrix,
    "coo array": scipy.sparse.coo_array,
    "operator": sla.aslinearoperator,
    "jax": jnp.asarray,
    "bcoo": lambda M: jsparse.BCOO.fromdense(jnp.asarray(M)),
    "function": lambda M: lambda v: jnp.asarray(M) @ v,
}


ALIKE = [(form, form) for form in FORMS]
MIXED = [(a, b) for a in FORMS for b in [*FORMS, None] if a != b]


@pytest.mark.parametrize(("form_a", "form_b"), [*ALIKE, *(pytest.param(*f, marks=pytest.mark.slow) for f in MIXED)])
def test_matrices_in_every_form(form_a, form_b):
    B = None if form_b is None else FORMS[form_b](B_)
    problem = es.problems.matrices(FORMS[form_a](A_), B, size=8)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    found = jax.jit(lambda p, V: p.products(None, V))(problem, V)
    assert_products(found, V, A_, np.eye(8) if form_b is None else B_)
    exact = es.solve(problem, None, 3, solver="exact")
    lam, _ = oracles.leading(A_, None if form_b is None else B_, 3)
    np.testing.assert_allclose(exact.eigenvalues, lam, atol=1e-8)


@pytest.mark.parametrize("form", ["numpy", "csr", "jax", "bcoo"])
def test_ridge_on_matrices(form):
    problem = es.problems.matrices(FORMS[form](A_), FORMS[form](B_), ridge=0.5)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    assert_products(problem.products(None, V), V, A_, oracles.ridged(B_, 0.5))
    if form in ("numpy", "csr"):
        lam, _ = oracles.leading(A_, oracles.ridged(B_, 0.5), 3)
        np.testing.assert_allclose(es.solve(problem, None, 3, solver="exact").eigenvalues, lam, atol=1e-10)


@pytest.mark.parametrize("normalized", [True, False])
def test_laplacian_of_a_matrix_is_that_of_its_edges(normalized):
    W = scipy.sparse.coo_matrix((WEIGHTS, (SOURCES, TARGETS)), shape=(7, 7))
    problem = es.problems.laplacian((W + W.T).tocsr(), normalized=normalized)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    assert_products(problem.products(None, V), V, *oracles.laplacian(7, SOURCES, TARGETS, WEIGHTS, normalized))
    streamed = es.problems.laplacian(n_nodes=7, normalized=normalized, n_edges=N)
    edges = [(SOURCES[:20], TARGETS[:20], WEIGHTS[:20]), (SOURCES[20:], TARGETS[20:], WEIGHTS[20:])]
    for which in ("largest", "smallest"):
        a = es.solve(problem, None, 3, which=which).eigenvalues
        np.testing.assert_allclose(es.solve(streamed, edges, 3, which=which).eigenvalues, a, atol=1e-10)


def test_unweighted_edges_have_weight_one():
    problem = es.problems.laplacian(n_nodes=7, n_edges=N)
    V = drawn(problem, (SOURCES, TARGETS))
    assert_products(
        batch_products(problem, (SOURCES, TARGETS), V), V, *oracles.laplacian(7, SOURCES, TARGETS, np.ones(N))
    )


@pytest.mark.parametrize("name", ["cca", "ica"])
def test_parts_for_a_and_b_share_no_row_and_every_row_serves_both(name):
    """In each pair a row moves A alone or B alone; over all pairs it moves both."""
    problem = getattr(es.problems, name)(center=False)
    n = 12
    data = (X[:n], Y[:n]) if name == "cca" else X[:n]
    V = drawn(problem, data)

    def pairs(row):
        moved = jax.tree.map(lambda leaf: leaf + (np.arange(n) == row)[:, None], data)
        return [(players.to_matrix(p.AV), players.to_matrix(q.BV)) for p, q in problem.estimate((), moved, V, True)]

    base = pairs(None)
    assert len(base) == (2 if name == "cca" else 3)
    for row in range(n):
        touched = [
            (not np.array_equal(a, a0), not np.array_equal(b, b0))
            for (a, b), (a0, b0) in zip(pairs(row), base, strict=True)
        ]
        assert all(a != b for a, b in touched)
        assert any(a for a, _ in touched)
        assert any(b for _, b in touched)


def test_a_bcoo_batch_is_a_sparse_batch():
    thin = sparse(np.random.default_rng(0), 30, 6)
    in_jax = jsparse.BCOO.from_scipy_sparse(thin)
    for solver in ("exact", es.solvers.Paper(learning_rate=0.01)):
        a, b = (es.solve(es.problems.pca(), [batch], 2, solver=solver).eigenvalues for batch in (thin, in_jax))
        np.testing.assert_allclose(a, b, rtol=1e-6)

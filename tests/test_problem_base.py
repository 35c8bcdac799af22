"""Every problem against its dense definition: products, exact sums, sparse rows, unbiased estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse

import eigenstream as es
import oracles
from conftest import quick
from data import sparse_rows
from eigenstream.core import host_batches, players, views
from eigenstream.problems.checks import view_sizes
from eigenstream.solvers import direction

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


@pytest.mark.parametrize("name", PROBLEMS)
def test_products_equal_the_dense_definition(name):
    problem, batch, (A, B) = PROBLEMS[name]
    V = oracles.drawn(problem, batch)
    oracles.assert_products(oracles.batch_products(problem, batch, V), V, A, B)


@pytest.mark.parametrize("name", PROBLEMS)
def test_negated_problem_negates_a_alone(name):
    problem, batch, (A, B) = PROBLEMS[name]
    V = oracles.drawn(problem, batch)
    batch = problem.accept(batch)
    memory = problem.observe(problem.start(batch), batch)
    [(found, _)] = problem.with_sign(-1).signed_estimate(memory, batch, V, False)
    oracles.assert_products(found, V, -A, B)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if not name.startswith("laplacian")])
def test_blocks_of_a_and_b_are_those_of_the_products(name):
    """The exact solver reads B's blocks, and A between two views, from the sums instead of products."""
    problem, batch, _ = PROBLEMS[name]
    batch = problem.accept(batch)
    operands = problem.statistics(batch, False).add(batch).operands()
    products = problem.products(views.read(operands), players.identity(problem.template(batch)))
    A, B = (players.to_matrix(M) for M in products)
    blocks = problem.metric(operands)
    whole = (1 + problem.ridge) * np.eye(len(B)) if blocks is None else scipy.linalg.block_diag(*(b() for b in blocks))
    np.testing.assert_allclose(whole, B, atol=1e-12 * np.abs(B).max())
    between = problem.between(operands)
    assert (between is None) == (name not in ("cca", "cca-ridge", "pls"))
    if between is not None:
        C = between()
        zero = np.zeros((len(C), len(C))), np.zeros((len(C.T), len(C.T)))
        np.testing.assert_allclose(np.block([[zero[0], C], [C.T, zero[1]]]), A, atol=1e-12)


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


@pytest.mark.parametrize("name", quick(["pca", "cca", "multiview", "pls", "lda", "ica"], "cca", "lda"))
@pytest.mark.parametrize("center", quick([True, "running", False], True))
def test_sparse_batches_give_the_products_of_dense_ones(name, center):
    rng = np.random.default_rng(3)
    a, b, c = (sparse_rows(40, d, seed) for seed, d in enumerate((6, 5, 4)))
    labels = rng.integers(0, 3, 40)
    thin = {"pca": a, "cca": (a, b), "multiview": (a, b, c), "pls": (a, b), "lda": (a, labels), "ica": a}[name]
    thick = jax.tree.map(lambda x: x.toarray() if scipy.sparse.issparse(x) else x, thin, is_leaf=scipy.sparse.issparse)
    problem = es.problems.lda(3) if name == "lda" else getattr(es.problems, name)(center=center, ridge=0.1)
    V = oracles.drawn(problem, thick)
    found, wanted = (oracles.batch_products(problem, batch, V) for batch in (thin, thick))
    np.testing.assert_allclose(players.to_matrix(found.AV), players.to_matrix(wanted.AV), atol=1e-12)
    np.testing.assert_allclose(players.to_matrix(found.BV), players.to_matrix(wanted.BV), atol=1e-12)
    on_device, batch = host_batches.to_device(problem.accept(thin)), problem.accept(thick)
    memory = problem.observe(problem.start(batch), batch)
    found, wanted = (jax.tree.leaves(problem.estimate(memory, b, V, True)) for b in (on_device, batch))
    for a_leaf, b_leaf in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a_leaf, b_leaf, atol=1e-12)
    exact = [es.solve(problem, [batch], 2, solver="exact").eigenvalues for batch in (thin, thick)]
    np.testing.assert_allclose(*exact, rtol=1e-9)


@pytest.mark.parametrize("name", ["cca", "ica"])
def test_a_and_b_share_no_row_and_use_every_row(name):
    """In each pair a row moves A alone or B alone; over all pairs it moves both."""
    problem = getattr(es.problems, name)(center=False)
    n = 12
    data = (X[:n], Y[:n]) if name == "cca" else X[:n]
    V = oracles.drawn(problem, data)

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


#: Rows that batches are drawn from with replacement, and the number of batches.
POPULATION = 30
DRAWS = 200_000


def centred(rng, d):
    P = rng.standard_t(6, size=(POPULATION, d)) @ rng.normal(size=(d, d)) / np.sqrt(d)
    return P - P.mean(0)


RNG = np.random.default_rng(0)
P, Q, R = centred(RNG, 4), centred(RNG, 3), centred(RNG, 2)
P[:, :2] += Q[:, :2]
HEADS, TAILS = RNG.integers(0, 6, (2, POPULATION))
WEIGHT = RNG.uniform(0.5, 2, POPULATION)


POPULATIONS = {
    "pca": (es.problems.pca(center=False), P),
    "cca": (es.problems.cca(center=False), (P, Q)),
    "cca with a ridge": (es.problems.cca(center=False, ridge=0.3), (P, Q)),
    "multiview": (es.problems.multiview(center=False), (P, Q, R)),
    "pls": (es.problems.pls(center=False), (P, Q)),
    "ica": (es.problems.ica(center=False), P),
    "normalised laplacian": (es.problems.laplacian(n_nodes=6), (HEADS, TAILS, WEIGHT)),
    "plain laplacian": (es.problems.laplacian(n_nodes=6, normalized=False, n_edges=POPULATION), (HEADS, TAILS, WEIGHT)),
}


def directions(problem, data, V, BV_aux, independent):
    norms = jnp.maximum(players.dot(V, BV_aux), 1e-10)
    return direction(V, problem.estimate((), data, V, independent), BV_aux, norms)


def mean_and_error(problem, data, V, BV_aux, b, independent, draws=DRAWS):
    """Mean direction and its standard error over random batches, flat."""

    @jax.jit
    def one(key):
        index = jax.random.randint(key, (b,), 0, POPULATION)
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], data)
        found = directions(problem, batch, V, BV_aux, independent)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found)])

    totals = 0, 0
    keys = jax.random.split(jax.random.key(b), draws)
    for part in jnp.split(keys, 20):
        found = jax.vmap(one)(part)
        totals = totals[0] + found.sum(0), totals[1] + (found**2).sum(0)
    mean = totals[0] / draws
    return np.asarray(mean), np.asarray(jnp.sqrt(jnp.maximum(totals[1] / draws - mean**2, 0) / draws))


def setting(name):
    problem, data = POPULATIONS[name]
    data = problem.accept(data)
    V = players.normal(jax.random.key(3), 3 if name != "multiview" else 2, problem.template(data))
    exact = problem.estimate((), data, V, False)[0][0]
    wanted = directions(problem, data, V, exact.BV, False)
    return problem, data, V, exact.BV, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])


@pytest.mark.parametrize("b", quick((2, 64), 2))
@pytest.mark.parametrize("name", quick(POPULATIONS, "cca", "ica", "normalised laplacian"))
def test_independent_parts_are_unbiased(name, b):
    problem, data, V, BV, wanted = setting(name)
    b = max(b, problem.fewest_rows(independent=True))
    assert b <= (3 if name == "ica" else 2) or b == 64
    mean, error = mean_and_error(problem, data, V, BV, b, independent=True)
    # Under the null hypothesis the largest of a dozen normal scores passes 4.5 once in ten thousand.
    scores = np.abs(mean - wanted) / np.where(error > 0, error, 1e-12)
    assert scores.max() < 4.5
    # The test has power: the noise of the mean is a small part of the direction.
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", quick(["cca", "multiview", "ica", "normalised laplacian"], "cca"))
def test_the_same_rows_for_a_and_b_are_biased(name):
    problem, data, V, BV, wanted = setting(name)
    mean, error = mean_and_error(problem, data, V, BV, 4, independent=False, draws=40_000)
    scores = np.abs(mean - wanted) / np.where(error > 0, error, 1e-12)
    assert scores.max() > 10


@pytest.mark.slow
@pytest.mark.parametrize("b", [4, 64])
def test_a_centred_batch_is_unbiased_over_b_minus_one(b):
    """The mean is unknown, and far from zero."""
    data = (P + 3, Q - 2)
    problem = es.problems.cca(center=True)
    V = players.normal(jax.random.key(3), 2, problem.template(data))
    # Drawn with replacement, the population's own covariance is what b - 1 estimates.
    exact = es.problems.cca(center=False).estimate((), (P, Q), V, False)[0][0]
    wanted = directions(es.problems.cca(center=False), (P, Q), V, exact.BV, False)
    wanted = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])
    mean, error = mean_and_error(problem, data, V, exact.BV, b, independent=True, draws=100_000)
    assert (np.abs(mean - wanted) / error).max() < 4.5


class Diagonal(es.problems.Problem):
    """A problem of a user's own, with its own constructor and estimate: ``A`` and ``B`` are diagonal, without data."""

    noiseless = True
    has_rows = False

    def __init__(self, values):
        self.values = values

    def accept(self, batch):
        return None

    def template(self, batch):
        return jax.ShapeDtypeStruct(self.values.shape, self.values.dtype)

    def diagonal(self, memory, batch):
        return jnp.ones_like(self.values)

    def fewest_rows(self, independent):
        return 0

    def estimate(self, memory, batch, V, independent):
        products = es.problems.Products(V * self.values, V)
        return [(products, products)]


jax.tree_util.register_pytree_node(Diagonal, lambda p: ((p.values,), None), lambda _, leaves: Diagonal(*leaves))


def test_a_users_problem_keeps_its_own_constructor_and_estimate():
    problem = Diagonal(jnp.array([3.0, 2.0, 1.0]))
    solver = es.solvers.Paper(learning_rate=0.1, averaging=None)
    found = es.solve(problem, None, 2, solver, max_steps=300)
    np.testing.assert_allclose(found.eigenvalues, [3, 2], atol=1e-3)
    # A sign that jax.jit would lose must not give the wrong end of the spectrum.
    with pytest.raises(ValueError, match="Diagonal has no sign"):
        es.solve(problem, None, 2, solver, which="smallest", max_steps=300)

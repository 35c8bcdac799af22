"""Graph Laplacians, of a matrix and of a stream of edges."""

import jax
import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
import oracles
from conftest import check_refused
from eigenstream.core import players
from eigenstream.solvers import Paper

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
N = 60
SOURCES, TARGETS = RNG.integers(0, 7, (2, N))
WEIGHTS = RNG.uniform(0.5, 2, N)


@pytest.mark.parametrize("normalized", [True, False])
def test_laplacian_of_a_matrix_is_that_of_its_edges(normalized):
    W = scipy.sparse.coo_matrix((WEIGHTS, (SOURCES, TARGETS)), shape=(7, 7))
    problem = es.problems.laplacian((W + W.T).tocsr(), normalized=normalized)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    oracles.assert_products(problem.products(None, V), V, *oracles.laplacian(7, SOURCES, TARGETS, WEIGHTS, normalized))
    streamed = es.problems.laplacian(n_nodes=7, normalized=normalized, n_edges=N)
    edges = [(SOURCES[:20], TARGETS[:20], WEIGHTS[:20]), (SOURCES[20:], TARGETS[20:], WEIGHTS[20:])]
    for which in ("largest", "smallest"):
        a = es.solve(problem, None, 3, which=which).eigenvalues
        np.testing.assert_allclose(es.solve(streamed, edges, 3, which=which).eigenvalues, a, atol=1e-10)


def test_unweighted_edges_have_weight_one():
    problem = es.problems.laplacian(n_nodes=7, n_edges=N)
    V = oracles.drawn(problem, (SOURCES, TARGETS))
    oracles.assert_products(
        oracles.batch_products(problem, (SOURCES, TARGETS), V), V, *oracles.laplacian(7, SOURCES, TARGETS, np.ones(N))
    )


def test_three_components_give_three_zeros():
    """Three components give three zeros."""
    ring = scipy.sparse.diags_array([1.0] * 39, offsets=1, shape=(40, 40))
    W = scipy.sparse.block_diag([ring + ring.T] * 3).tocsr()
    problem = es.problems.laplacian(W)
    w = es.solve(problem, None, 4, which="smallest").eigenvalues
    np.testing.assert_allclose(w[:3], 0, atol=1e-10)
    assert w[3] > 1e-3


@pytest.mark.slow
def test_the_fiedler_vector_of_a_stream_of_edges_splits_two_rings():
    """The Fiedler vector of two rings joined by one edge splits them, from minibatches of edges."""
    n = 12
    ring = np.arange(n)
    i = np.concatenate([ring, n + ring, [0]])
    j = np.concatenate([np.roll(ring, -1), n + np.roll(ring, -1), [n]])
    extra = np.random.default_rng(0).integers(0, n, (2, 60))
    i, j = np.concatenate([i, extra[0], n + extra[0]]), np.concatenate([j, extra[1], n + extra[1]])
    rng = np.random.default_rng(1)
    picks = [rng.integers(0, len(i), 256) for _ in range(2000)]
    problem = es.problems.laplacian(n_nodes=2 * n)
    exact = es.solve(problem, [(i, j)], 2, which="smallest")
    result = es.solve(
        problem, [(i[p], j[p]) for p in picks], 2, which="smallest", solver=Paper(learning_rate=30.0, averaging=0.1)
    )
    np.testing.assert_allclose(result.eigenvalues, exact.eigenvalues, atol=0.02)
    fiedler = result.eigenvectors[1]
    assert len(set(np.sign(fiedler[:n]))) == 1
    assert np.sign(fiedler[0]) != np.sign(fiedler[-1])


MISTAKES = {
    "edges out of range": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0, 1], [1, 3])], 1),
        r"targets.*n_nodes - 1 = 2",
    ),
    "edges of unequal length": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0, 1], [1])], 1),
        "equal lengths",
    ),
    "negative weights": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0], [1], [-1.0])], 1),
        "not negative",
    ),
    "edges as one array": (lambda: es.solve(es.problems.laplacian(n_nodes=3), [np.zeros((2, 2))], 1), "sources"),
    "plain laplacian of a stream": (lambda: es.problems.laplacian(n_nodes=3, normalized=False), "n_edges is needed"),
    "no graph": (lambda: es.problems.laplacian(), "give graph"),
    "lonely node": (lambda: es.problems.laplacian(np.diag([1.0, 0], 1) + np.diag([1.0, 0], -1)), r"\[2\].*no edges"),
    "negative graph": (lambda: es.problems.laplacian(-np.ones((3, 3))), "negative weights"),
    "a negative ridge on a graph": (lambda: es.problems.laplacian(np.eye(3), ridge=-1), "ridge=-1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

"""The mean of the direction over many small batches, drawn with replacement, against the full-batch direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from conftest import quick
from eigenstream.core import players
from eigenstream.solvers import direction

pytestmark = pytest.mark.usefixtures("x64")

POPULATION = 30
DRAWS = 200_000


def centred(rng, d):
    X = rng.standard_t(6, size=(POPULATION, d)) @ rng.normal(size=(d, d)) / np.sqrt(d)
    return X - X.mean(0)


RNG = np.random.default_rng(0)
X, Y, Z = centred(RNG, 4), centred(RNG, 3), centred(RNG, 2)
X[:, :2] += Y[:, :2]
SOURCES, TARGETS = RNG.integers(0, 6, (2, POPULATION))
W = RNG.uniform(0.5, 2, POPULATION)

PROBLEMS = {
    "pca": (es.problems.pca(center=False), X),
    "cca": (es.problems.cca(center=False), (X, Y)),
    "cca with a ridge": (es.problems.cca(center=False, ridge=0.3), (X, Y)),
    "multiview": (es.problems.multiview(center=False), (X, Y, Z)),
    "pls": (es.problems.pls(center=False), (X, Y)),
    "ica": (es.problems.ica(center=False), X),
    "normalised laplacian": (es.problems.laplacian(n_nodes=6), (SOURCES, TARGETS, W)),
    "plain laplacian": (es.problems.laplacian(n_nodes=6, normalized=False, n_edges=POPULATION), (SOURCES, TARGETS, W)),
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
    problem, data = PROBLEMS[name]
    data = problem.accept(data)
    V = players.normal(jax.random.key(3), 3 if name != "multiview" else 2, problem.template(data))
    exact = problem.estimate((), data, V, False)[0][0]
    wanted = directions(problem, data, V, exact.BV, False)
    return problem, data, V, exact.BV, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])


@pytest.mark.parametrize("b", quick((2, 8, 64), 2))
@pytest.mark.parametrize("name", quick(PROBLEMS, "cca", "ica", "normalised laplacian"))
def test_independent_parts_are_unbiased(name, b):
    problem, data, V, BV, wanted = setting(name)
    b = max(b, problem.fewest_rows(independent=True))
    assert b <= (3 if name == "ica" else 2) or b in (8, 64)
    mean, error = mean_and_error(problem, data, V, BV, b, independent=True)
    # Under the null hypothesis the largest of a dozen normal scores passes 4.5 once in ten thousand.
    scores = np.abs(mean - wanted) / np.where(error > 0, error, 1e-12)
    assert scores.max() < 4.5
    # The test can see: the noise of the mean is a small part of the direction.
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", quick(["cca", "multiview", "ica", "normalised laplacian"], "cca"))
def test_the_same_batch_form_is_biased(name):
    problem, data, V, BV, wanted = setting(name)
    mean, error = mean_and_error(problem, data, V, BV, 4, independent=False, draws=40_000)
    scores = np.abs(mean - wanted) / np.where(error > 0, error, 1e-12)
    assert scores.max() > 10


@pytest.mark.slow
@pytest.mark.parametrize("b", [4, 8, 64])
def test_a_batch_less_its_own_mean_is_unbiased_over_b_minus_one(b):
    """Here the mean is not known: the rows are far from centred."""
    data = (X + 3, Y - 2)
    problem = es.problems.cca(center=True)
    V = players.normal(jax.random.key(3), 2, problem.template(data))
    # Drawn with replacement, the population's own covariance is what b - 1 estimates.
    exact = es.problems.cca(center=False).estimate((), (X, Y), V, False)[0][0]
    wanted = directions(es.problems.cca(center=False), (X, Y), V, exact.BV, False)
    wanted = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])
    mean, error = mean_and_error(problem, data, V, exact.BV, b, independent=True, draws=100_000)
    assert (np.abs(mean - wanted) / error).max() < 4.5


@pytest.mark.slow
def test_lda_is_asymptotically_unbiased():
    """With class means learned from m rows the direction's error falls as 1/√m, to nothing."""
    rng = np.random.default_rng(5)
    labels = np.arange(POPULATION) % 3
    data = (X + labels[:, None] * [1.0, -0.5, 0, 0], labels)
    problem = es.problems.lda(3)
    V = players.normal(jax.random.key(0), 2, problem.template(data))
    exact_memory = problem.observe(problem.start(data), data)
    exact = problem.estimate(exact_memory, data, V, False)[0][0]
    wanted = direction(V, [(exact, exact)], exact.BV, players.dot(V, exact.BV))

    def error_after(m):
        index = rng.integers(0, POPULATION, m)
        seen = jax.tree.map(lambda leaf: leaf[index], data)
        memory = problem.observe(problem.start(data), seen)
        # The expectation over a batch is the mean over the population: A comes from memory, B is linear in rows.
        found = direction(V, problem.estimate(memory, data, V, False), exact.BV, players.dot(V, exact.BV))
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    sizes = (300, 30_000, 3_000_000)
    errors = [np.mean([error_after(m) for _ in range(8)]) for m in sizes]
    # Each hundredfold in rows takes the error down tenfold, within a factor of two.
    assert 5 < errors[0] / errors[1] < 20
    assert 5 < errors[1] / errors[2] < 20
    assert errors[2] < 5e-3

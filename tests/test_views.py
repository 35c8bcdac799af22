"""Rows of one or several views: dense, sparse or padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from data import X, sparse_rows
from eigenstream.core import host_batches, players, views


def test_padded_rows_are_not_counted():
    x = np.random.default_rng(0).normal(size=(13, 4))
    full = host_batches.filled(x, 2, 20)
    assert views.n_rows(full) == 20
    assert float(views.count(full)) == 13
    assert np.asarray(views.present(full)).tolist() == [1] * 6 + [0] * 4 + [1] * 7 + [0] * 3
    first, second = views.split(full, (1, 1))
    np.testing.assert_array_equal(first.rows[:6], x[:6])
    np.testing.assert_array_equal(second.rows[:7], x[6:])
    assert (first.counts.tolist(), second.counts.tolist()) == ([6], [7])


def test_players_of_16_bit_rows_have_32_bits():
    assert views.template(X.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("independent", [False, True])
def test_a_sparse_batch_is_never_made_dense(independent):
    """The compiled program of a sparse step holds no array of the batch's dense size."""
    d, b, k = 5000, 40, 2
    batch = host_batches.to_device((sparse_rows(b, d, 0), sparse_rows(b, d, 1)))
    problem = es.problems.cca(ridge=0.1)
    V = players.normal(jax.random.key(0), k, problem.template(batch))

    def products(batch, V):
        return problem.estimate((), batch, V, independent)

    program = jax.jit(products).lower(batch, V).compile().as_text()
    assert f"[{d},{k}]" in program or f"[{k},{d}]" in program
    for rows_of_part in (b, b // 2):
        assert f"[{rows_of_part},{d}]" not in program
        assert f"[{d},{rows_of_part}]" not in program


@pytest.mark.usefixtures("x64")
def test_running_mean_centres_like_the_whole_stream():
    problem = es.problems.pca(center="running")
    batches = np.split(X, 6)
    memory = problem.start(batches[0])
    for batch in batches:
        memory = problem.observe(memory, batch)
    np.testing.assert_allclose(memory.mean[0], X.mean(0), rtol=1e-12)
    V = oracles.drawn(problem, X)
    AV = problem.products(problem.rows(memory, X), V).AV
    np.testing.assert_allclose(AV, V @ np.cov(X.T, ddof=0), rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_a_bcoo_batch_is_a_sparse_batch():
    thin = sparse_rows(30, 6)
    in_jax = jsparse.BCOO.from_scipy_sparse(thin)
    for solver in ("exact", es.solvers.Paper(learning_rate=0.01)):
        a, b = (es.solve(es.problems.pca(), [batch], 2, solver=solver).eigenvalues for batch in (thin, in_jax))
        np.testing.assert_allclose(a, b, rtol=1e-6)

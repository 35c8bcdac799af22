"""Batches on the host: pilots, pieces and blocks."""

import jax
import numpy as np
import pytest

import eigenstream as es
import oracles
from data import scaled
from eigenstream.core import host_batches, players
from eigenstream.solvers import Paper


@pytest.mark.parametrize(
    ("n", "least", "sizes"), [(300, 1, [256, 32, 8, 4]), (300, 6, [256, 32, 12]), (6, 6, [6]), (7, 6, [7]), (1, 1, [1])]
)
def test_blocks_of_powers_of_two_lose_no_row(n, least, sizes):
    assert host_batches.in_powers_of_two(n, least) == sizes
    x = np.arange(n)
    np.testing.assert_array_equal(np.concatenate(list(host_batches.cut(x, sizes))), x)


@pytest.mark.usefixtures("x64")
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
        found = oracles.batch_products(problem, near, V)
    oracles.assert_products(found, V, A, B, tol=1e-5)
    assert problem.pilot((far - 1e5, batch[1])) is None
    assert es.problems.cca(center=False).pilot(batch) is None
    assert es.problems.lda(2).pilot((far, np.zeros(200, int))) is not None


@pytest.mark.parametrize("name", ["pca", "ica", "lda"])
def test_a_far_mean_changes_nothing_in_float32(name):
    """Deviations in 64ths stay exact beside 65536 and beside 0, so only the arithmetic can tell the two apart."""
    X = (np.round(64 * scaled(400, 4)) / 64).astype(np.float32)
    labels = (X[:, 0] > 0).astype(int)
    problem = es.problems.lda(2) if name == "lda" else getattr(es.problems, name)()
    results = []
    for offset in (0, 65536):
        rows = [(x + np.float32(offset), y) for x, y in zip(np.split(X, 8), np.split(labels, 8), strict=True)]
        batches = rows if name == "lda" else [x for x, _ in rows]
        results.append(es.solve(problem, batches, 1, solver=Paper(learning_rate=1e-3), max_epochs=2))
    np.testing.assert_allclose(results[1].V, results[0].V, rtol=2e-3, atol=2e-4)

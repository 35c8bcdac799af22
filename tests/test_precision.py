"""Products in fewer digits, by one setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from eigenstream.core import players, precision, views

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(64, d)), jnp.float32) for d in (30, 20))
V = tuple(jnp.asarray(RNG.normal(size=(4, d)), jnp.float32) for d in (30, 20))


def test_bf16_rounds_the_operands_and_sums_in_float32():
    with precision.scope("bf16"):
        found = views.project(X, V[0])
    rounded = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (V[0], X))
    v, x = rounded
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, v @ x.T, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(found) - np.asarray(V[0], np.float64) @ np.asarray(X, np.float64).T).max() > 1e-3


def test_programs_are_compiled_for_each_precision():
    product = jax.jit(lambda a, b: players.gram(a, b))
    exact = product(V[0], V[0])
    with precision.scope("bf16"):
        rounded = product(V[0], V[0])
    assert np.abs(np.asarray(exact - rounded)).max() > 1e-4
    np.testing.assert_array_equal(product(V[0], V[0]), exact)


@pytest.mark.parametrize("solver", [es.solvers.Game(rank=32), es.solvers.Paper(learning_rate=0.03)])
def test_answers_differ_by_rounding_only(solver):
    scale = np.linspace(3, 1, 40)
    batches = [RNG.normal(size=(100, 40)).astype("f4") * scale for _ in range(100)]
    spans = [es.solve(es.problems.pca(), batches, 3, solver, precision=p).V for p in ("float32", "bf16", "tf32", None)]
    assert 0 < es.metrics.subspace_error(spans[1], spans[0]) < 5e-3
    np.testing.assert_array_equal(spans[0], spans[2])
    np.testing.assert_array_equal(spans[0], spans[3])


def test_estimators_take_a_precision_and_name_a_wrong_one():
    rows_ = np.asarray(X)
    plain, rounded = (
        es.PCA(2, solver=es.solvers.Game(rank=4), precision=p).fit(rows_).components_ for p in (None, "bf16")
    )
    assert 0 < np.abs(plain - rounded).max() < 0.1
    with pytest.raises(ValueError, match="precision='fp8': give one of 'float32', 'tf32', 'bf16'"):
        es.solve(es.problems.pca(), [rows_], 2, precision="fp8")

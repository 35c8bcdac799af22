"""Sketches, whole second moments and diagonals in the place of B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, POWER, batched
from eigenstream.solvers.game.preconditioner import Diagonal, Sketch, Whole


def learned(kind, X, parts, *arguments):
    """A preconditioner that observed the rows in several parts, and was updated after each."""
    block = kind.empty(jax.ShapeDtypeStruct(X.shape[1:], jnp.float32), *arguments)
    for part in np.split(X, parts):
        block = block.observe(jnp.asarray(part), np.inf)
        block = block.update() if kind is Sketch else block
    return block


def rows(n, deviations, seed=0):
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(len(deviations), len(deviations))))[0]
    return (rng.normal(size=(n, len(deviations))) * deviations @ Q).astype("f4")


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_whole_moments_are_inverted(ridge):
    X = rows(4000, np.linspace(3, 0.3, 20)) * np.logspace(-3, 3, 20).astype("f4")
    G = np.random.default_rng(1).normal(size=(3, 20)).astype("f4")
    C = X.T.astype(float) @ X / len(X)
    C += ridge * np.trace(C) / 20 * np.eye(20)
    scale = np.sqrt(np.diag(C))
    found = np.asarray(learned(Whole, X, 8, ridge).solver(True)(jnp.asarray(G))) * scale
    np.testing.assert_allclose(found, np.linalg.solve(C, G.T).T * scale, rtol=2e-3, atol=1e-3 * abs(found).max())


def test_a_sketch_finds_the_leading_directions_and_solves_like_its_matrix():
    X = rows(4000, np.r_[5, 4, 3, np.full(27, 0.1)])
    sketch = learned(Sketch, X, 8, 3, 0.0)
    U = np.asarray(sketch.U)
    assert np.abs(U @ U.T - np.eye(3)).max() < 1e-5
    standard = X / X.std(0)
    leading = np.linalg.eigh(standard.T @ standard / len(X))[1][:, -3:]
    assert np.linalg.svd(leading.T @ U.T, compute_uv=False).min() > 0.999
    # P has the variances of the rows along these directions.
    deviations = np.sqrt(np.asarray(sketch.squares))
    found = np.asarray(sketch.solver(True)(jnp.asarray(U * deviations))) * deviations
    variances = ((standard @ U.T) ** 2).mean(0)
    np.testing.assert_allclose(found * variances[:, None], U, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sketch, (4, 0.0))])
def test_units_of_the_columns_do_not_matter(kind, arguments):
    X, units = rows(2000, np.linspace(2, 0.2, 24)), 2.0 ** np.random.default_rng(0).integers(-10, 10, 24)
    G = np.random.default_rng(1).normal(size=(2, 24)).astype("f4")
    plain = learned(kind, X, 4, *arguments).solver(False)(jnp.asarray(G))
    scaled = learned(kind, (X * units).astype("f4"), 4, *arguments).solver(False)(jnp.asarray((G * units).astype("f4")))
    np.testing.assert_allclose(np.asarray(scaled) * units, np.asarray(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sketch, (4, 0.0))])
def test_a_column_that_few_rows_touch_counts_as_larger(kind, arguments):
    """Otherwise one such row would decide a move."""
    calm = rows(4000, np.ones(12))
    rare = calm.copy()
    rare[:, 0] *= 30 * (np.random.default_rng(0).uniform(size=4000) < 1e-3)
    e = jnp.eye(12)[:1]

    def moved(X):
        return float(learned(kind, X, 4, *arguments).solver(False)(e)[0, 0] * (X[:, 0] ** 2).mean())

    assert moved(rare) < 0.1 * moved(calm)


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sketch, (4, 0.0))])
def test_columns_without_values_and_few_rows_are_finite(kind, arguments):
    X = rows(6, np.ones(12))
    X[:, 5] = 0
    block = learned(kind, X, 1, *arguments)
    for exactly in (False, True):
        assert np.isfinite(np.asarray(block.solver(exactly)(jnp.ones((1, 12))))).all()


def test_leverages_of_a_sample_are_those_of_new_rows():
    """A row's own part in the second moments is taken out."""
    X = rows(600, np.ones(100))
    block = learned(Whole, X, 1, 0.0)
    assert 0.8 < float(block.leverages(block.solver(True)).mean()) / (100 / (1 - 100 / 600)) < 1.2


def test_a_diagonal_is_finite_where_no_row_had_a_value():
    metric = Diagonal(jnp.array([1.0, 0.0]), jnp.array(4.0), jnp.array(1.0))
    assert np.isfinite(np.asarray(metric.solver(False)(jnp.ones((1, 2))))).all()


@pytest.mark.slow
def test_sketches_go_on_learning_with_a_half_life():
    solver = es.solvers.Game(rank=32)
    later = [v * np.float32(3) for v in POWER]
    stream = batched(POWER) + batched(later)
    for half_life, least in ((500, 8.0), (None, 4.0)):
        result = es.solve(es.problems.cca(), stream, 2, solver, half_life=half_life, memory_budget=1)
        squares = np.asarray(result.state.metric[0].squares).mean() / (POWER[0] ** 2).mean()
        assert least < squares < 9.5
    assert GAME["memory_budget"] == 1

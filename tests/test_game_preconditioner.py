"""Samples of rows, whole second moments and diagonals in the place of B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, POWER, batched
from eigenstream.solvers.game.preconditioner import PROBES, Diagonal, Sample, Whole


def learned(kind, X, parts, *arguments):
    """A preconditioner that observed the rows in several parts."""
    block = kind.empty(jax.ShapeDtypeStruct(X.shape[1:], jnp.float32), *arguments)
    for part in np.split(X, parts):
        block = block.observe(jnp.asarray(part), np.inf)
    return block


def solved(block, G, exactly=False):
    return np.asarray(block.factor(exactly)[0](jnp.asarray(G)))


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
    found = solved(learned(Whole, X, 8, ridge), G, True) * scale
    np.testing.assert_allclose(found, np.linalg.solve(C, G.T).T * scale, rtol=2e-3, atol=1e-3 * abs(found).max())


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_a_sample_solves_like_its_matrix(ridge):
    """P = D (Zᵀ Z / r + δ I) D, with δ from what rows have outside the span of the others."""
    X = rows(400, np.r_[5, 4, 3, np.full(57, 0.3)])
    sample = learned(Sample, X, 8, 40, ridge)
    G = np.random.default_rng(1).normal(size=(3, 60)).astype("f4")
    Z = np.asarray(sample.Z, float)
    inverse = np.linalg.inv(Z @ Z.T)
    np.testing.assert_allclose(sample.inner, Z @ Z.T, rtol=1e-4, atol=1e-3)
    scale, share = sample._scale()
    for exactly, counted in ((True, 60 - 40), (False, 40 / 8)):
        delta = (1 / np.diag(inverse)).mean() / counted + share
        P = Z.T @ Z / 40 + float(delta) * np.eye(60)
        expected = np.linalg.solve(P, (G * scale).T).T * scale
        np.testing.assert_allclose(solved(sample, G, exactly), expected, rtol=0.01, atol=2e-3 * abs(expected).max())


def test_a_sample_is_renewed_as_rows_come():
    X = rows(2000, np.ones(30))
    first, later = (learned(Sample, X[:n], n // 40, 80, 0.0) for n in (80, 2000))
    assert int(first.held) == int(later.held) == 80
    assert not np.isclose(np.asarray(later.Z), np.asarray(first.Z)).all(1).any()


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sample, (16, 0.0))])
def test_units_of_the_columns_do_not_matter(kind, arguments):
    X, units = rows(2000, np.linspace(2, 0.2, 24)), 2.0 ** np.random.default_rng(0).integers(-10, 10, 24)
    G = np.random.default_rng(1).normal(size=(2, 24)).astype("f4")
    plain = solved(learned(kind, X, 4, *arguments), G)
    scaled = solved(learned(kind, (X * units).astype("f4"), 4, *arguments), (G * units).astype("f4"))
    np.testing.assert_allclose(scaled * units, plain, rtol=1e-3, atol=1e-3 * abs(plain).max())


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sample, (16, 0.0))])
def test_a_column_that_few_rows_touch_counts_as_larger(kind, arguments):
    """Otherwise one such row would decide a move."""
    calm = rows(1000, np.ones(100))
    rare = calm.copy()
    rare[:, 0] = 30 * (np.arange(1000) == 321)
    e = jnp.eye(100)[:1]

    def moved(X):
        return float(solved(learned(kind, X, 10, *arguments), e)[0, 0] * (X[:, 0] ** 2).mean())

    assert moved(rare) < 0.1 * moved(calm)


@pytest.mark.parametrize(("kind", "arguments"), [(Whole, (0.0,)), (Sample, (16, 0.0))])
def test_columns_without_values_and_few_rows_are_finite(kind, arguments):
    X = rows(6, np.ones(12))
    X[:, 5] = 0
    block = learned(kind, X, 1, *arguments)
    for exactly in (False, True):
        assert np.isfinite(solved(block, np.ones((1, 12)), exactly)).all()


def test_leverages_are_those_of_new_rows():
    """κ = E[h²] / E[h] of rows that P does not hold; of Gaussian rows about the dimension."""
    X = rows(6000, np.ones(60))
    whole = learned(Whole, X[:3000], 4, 0.0).factor(True)[2]
    probes = np.asarray(whole.probes, float)
    assert probes.shape == (PROBES, 60)
    assert 0.8 < np.trace(probes @ (X.T @ X / len(X)) @ probes.T) / PROBES / 60 < 1.2
    assert 0.8 < float(whole.observe(jnp.asarray(X[3000:]), np.inf).factor(True)[1]) / 62 < 1.2
    wide = rows(6000, np.r_[np.full(20, 3.0), np.full(180, 0.1)])
    sample = learned(Sample, wide, 60, 150, 0.0)
    h = (wide[:500] * solved(sample, wide[:500])).sum(1)
    assert 0.7 < float(sample.factor(False)[1]) / ((h**2).mean() / h.mean()) < 1.4


def test_a_diagonal_is_finite_where_no_row_had_a_value():
    metric = Diagonal(jnp.array([1.0, 0.0]), jnp.array(4.0), jnp.array(1.0))
    assert np.isfinite(np.asarray(metric.solver()(jnp.ones((1, 2))))).all()


@pytest.mark.slow
def test_samples_go_on_learning_with_a_half_life():
    solver = es.solvers.Game(rank=32)
    later = [v * np.float32(3) for v in POWER]
    stream = batched(POWER) + batched(later)
    for half_life, least in ((500, 8.0), (None, 4.0)):
        result = es.solve(es.problems.cca(), stream, 2, solver, half_life=half_life, memory_budget=1)
        squares = np.asarray(result.state.metric[0].squares).mean() / (POWER[0] ** 2).mean()
        assert least < squares < 9.5
    assert GAME["memory_budget"] == 1

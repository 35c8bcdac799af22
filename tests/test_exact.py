"""The exact solver: singular B, small variances, one answer whatever the batches."""

import jax
import numpy as np
import pytest

import eigenstream as es
import oracles
from data import FEW, scaled


def redundant(n=500, dtype=np.float64):
    """Ten columns of rank six: a constant, two duplicates and a sum, in very different units."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(n, 6)) @ rng.normal(size=(6, 6))
    X = np.c_[base, np.full(n, 7.0), base[:, 0], 2 * base[:, 1], base[:, 2] + base[:, 3]]
    return (X * np.geomspace(1e-3, 1e3, 10)).astype(dtype), base, rng.normal(size=(n, 4)) + base[:, :4]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_singular_b_is_solved_on_its_range(dtype):
    X, base, Y = redundant(dtype=dtype)
    clean = es.solve(es.problems.cca(), [(base, Y)], 4)
    found = es.solve(es.problems.cca(), [(X, Y.astype(dtype))], 4)
    tolerance = 1e-4 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(found.eigenvalues, clean.eigenvalues, atol=tolerance)
    assert "rank 10 of 14" in found.message
    assert np.isfinite(found.V).all()
    _, B = oracles.views([X.astype(np.float64), Y.astype(dtype).astype(np.float64)])
    np.testing.assert_allclose(found.V.T @ B @ found.V, np.eye(4), atol=10 * tolerance)
    with pytest.raises(ValueError, match=r"k=9 is too large: B has ranks \[6, 6\].*at most 6, or a ridge"):
        es.solve(es.problems.cca(), [(X[:, :9], X)], 9)


@pytest.mark.parametrize("name", ["cca", "lda", "ica"])
def test_small_variances_of_float32_rows_count(name):
    """In float32 sums, variances below √d ε ≈ 10⁻⁶ would be lost."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    X = (rng.laplace(size=(4000, 30)) / 10.0 ** np.arange(0, 4.5, 0.15) @ turn).astype(np.float32)
    Y = (X @ rng.normal(size=(30, 30)) + 0.01 * rng.normal(size=(4000, 30))).astype(np.float32)
    labels = rng.integers(0, 31, 4000)
    problem, batch, k = {
        "cca": (es.problems.cca(), (X, Y), 30),
        "lda": (es.problems.lda(31), (X, labels), 30),
        "ica": (es.problems.ica(), X, 30),
    }[name]
    wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch)
    found, exact = (es.solve(problem, [b], k, "exact").eigenvalues for b in (batch, wide))
    np.testing.assert_allclose(found, exact, atol=1e-8 * abs(exact).max())


def test_rounding_errors_of_dependent_columns_do_not_count():
    """At a mean of ten standard deviations, rounding errors are ten times larger relative to them."""
    rng = np.random.default_rng(0)
    base = 10 + rng.normal(size=(3000, 4)).astype(np.float32)
    X = np.c_[base, base @ rng.uniform(size=(4, 3)).astype(np.float32)]
    Y = rng.normal(size=(3000, 5)).astype(np.float32)
    assert X.dtype == np.float32
    assert "rank 9 of 12" in es.solve(es.problems.cca(), [(X, Y)], 2).message


def test_fewer_rows_than_columns():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(20, 30)), rng.normal(size=(20, 25))
    result = es.solve(es.problems.cca(), [(X, Y)], 3)
    np.testing.assert_allclose(result.eigenvalues, 1, atol=1e-9)
    assert "rank 38 of 55" in result.message
    ridged = es.solve(es.problems.cca(ridge=0.5), [(X, Y)], 3)
    np.testing.assert_allclose(ridged.eigenvalues, oracles.leading(*oracles.views([X, Y], ridge=0.5), 3)[0], atol=1e-9)


def test_order_of_batches_does_not_matter_beyond_rounding():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(1000, 6)), rng.normal(size=(1000, 4))
    pieces = [(X[i : i + 77], Y[i : i + 77]) for i in range(0, 1000, 77)]
    a, b = es.solve(es.problems.cca(), pieces, 3), es.solve(es.problems.cca(), pieces[::-1], 3)
    np.testing.assert_allclose(a.eigenvalues, b.eigenvalues, rtol=1e-12)
    np.testing.assert_allclose(a.V, b.V, atol=1e-10)


def test_exact_is_float64_without_the_global_setting():
    assert not jax.config.jax_enable_x64
    X = np.random.default_rng(0).normal(size=(500, 8))
    result = es.solve(es.problems.pca(), [X], 8)
    np.testing.assert_allclose(result.eigenvalues, np.linalg.eigvalsh(np.cov(X.T))[::-1], rtol=1e-13)
    assert result.V.dtype == np.float64


def test_a_half_life_weighs_rows_by_their_age():
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(3000, 3)) * np.linspace(1, 3, 3000)[:, None]).astype("f4")
    result = es.solve(es.problems.pca(), np.split(X, 30), k=3, half_life=400.0, solver="exact")
    weights = 0.5 ** (np.arange(3000)[::-1] / 400)
    centred = X - weights @ X / weights.sum()
    C = centred.T @ (centred * weights[:, None]) / (weights.sum() - 1)
    # Fifty rows are added at a time, and count alike.
    np.testing.assert_allclose(result.eigenvalues, np.linalg.eigvalsh(C)[::-1], rtol=5e-3)
    assert result.n_samples_seen == 3000
    with pytest.raises(ValueError, match="cannot fade"):
        es.solve(es.problems.ica(), np.split(X, 30), k=1, half_life=400.0, solver="exact")


def test_exact_reads_once_and_counts_rows_once():
    result = es.solve(es.problems.pca(), np.split(scaled(), 10), 2, max_epochs=5)
    assert result.n_samples_seen == 1000
    assert result.message == "solved exactly from 1000 rows in 1 pass"
    assert result.converged


@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_constant_and_duplicate_columns_and_a_batch_of_two(solver):
    X, Y = FEW, FEW[:, :3]
    wide = np.c_[X, X[:, :1], np.ones(50)]
    result = es.solve(es.problems.cca(), [(wide[i : i + 4], Y[i : i + 4]) for i in range(0, 48, 4)], 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert np.isfinite(result.eigenvalues).all()
    pairs = [X[i : i + 2] for i in range(0, 50, 2)]
    assert np.isfinite(es.solve(es.problems.pca(), pairs, 4, solver=solver).V).all()


@pytest.mark.parametrize("scale", [2.0**100, 2.0**130, 2.0**330, 2.0**460])
def test_residuals_do_not_overflow(scale):
    """The rows can be squared, and not the squares of their covariance."""
    plain, large = (es.solve(es.problems.pca(), [x], 2, "exact") for x in (FEW, scale * FEW))
    np.testing.assert_allclose(large.eigenvalues / scale**2, plain.eigenvalues, rtol=1e-12)
    assert (large.residuals > 0).all()
    assert (large.residuals < 1e-14).all()


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("value", [1e40, 1e100, 1e140])
def test_residuals_of_a_large_column_that_is_constant_within_classes(value, ridge):
    rng, labels = np.random.default_rng(0), np.arange(600) % 3
    X = np.c_[value * labels, rng.normal(size=(600, 5))]
    result = es.solve(es.problems.lda(3, ridge=ridge), [(X, labels)], 1, "exact")
    assert result.residuals[0] < 1e-12


def test_classes_too_far_apart_to_square_are_refused():
    labels = np.arange(600) % 3
    X = np.c_[1e200 * labels, np.random.default_rng(0).normal(size=(600, 5))]
    with pytest.raises(ValueError, match="too large to square"):
        es.solve(es.problems.lda(3), [(X, labels)], 1, "exact")


def test_means_too_large_to_square_are_refused():
    X = np.c_[np.full(50, 2.0**600), FEW]
    with pytest.raises(ValueError, match="too large to square"):
        es.PCA(n_components=2, center=False).fit(X)


def test_rows_too_large_to_sum_leave_earlier_rows_as_they_are():
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(4500, 60)), rng.normal(size=(9000, 60))
    B[-2:, 0] = 1.7e308
    model = es.PCA(n_components=2).partial_fit(A)
    with pytest.raises(ValueError, match="too large to square"):
        model.partial_fit(B)
    np.testing.assert_allclose(model.eigenvalues_, es.PCA(n_components=2).fit(A).eigenvalues_, rtol=1e-12)
    assert model.n_samples_seen_ == 4500

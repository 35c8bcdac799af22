"""The exact solver: sums that lose nothing, singular B, one pass or two."""

import jax
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
import oracles
from eigenstream.core.moments import BLOCK_ROWS, Moments


def summed(moments, pieces, labels=None):
    for i, piece in enumerate(pieces):
        moments = moments.add(piece, None if labels is None else labels[i])
    return moments


def batches(X, size):
    return [X[i : i + size] for i in range(0, len(X), size)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_of_a_million_with_unit_variance_loses_nothing(dtype):
    """Against the covariance of the very same rounded rows in extended precision."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(20_000, 5)) @ rng.normal(size=(5, 5)) + 1e6 * rng.uniform(0.5, 1, 5)).astype(dtype)
    exact = np.longdouble(X) - np.longdouble(X).mean(0)
    wanted = np.asarray(exact.T @ exact / (len(X) - 1), np.float64)
    moments = summed(Moments.empty(5), batches(X, 700))
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    assert np.abs(moments.covariance() - wanted).max() < tolerance * np.abs(wanted).max()
    lam = es.solve(es.problems.pca(), batches(X, 700), 5).eigenvalues
    np.testing.assert_allclose(lam, np.linalg.eigvalsh(wanted)[::-1], atol=tolerance * np.abs(wanted).max())


def test_a_mean_that_drifts_far_loses_nothing():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40_000, 3)) + np.linspace(-1e6, 1e6, 40_000)[:, None] * [0, 0, 1]
    found = summed(Moments.empty(3), batches(X, 1000)).covariance()
    np.testing.assert_allclose(found, np.cov(X.T), rtol=1e-9, atol=1e-6)


def test_classes_a_million_apart_keep_their_scatter():
    rng = np.random.default_rng(0)
    y = np.arange(9000) % 3
    X = (rng.normal(size=(9000, 4)) + 1e4 * y[:, None]).astype(np.float32)
    moments = summed(Moments.empty(4, 3), batches(X, 500), batches(y, 500))
    rows = X.astype(np.float64)
    within = sum((g := rows[y == c] - rows[y == c].mean(0)).T @ g for c in range(3))
    np.testing.assert_allclose(moments.scatter, within, rtol=1e-5, atol=1e-5 * within.max())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 1000))
def test_moments_do_not_depend_on_how_rows_are_batched(sizes, seed):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    X, y = rng.normal(size=(n, 3)) + 100, rng.integers(0, 2, n)
    ends = np.cumsum(sizes)[:-1]
    whole = Moments.empty(3, 2).add(X, y)
    parts = Moments.empty(3, 2)
    for x, labels in zip(np.split(X, ends), np.split(y, ends), strict=True):
        parts = parts.add(x, labels)
    np.testing.assert_allclose(parts.scatter, whole.scatter, rtol=1e-9, atol=1e-9)
    seen = whole.counts > 0
    np.testing.assert_allclose((parts.means + parts.pilot)[seen], (whole.means + whole.pilot)[seen], rtol=1e-12)
    sparse = Moments.empty(3, 2).add(scipy.sparse.csr_matrix(X), y)
    np.testing.assert_allclose(sparse.scatter, whole.scatter, rtol=1e-6, atol=1e-6)


def test_blocks_larger_than_one_block_and_mixed_kinds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2 * BLOCK_ROWS + 17, 3))
    found = summed(Moments.empty(3), [X[:50], scipy.sparse.csr_matrix(X[50:90]), X[90:]])
    np.testing.assert_allclose(found.covariance(), np.cov(X.T), rtol=1e-10, atol=1e-12)
    assert found.n == len(X)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_views_side_by_side_are_one_matrix(offset):
    """The products of parts, with and without a pilot, are those of the rows they make together."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3 * BLOCK_ROWS, 7)) @ rng.normal(size=(7, 7)) + offset * np.arange(7)
    parts, whole = (summed(Moments.empty(7), pieces) for pieces in (
        [[x[:, :2], x[:, 2:3], x[:, 3:]] for x in batches(X, 5000)], batches(X, 5000)))  # fmt: skip
    np.testing.assert_allclose(parts.covariance(), np.cov(X.T), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(parts.covariance(), whole.covariance(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(parts.group_means(), X.mean(0)[None], rtol=1e-12)


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
    """Their sums are in float64: in float32 they would drown below √d ε, a variance of 10⁻⁶."""
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


def test_what_rounding_leaves_of_dependent_float32_features_does_not_count():
    """Ten deviations from zero, rounding is ten times as large beside them."""
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


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_ica_from_either_end_and_by_magnitude(which):
    rng = np.random.default_rng(0)
    S = np.c_[rng.laplace(size=4000), rng.uniform(-1, 1, 4000), rng.normal(size=4000), rng.standard_t(8, 4000)]
    X = S @ rng.normal(size=(4, 4))
    lam = scipy.linalg.eigh(*oracles.ica(X), eigvals_only=True)
    key = {"largest": -lam, "smallest": lam, "magnitude": -np.abs(lam)}[which]
    result = es.solve(es.problems.ica(), [X], 3, which=which)
    np.testing.assert_allclose(result.eigenvalues, lam[np.argsort(key)[:3]], rtol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_ica_in_one_pass_equals_two(offset):
    rng = np.random.default_rng(0)
    X = rng.laplace(size=(3000, 17)) @ rng.normal(size=(17, 17)) + offset
    lam = scipy.linalg.eigh(*oracles.ica(X), eigvals_only=True)[::-1]
    pieces = batches(X, 400)
    two, one = (es.solve(es.problems.ica(), source, 17) for source in (pieces, iter(pieces)))
    np.testing.assert_allclose(two.eigenvalues, lam, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(one.eigenvalues, lam, rtol=1e-8, atol=1e-8)
    assert "2 passes" in two.message
    assert "1 pass" in one.message


def test_ica_in_one_pass_says_where_it_ends():
    wide = np.random.default_rng(0).normal(size=(300, 129))
    with pytest.raises(ValueError, match=r"129.*single pass.*read twice.*center=False"):
        es.solve(es.problems.ica(), iter([wide]), 2)
    centred = wide - wide.mean(0)
    by_promise = es.solve(es.problems.ica(center=False), iter([centred]), 2)
    np.testing.assert_allclose(by_promise.eigenvalues, es.solve(es.problems.ica(), [wide], 2).eigenvalues, rtol=1e-9)


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


def test_block_structure_of_b_gives_what_the_whole_does():
    from eigenstream.core.ritz import solve_dense

    rng = np.random.default_rng(0)
    A, B = oracles.views([rng.normal(size=(200, 5)), rng.normal(size=(200, 4))])
    whole, blocks = solve_dense(A, B, 3, "largest", 1e-12), solve_dense(A, B, 3, "largest", 1e-12, [5, 4])
    np.testing.assert_allclose(whole.eigenvalues, blocks.eigenvalues, rtol=1e-10)
    dense_b = B + 0.01
    wrong_blocks = solve_dense(A, dense_b, 3, "largest", 1e-12, [5, 4])
    np.testing.assert_allclose(wrong_blocks.eigenvalues, oracles.leading(A, dense_b, 3)[0], rtol=1e-10)


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

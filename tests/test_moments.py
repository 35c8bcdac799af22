"""Sums of rows: no digit is lost, however the rows come."""

import jax
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
from data import scaled
from eigenstream.core import host_batches
from eigenstream.core.moments import BLOCK_ROWS, Moments, Summary

X = scaled()


def summed(moments, pieces, labels=None):
    for i, piece in enumerate(pieces):
        moments = moments.add(piece, None if labels is None else labels[i])
    return moments


def scatter(moments, divisor=1.0):
    """The whole scatter: one triangle of the array is unused."""
    return moments.panel(0, len(moments.pilot), divisor)


def covariance(moments):
    return scatter(moments, moments.n - len(moments.counts))


def batches(X, size):
    return [X[i : i + size] for i in range(0, len(X), size)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_of_a_million_with_unit_variance_loses_nothing(dtype):
    """Against the covariance of the same rounded rows in extended precision."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(20_000, 5)) @ rng.normal(size=(5, 5)) + 1e6 * rng.uniform(0.5, 1, 5)).astype(dtype)
    exact = np.longdouble(X) - np.longdouble(X).mean(0)
    wanted = np.asarray(exact.T @ exact / (len(X) - 1), np.float64)
    moments = summed(Moments.empty(5), batches(X, 700))
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    assert np.abs(covariance(moments) - wanted).max() < tolerance * np.abs(wanted).max()
    lam = es.solve(es.problems.pca(), batches(X, 700), 5).eigenvalues
    np.testing.assert_allclose(lam, np.linalg.eigvalsh(wanted)[::-1], atol=tolerance * np.abs(wanted).max())


def test_a_mean_that_drifts_far_loses_nothing():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40_000, 3)) + np.linspace(-1e6, 1e6, 40_000)[:, None] * [0, 0, 1]
    found = covariance(summed(Moments.empty(3), batches(X, 1000)))
    np.testing.assert_allclose(found, np.cov(X.T), rtol=1e-9, atol=1e-6)


def test_classes_a_million_apart_keep_their_scatter():
    rng = np.random.default_rng(0)
    y = np.arange(9000) % 3
    X = (rng.normal(size=(9000, 4)) + 1e4 * y[:, None]).astype(np.float32)
    moments = summed(Moments.empty(4, 3), batches(X, 500), batches(y, 500))
    rows = X.astype(np.float64)
    within = sum((g := rows[y == c] - rows[y == c].mean(0)).T @ g for c in range(3))
    np.testing.assert_allclose(scatter(moments), within, rtol=1e-5, atol=1e-5 * within.max())


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
    np.testing.assert_allclose(scatter(parts), scatter(whole), rtol=1e-9, atol=1e-9)
    seen = whole.counts > 0
    np.testing.assert_allclose((parts.means + parts.pilot)[seen], (whole.means + whole.pilot)[seen], rtol=1e-12)
    sparse = Moments.empty(3, 2).add(scipy.sparse.csr_matrix(X), y)
    np.testing.assert_allclose(scatter(sparse), scatter(whole), rtol=1e-6, atol=1e-6)


def test_dense_and_sparse_blocks_are_summed_alike():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2 * BLOCK_ROWS + 17, 3))
    found = summed(Moments.empty(3), [X[:50], scipy.sparse.csr_matrix(X[50:90]), X[90:]])
    np.testing.assert_allclose(covariance(found), np.cov(X.T), rtol=1e-10, atol=1e-12)
    assert found.n == len(X)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_views_side_by_side_are_one_matrix(offset):
    """The products of parts, with and without a pilot, are those of the rows they make together."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3 * BLOCK_ROWS, 7)) @ rng.normal(size=(7, 7)) + offset * np.arange(7)
    parts, whole = (summed(Moments.empty(7), pieces) for pieces in (
        [[x[:, :2], x[:, 2:3], x[:, 3:]] for x in batches(X, 5000)], batches(X, 5000)))  # fmt: skip
    np.testing.assert_allclose(covariance(parts), np.cov(X.T), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(covariance(parts), covariance(whole), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(parts.group_means(), X.mean(0)[None], rtol=1e-12)


@pytest.mark.parametrize("constant", [0.1, 0.3, 7.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_sparse_column_does_not_count(dtype, constant):
    left = np.c_[X[:, :3], np.full(len(X), constant)].astype(dtype)
    right = X[:, 3:].astype(dtype)
    thin = [
        (scipy.sparse.csr_matrix(left[i : i + 300]), scipy.sparse.csr_matrix(right[i : i + 300]))
        for i in range(0, 1000, 300)
    ]
    sparse, dense = es.solve(es.problems.cca(), thin, 2), es.solve(es.problems.cca(), [(left, right)], 2)
    np.testing.assert_allclose(sparse.eigenvalues, dense.eigenvalues, rtol=1e-4)
    assert "rank 5 of 6" in sparse.message
    assert "rank 5 of 6" in dense.message


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_trace_alone_is_that_of_the_whole_scatter(groups, sparse):
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(900, 12)) + 3, rng.integers(0, 3, 900) if groups > 1 else None
    rows = scipy.sparse.csr_array(rows * (rng.random(rows.shape) < 0.2)) if sparse else rows
    whole, trace, other = (Moments.empty(12, groups, trace_alone=alone) for alone in (False, True, True))
    for lo in range(0, 900, 200):
        part = rows[lo : lo + 200], None if labels is None else labels[lo : lo + 200]
        whole = whole.add(*part)
        trace, other = (trace.add(*part), other) if lo < 400 else (trace, other.add(*part))
    trace = trace.merged(other)
    assert trace.scatter.shape == ()
    np.testing.assert_allclose(trace.total_scatter(), whole.total_scatter(), rtol=1e-12)
    np.testing.assert_allclose(trace.group_means(), whole.group_means(), rtol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_trace_alone_of_sparse_rows_beside_dense_ones(groups):
    rng = np.random.default_rng(0)
    dense, labels = rng.normal(size=(900, 5)) + 1e6, rng.integers(0, 3, 900) if groups > 1 else None
    sparse = scipy.sparse.csr_array(rng.normal(size=(900, 7)) * (rng.random((900, 7)) < 0.2))
    whole = Moments.empty(12, groups).add(np.hstack([dense, sparse.toarray()]), labels)
    for order in (1, -1):
        found = Moments.empty(12, groups, trace_alone=True)
        for lo in range(0, 900, 200):
            rows = host_batches.parts((dense[lo : lo + 200], sparse[lo : lo + 200])[::order])
            found = found.add(rows, None if labels is None else labels[lo : lo + 200])
        np.testing.assert_allclose(found.total_scatter(), whole.total_scatter(), rtol=1e-12)
        expected = np.hstack(np.split(whole.group_means(), [5], axis=1)[::order])
        np.testing.assert_allclose(found.group_means(), expected, rtol=1e-9)
        np.testing.assert_array_equal(found.counts, whole.counts)


def test_a_streaming_solver_sums_sparse_rows_without_making_them_dense(monkeypatch):
    rng = np.random.default_rng(0)
    sparse, dense = (
        scipy.sparse.random_array((400, 30), density=0.1, random_state=0, format="csr"),
        rng.normal(size=(400, 3)) + 5,
    )
    monkeypatch.setattr(scipy.sparse.csr_array, "toarray", None)
    model = es.CCA(2, solver="paper").fit(sparse, dense)
    np.testing.assert_allclose(model.x_mean_, sparse.mean(0), atol=1e-6)
    np.testing.assert_allclose(model.y_mean_, dense.mean(0), rtol=1e-6)


def test_a_summary_holds_what_moments_do():
    rows = np.random.default_rng(0).normal(size=(50, 6)) + 1e6
    template = tuple(jax.ShapeDtypeStruct((size,), np.float32) for size in (2, 4))
    summary = Summary.of(Moments.empty(6, trace_alone=True).add(rows), template)
    again = Summary.of(summary.moments().add(rows), template)
    assert again.counts.tolist() == [100]
    np.testing.assert_allclose(np.hstack(again.means)[0], rows.mean(0), rtol=1e-15)
    np.testing.assert_allclose(again.scatter, 2 * summary.scatter, rtol=1e-7)

"""Rows that are accepted, as which type, and rows that are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
from conftest import check_refused
from data import FEW, X, scaled, spoilt
from eigenstream.solvers import Paper

MISTAKES = {
    "NaN": (lambda: es.solve(es.problems.pca(), [spoilt(FEW)], 2), r"batch holds NaN.*impute"),
    "infinity": (
        lambda: es.solve(es.problems.cca(), [(FEW[:, :3], spoilt(FEW, np.inf))], 2),
        r"batch\[1\] holds NaN or infinity",
    ),
    "NaN in a sparse view": (
        lambda: es.solve(es.problems.pca(), [scipy.sparse.csr_matrix(spoilt(FEW))], 2),
        "batch holds NaN",
    ),
    "NaN later": (lambda: es.solve(es.problems.pca(), [FEW, spoilt(FEW)], 2, solver="paper"), "batch holds NaN"),
    "NaN in the game": (
        lambda: es.solve(es.problems.cca(), [(FEW[:, :3], spoilt(FEW))], 2, solver="game"),
        r"holds NaN or infinity",
    ),
    "complex": (lambda: es.solve(es.problems.pca(), [FEW + 1j], 2), r"complex128.*real"),
    "objects": (lambda: es.solve(es.problems.pca(), [FEW.astype(object)], 2), r"object.*real"),
    "one dimension": (lambda: es.solve(es.problems.pca(), [FEW[:, 0]], 1), r"shape \(50,\).*two dimensions"),
    "unequal rows": (
        lambda: es.solve(es.problems.cca(), [(FEW, FEW[:, :3][:-1])], 2),
        r"unequal numbers of rows.*same sample",
    ),
    "no rows": (lambda: es.solve(es.problems.pca(), [FEW[:0]], 2), "no rows"),
    "no rows in views": (lambda: es.solve(es.problems.cca(), [(FEW[:0], FEW[:, :3][:0])], 2), "no rows"),
    "no array": (lambda: es.solve(es.problems.pca(), [{}], 2), "no array"),
    "NaN on a device": (lambda: es.solve(es.problems.pca(), [jnp.full((9, 2), jnp.nan)], 1), "batch holds NaN"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])


def test_integers_and_booleans_are_taken_as_numbers():
    whole = np.random.default_rng(0).integers(0, 255, (60, 4)).astype(np.uint8)
    for rows in (whole, scipy.sparse.csr_matrix(whole)):
        found = es.solve(es.problems.pca(), [rows], 2).eigenvalues
        np.testing.assert_allclose(found, np.linalg.eigvalsh(np.cov(whole.T))[::-1][:2], rtol=1e-5)
    assert es.solve(es.problems.pca(), [whole > 99], 2, solver="paper").V.shape == (4, 2)


def test_large_integers_keep_their_digits():
    stamps = 1_700_000_000 + np.random.default_rng(0).integers(0, 60, (1000, 2))
    found = es.solve(es.problems.pca(), [stamps], 2).eigenvalues
    np.testing.assert_allclose(found, np.linalg.eigvalsh(np.cov(stamps.T))[::-1], rtol=1e-9)
    streamed = es.solve(es.problems.pca(), np.split(stamps, 10), 2, solver=Paper(learning_rate=1e-4), max_epochs=5)
    np.testing.assert_allclose(streamed.eigenvalues.sum(), found.sum(), rtol=0.05)


@pytest.mark.parametrize("solver", ["exact", Paper(learning_rate=1e-5)])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.longdouble])
def test_other_floats_are_taken_as_float32_or_float64(dtype, solver):
    rows = (30 * X).astype(dtype)
    result = es.solve(es.problems.pca(), np.split(rows, 10), 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert result.V.dtype.itemsize >= 4
    if solver == "exact":
        wanted = np.linalg.eigvalsh(np.cov(rows.astype(np.float64).T))[::-1][:2]
        np.testing.assert_allclose(result.eigenvalues, wanted, rtol=1e-5)


def test_views_as_lists_and_tensors_of_other_libraries():
    torch = pytest.importorskip("torch", reason="PyTorch is an extra")
    X = scaled()
    batches = [[torch.tensor(x[:, :3]), torch.tensor(x[:, 3:])] for x in np.split(X, 10)]
    found = es.solve(es.problems.cca(), batches, 2)
    wanted = es.solve(es.problems.cca(), [(X[:, :3], X[:, 3:])], 2)
    np.testing.assert_allclose(found.eigenvalues, wanted.eigenvalues, rtol=1e-10)

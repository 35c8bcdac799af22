"""PCA against scikit-learn's."""

import numpy as np
import pytest
import scipy.sparse
from sklearn import decomposition
from sklearn.datasets import load_digits

import eigenstream as es
import oracles
from data import X


def test_pca_is_scikit_learns():
    digits = load_digits().data
    ours, theirs = es.PCA(n_components=10).fit(digits), decomposition.PCA(10, svd_solver="full").fit(digits)
    assert isinstance(ours.solver_, es.solvers.Exact)
    assert es.metrics.subspace_error(ours.components_.T, theirs.components_.T) < 1e-6
    for name in ("explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_", "noise_variance_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, err_msg=name)
    oracles.assert_same_up_to_sign(ours.transform(digits), theirs.transform(digits), 1e-7)
    np.testing.assert_allclose(ours.get_covariance(), theirs.get_covariance(), atol=1e-8)
    np.testing.assert_allclose(ours.score_samples(digits), theirs.score_samples(digits), rtol=1e-8)
    np.testing.assert_allclose(ours.get_precision(), theirs.get_precision(), atol=1e-8)
    back = ours.inverse_transform(ours.transform(digits))
    np.testing.assert_allclose(back, theirs.inverse_transform(theirs.transform(digits)), atol=1e-7)
    whole = es.PCA().fit(digits)
    assert whole.components_.shape == (64, 64)
    np.testing.assert_allclose(whole.inverse_transform(whole.transform(digits)), digits, atol=1e-8)
    np.testing.assert_allclose(whole.loadings_ @ whole.loadings_.T, np.cov(digits.T), atol=1e-8)
    few = es.PCA().fit(digits[:20])
    assert few.components_.shape == (20, 64)
    np.testing.assert_allclose(few.explained_variance_ratio_.sum(), 1)
    white = es.PCA(n_components=5, whiten=True).fit(digits)
    np.testing.assert_allclose(np.cov(white.transform(digits).T), np.eye(5), atol=1e-8)
    np.testing.assert_allclose(white.inverse_transform(white.transform(digits)), es.PCA(n_components=5).fit(digits)
                               .inverse_transform(es.PCA(n_components=5).fit_transform(digits)), atol=1e-8)  # fmt: skip


def test_pca_of_uncentred_sparse_and_single_precision_rows():
    model = es.PCA(n_components=3, center=False).fit(X)
    lam, _ = oracles.leading(X.T @ X / 600, np.eye(7), 3)
    np.testing.assert_allclose(model.explained_variance_, lam, rtol=1e-10)
    np.testing.assert_allclose(model.explained_variance_ratio_, lam / (X**2).sum() * 600, rtol=1e-10)
    np.testing.assert_array_equal(model.mean_, 0)
    S = scipy.sparse.random_array((500, 40), density=0.1, random_state=0, format="csr")
    np.testing.assert_allclose(
        es.PCA(n_components=4).fit(S).transform(S),
        es.PCA(n_components=4).fit(S.toarray()).transform(S.toarray()),
        atol=1e-8,
    )
    assert es.PCA(n_components=2).fit_transform(X.astype(np.float32)).dtype == np.float32


def test_half_precision_rows_are_projected_in_full_precision():
    few = np.random.default_rng(0).normal(size=(7, 9))
    rows = (3000 * X).astype(np.float16)
    model = es.PCA(n_components=2).fit(rows)
    np.testing.assert_allclose(model.transform(rows), model.transform(rows.astype(np.float64)))
    assert np.isfinite(model.score_samples(rows)).all()
    assert np.isfinite(es.PCA().fit(few[:4]).score(few[4:]))


@pytest.mark.slow
@pytest.mark.skipif(not (es.datasets.folder() / "mnist.npz").exists(), reason="mnist.npz is not in the data folder")
def test_pca_of_mnist_is_scikit_learns():
    images = es.datasets.mnist()["x_train"][:20_000].reshape(20_000, -1).astype(np.float64) / 255
    theirs = decomposition.PCA(32, svd_solver="covariance_eigh").fit(images)
    ours = es.PCA(n_components=32).fit(images.astype(np.float32))
    assert es.metrics.subspace_error(ours.components_.T, theirs.components_.T) < 1e-6
    np.testing.assert_allclose(ours.explained_variance_, theirs.explained_variance_, rtol=1e-5)

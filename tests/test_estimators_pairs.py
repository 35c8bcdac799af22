"""CCA and PLS against dense answers and scikit-learn's."""

import numpy as np
import pytest
from sklearn import cross_decomposition

import eigenstream as es
import oracles
from data import X, Y


def test_cca_is_exact_cca():
    A, B = oracles.views([X, Y])
    lam, _ = oracles.leading(A, B, 5)
    cca = es.CCA().fit(X, Y)
    np.testing.assert_allclose(cca.correlations_, lam, atol=1e-10)
    T, U = cca.transform(X, Y)
    np.testing.assert_allclose(np.cov(T.T), np.eye(5), atol=1e-10)
    np.testing.assert_allclose(np.cov(U.T), np.eye(5), atol=1e-10)
    np.testing.assert_allclose((T * U).sum(0) / 599, lam, atol=1e-10)
    np.testing.assert_allclose(cca.score(X, Y), lam.mean(), atol=1e-10)
    np.testing.assert_allclose(cca.x_loadings_, (X - X.mean(0)).T @ T / 599, atol=1e-10)
    theirs = cross_decomposition.CCA(1, scale=False, max_iter=2000, tol=1e-12).fit(X, Y)
    scores = theirs.transform(X)
    oracles.assert_same_up_to_sign(T[:, :1] / T[:, :1].std(), scores / scores.std(), 1e-3)
    # All components of the smaller view: predicting it is least squares.
    design = np.c_[X, np.ones(600)]
    np.testing.assert_allclose(cca.predict(X), design @ np.linalg.lstsq(design, Y, rcond=None)[0], atol=1e-8)
    np.testing.assert_allclose(cca.predict(X), X @ cca.coef_.T + cca.intercept_, atol=1e-9)
    np.testing.assert_allclose(cca.inverse_transform(T, U)[1], Y, atol=1e-8)
    assert np.abs(cca.inverse_transform(T) - X).mean() < np.abs(X - X.mean(0)).mean()
    weights = np.r_[np.ones(300), np.zeros(300)]
    assert cca.score(X, Y, weights) == pytest.approx(cca.score(X[:300], Y[:300]))
    assert es.CCA(n_components=2, ridge=0.1).fit(X, Y).correlations_[0] < lam[0]


@pytest.mark.parametrize("more", [np.zeros((600, 2)), X[:, :2]], ids=["constant", "duplicate"])
def test_a_ridge_gives_no_weights_to_scores_without_variance(more):
    wide, other = np.c_[X, more], np.c_[Y, Y[:, :1], np.ones(600)]
    plain, ridged = (es.CCA(ridge=ridge).fit(wide, other) for ridge in (0.0, 0.01))
    size = Y.shape[1]
    assert ridged.x_weights_.shape[1] == plain.n_components_ == len(ridged.eigenvalues_) == size
    assert np.abs(ridged.y_weights_).max() < 10 * np.abs(plain.y_weights_).max()
    named, many = es.CCA(size + 1, ridge=0.01).fit(wide, other), es.MultiviewCCA(ridge=0.01).fit([wide, other])
    for model in (named.predict(wide + 1), many.transform([wide + 1, other])[0]):
        assert np.abs(model).max() < 1e3


def test_fewer_rows_than_columns_say_that_correlations_of_one_mean_nothing():
    few = np.random.default_rng(0).normal(size=(2, 40, 30))
    assert "40 rows of 60 independent columns always have correlations of 1" in es.CCA(2).fit(*few).message_
    assert "always" not in es.CCA(2, ridge=0.1).fit(*few).message_
    assert "always" not in es.PLS(2).fit(*few).message_


def test_fit_transform_of_a_second_view_and_of_a_target():
    T, U = es.CCA(n_components=2).fit_transform(X, Y)
    assert T.shape == U.shape == (600, 2)
    assert es.CCA().fit_transform(X, Y[:, 0]).shape == (600, 1)
    assert es.CCA().fit(X, Y[:, 0]).predict(X).shape == (600,)


def test_pls_is_the_singular_vectors_of_the_cross_covariance():
    C = (X - X.mean(0)).T @ (Y - Y.mean(0)) / 599
    U, s, _ = np.linalg.svd(C, full_matrices=False)
    pls = es.PLS().fit(X, Y)
    np.testing.assert_allclose(pls.covariances_, s, atol=1e-10)
    oracles.assert_same_up_to_sign(pls.x_weights_, U, 1e-8)
    theirs = cross_decomposition.PLSSVD(2, scale=False).fit(X, Y)
    oracles.assert_same_up_to_sign(es.PLS(n_components=2).fit(X, Y).x_weights_, theirs.x_weights_, 1e-8)
    T = (X - X.mean(0)) @ pls.x_weights_
    slopes = np.linalg.lstsq(T, Y - Y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(pls.predict(X), T @ slopes + Y.mean(0), atol=1e-8)
    assert 0.3 < pls.score(X, Y) < 1
    np.testing.assert_allclose(
        pls.inverse_transform(T), T @ np.linalg.lstsq(T, X - X.mean(0), rcond=None)[0] + X.mean(0)
    )


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_predict_is_the_regression_on_the_scores(ridge):
    model = es.CCA(n_components=2, ridge=ridge).fit(X, Y)
    T = np.c_[model.transform(X), np.ones(600)]
    np.testing.assert_allclose(model.predict(X), T @ np.linalg.lstsq(T, Y, rcond=None)[0], atol=1e-9)
    np.testing.assert_allclose(model.transform(X).var(0, ddof=1), 1)
    np.testing.assert_allclose(model.correlations_.mean(), model.score(X, Y))


CONSTANT = {
    "CCA with a constant": lambda: es.CCA().fit(X, np.ones((600, 1))),
    "CCA of constants": lambda: es.CCA(n_components=1).fit(np.ones((9, 2)), np.ones((9, 2))),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_rows_without_variance_have_no_components(case):
    with pytest.raises(ValueError, match="no components"):
        CONSTANT[case]()

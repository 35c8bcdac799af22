"""Estimators keep scikit-learn's contract and give its answers."""

import pickle
import warnings

import joblib
import numpy as np
import optax
import pandas as pd
import pytest
import scipy.sparse
from sklearn import cross_decomposition, decomposition, discriminant_analysis
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import eigenstream as es
import oracles

ALL = [es.PCA(), es.CCA(), es.PLS(), es.LDA(), es.ICA(), es.SpectralEmbedding(), es.SpectralClustering()]
PAPER = es.solvers.Paper(learning_rate=0.05)
rng = np.random.default_rng(0)
LATENT = rng.normal(size=(600, 3))
X = np.c_[LATENT * [3, 2, 1], rng.normal(size=(600, 4))] + 2.0
Y = np.c_[LATENT + rng.normal(size=(600, 3)) * [0.3, 0.6, 1.0], rng.normal(size=(600, 2))] - 1.0
Z = LATENT @ rng.normal(size=(3, 4)) + rng.normal(size=(600, 4))
LABELS = np.array(["ash", "elm", "oak"])[(LATENT[:, 0] > 0).astype(int) + (LATENT[:, 1] > 0.5)]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(ALL)
def test_scikit_learns_checks(estimator, check):
    """With no check that is expected to fail."""
    check(estimator)


def fitted(name, **settings):
    """An estimator with the rows it is fitted to, and what it is asked afterwards."""
    model = getattr(es, name)(**settings)
    if name == "MultiviewCCA":
        return model.fit([X, Y, Z]), [X, Y, Z]
    if name in ("CCA", "PLS"):
        return model.fit(X, Y), X
    return model.fit(X, LABELS) if name == "LDA" else model.fit(X), X


TRANSFORMERS = ["PCA", "CCA", "PLS", "LDA", "ICA", "MultiviewCCA"]


def flat(scores):
    return np.hstack(scores) if isinstance(scores, list) else scores


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_clone_pickle_and_joblib(name, tmp_path):
    model, rows = fitted(name)
    wanted = flat(model.transform(rows))
    assert not hasattr(clone(model), "solver_")
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(flat(again.transform(rows)), wanted)
    joblib.dump(model, tmp_path / "model")
    np.testing.assert_array_equal(flat(joblib.load(tmp_path / "model").transform(rows)), wanted)


def pieces(name, size, order=None):
    index = np.arange(600) if order is None else order
    for lo in range(0, 600, size):
        part = index[lo : lo + size]
        if name == "MultiviewCCA":
            yield ([X[part], Y[part], Z[part]],)
        elif name in ("CCA", "PLS"):
            yield X[part], Y[part]
        elif name == "LDA":
            yield X[part], LABELS[part], np.unique(LABELS)
        else:
            yield (X[part],)


@pytest.mark.parametrize("size", [1, 7, 600])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_partial_fit_of_any_pieces_in_any_order_is_fit(name, size):
    model, rows = fitted(name)
    for order in (None, np.random.default_rng(1).permutation(600)):
        other = getattr(es, name)()
        for arguments in pieces(name, size, order):
            other.partial_fit(*arguments)
        np.testing.assert_allclose(flat(other.transform(rows)), flat(model.transform(rows)), rtol=1e-7, atol=1e-8)
        assert other.n_samples_seen_ == 600


def test_partial_fit_goes_on_from_fit_and_through_a_pickle():
    model = pickle.loads(pickle.dumps(es.PCA().fit(X[:300])))
    model = pickle.loads(pickle.dumps(model.partial_fit(X[300:310]))).partial_fit(X[310:])
    np.testing.assert_allclose(model.components_, es.PCA().fit(X).components_, atol=1e-8)


def test_partial_fit_after_fit_measures_on_the_new_rows_or_refuses():
    solver = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam, averaging=0.1)
    model = es.CCA(n_components=1, solver=solver, max_epochs=50).fit(X, Y)
    before = model.correlations_
    model.partial_fit(X, Y)
    np.testing.assert_allclose(model.correlations_, before, atol=0.02)
    np.testing.assert_allclose(model.transform(X).var(ddof=1), 1, rtol=0.02)
    halves = es.ICA().fit(X[:300]).partial_fit(X[300:])
    np.testing.assert_allclose(halves.eigenvalues_, es.ICA().fit(X).eigenvalues_, atol=1e-8)
    np.testing.assert_allclose(halves.mean_, X.mean(0))
    wide = np.random.default_rng(0).normal(size=(200, 20))
    with pytest.raises(ValueError, match="on a new ICA"):
        es.ICA().fit(wide).partial_fit(wide)
    with pytest.raises(ValueError, match="max_epochs=0"):
        es.PCA(max_epochs=0).fit(X)


def test_partial_fit_solves_only_when_looked_at(monkeypatch):
    solved = []
    solve = es.solvers.Exact.solve
    monkeypatch.setattr(es.solvers.Exact, "solve", lambda *a: solved.append(1) or solve(*a))
    model = es.PCA()
    for arguments in pieces("PCA", 50):
        model.partial_fit(*arguments)
    assert not solved
    model.transform(X)
    model.transform(X)
    assert model.explained_variance_[0] > model.explained_variance_[1]
    assert len(solved) == 1


def test_partial_fit_keeps_no_hold_of_memory_that_is_used_again():
    buffer, model = np.empty((10, 7)), es.PCA()
    for lo in range(0, 600, 10):
        buffer[:] = X[lo : lo + 10]
        model.partial_fit(buffer)
    np.testing.assert_allclose(model.components_, es.PCA().fit(X).components_, atol=1e-8)


def test_one_row_is_not_enough_to_look_at():
    model = es.PCA().partial_fit(X[:1])
    with pytest.raises(ValueError, match="too few rows"):
        model.transform(X)
    with pytest.raises(NotFittedError):
        es.PCA().transform(X)


@pytest.mark.parametrize("name", ["PCA", "CCA", "PLS", "LDA", "ICA"])
def test_pandas_output_and_names(name):
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(7)])
    model = getattr(es, name)().set_output(transform="pandas")
    model.fit(frame, {"CCA": Y, "PLS": Y, "LDA": LABELS}.get(name))
    out = model.transform(frame)
    assert list(out.columns) == [f"{name.lower()}{i}" for i in range(out.shape[1])]
    assert list(model.feature_names_in_) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names"):
        model.transform(frame.rename(columns={"f0": "other"}))


def test_pipelines_and_searches():
    digits, labels = load_digits(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), es.PCA(), LogisticRegression(max_iter=200))
    search = GridSearchCV(pipe, {"pca__n_components": [2, 20]}, cv=3).fit(digits[:600], labels[:600])
    assert search.best_params_ == {"pca__n_components": 20}
    assert search.best_score_ > 0.8
    cca = GridSearchCV(es.CCA(), {"n_components": [1, 3], "ridge": [0.0, 0.1]}, cv=3).fit(X, Y)
    assert cca.best_params_["n_components"] == 1
    supervised = make_pipeline(es.PLS(n_components=1), LogisticRegression()).fit(X, (LABELS == "oak").astype(int))
    assert supervised.score(X, (LABELS == "oak").astype(int)) > 0.8
    assert make_pipeline(StandardScaler(), es.LDA()).fit(X, LABELS).score(X, LABELS) > 0.7


def same_up_to_sign(found, wanted, atol):
    signs = np.sign((found * wanted).sum(0))
    np.testing.assert_allclose(found * signs, wanted, atol=atol)


def test_pca_is_scikit_learns():
    digits = load_digits().data
    ours, theirs = es.PCA(n_components=10).fit(digits), decomposition.PCA(10, svd_solver="full").fit(digits)
    assert isinstance(ours.solver_, es.solvers.Exact)
    assert es.metrics.subspace_error(ours.components_.T, theirs.components_.T) < 1e-6
    for name in ("explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_", "noise_variance_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, err_msg=name)
    same_up_to_sign(ours.transform(digits), theirs.transform(digits), 1e-7)
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
    same_up_to_sign(T[:, :1] / T[:, :1].std(), scores / scores.std(), 1e-3)
    # All components of the smaller view: predicting it is least squares.
    design = np.c_[X, np.ones(600)]
    np.testing.assert_allclose(cca.predict(X), design @ np.linalg.lstsq(design, Y, rcond=None)[0], atol=1e-8)
    np.testing.assert_allclose(cca.predict(X), X @ cca.coef_.T + cca.intercept_, atol=1e-9)
    np.testing.assert_allclose(cca.inverse_transform(T, U)[1], Y, atol=1e-8)
    assert np.abs(cca.inverse_transform(T) - X).mean() < np.abs(X - X.mean(0)).mean()
    weights = np.r_[np.ones(300), np.zeros(300)]
    assert cca.score(X, Y, weights) == pytest.approx(cca.score(X[:300], Y[:300]))
    assert es.CCA(n_components=2, ridge=0.1).fit(X, Y).correlations_[0] < lam[0]


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
    same_up_to_sign(pls.x_weights_, U, 1e-8)
    theirs = cross_decomposition.PLSSVD(2, scale=False).fit(X, Y)
    same_up_to_sign(es.PLS(n_components=2).fit(X, Y).x_weights_, theirs.x_weights_, 1e-8)
    T = (X - X.mean(0)) @ pls.x_weights_
    slopes = np.linalg.lstsq(T, Y - Y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(pls.predict(X), T @ slopes + Y.mean(0), atol=1e-8)
    assert 0.3 < pls.score(X, Y) < 1
    np.testing.assert_allclose(
        pls.inverse_transform(T), T @ np.linalg.lstsq(T, X - X.mean(0), rcond=None)[0] + X.mean(0)
    )


def test_multiview_of_two_is_cca_and_of_three_correlates_all():
    two = es.MultiviewCCA(n_components=3).fit([X, Y])
    np.testing.assert_allclose(two.correlations_, es.CCA(n_components=3).fit(X, Y).correlations_, atol=1e-9)
    three = es.MultiviewCCA(n_components=2).fit([X, Y, Z])
    T = three.transform([X, Y, Z])
    pairs = [np.corrcoef(T[i][:, 0], T[j][:, 0])[0, 1] for i in range(3) for j in range(i)]
    np.testing.assert_allclose(three.correlations_[0], np.mean(pairs), atol=1e-10)
    np.testing.assert_allclose([t.var(0, ddof=1) for t in T], 1, atol=1e-10)
    assert three.score([X, Y, Z]) == pytest.approx(three.correlations_.mean())
    assert [x.shape for x in three.inverse_transform(T)] == [X.shape, Y.shape, Z.shape]


MULTIVIEW_MISTAKES = {
    "an array": (lambda m: m.fit(X), "list of two or more"),
    "one view": (lambda m: m.fit([X]), "list of two or more"),
    "unequal rows": (lambda m: m.fit([X, Y[:-1]]), "inconsistent numbers of samples"),
    "NaN": (lambda m: m.fit([X, np.full_like(Y, np.nan)]), r"batch\[1\] holds NaN"),
    "complex": (lambda m: m.fit([X, Y + 1j]), "Complex"),
    "one dimension": (lambda m: m.fit([X, Y[:, 0]]), "1D array"),
    "no rows": (lambda m: m.fit([X[:0], Y[:0]]), "0 sample"),
    "another width": (lambda m: m.fit([X, Y]).transform([X, Y[:, :2]]), "fitted with"),
    "too many": (lambda m: m.set_params(n_components=99).fit([X, Y]), "too large"),
}


@pytest.mark.parametrize("case", MULTIVIEW_MISTAKES)
def test_multiview_refuses_what_scikit_learns_checks_would_try(case):
    act, words = MULTIVIEW_MISTAKES[case]
    with pytest.raises(ValueError, match=words):
        act(es.MultiviewCCA())


def test_multiview_keeps_the_contract_that_generic_checks_cannot_try():
    views = [X.copy(), Y.copy(), Z.copy()]
    model = es.MultiviewCCA(n_components=2)
    before = model.get_params()
    first = model.fit(views).transform(views)
    assert model.get_params() == before
    for view, kept in zip(views, (X, Y, Z), strict=True):
        np.testing.assert_array_equal(view, kept)
    for a, b in zip(first, model.fit(views).transform(views), strict=True):
        np.testing.assert_array_equal(a, b)
    state = dict(vars(model))
    model.transform(views)
    assert vars(model) == state
    for a, b in zip(first, model.transform([v[:50] for v in views]), strict=True):
        np.testing.assert_allclose(a[:50], b)
    for a, b in zip(first, es.MultiviewCCA(n_components=2).fit_transform([v.tolist() for v in views]), strict=True):
        np.testing.assert_allclose(a, b)
    sparse = [scipy.sparse.csr_array(v) for v in views]
    for a, b in zip(first, es.MultiviewCCA(n_components=2).fit(sparse).transform(sparse), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    with pytest.raises(NotFittedError):
        es.MultiviewCCA().transform(views)


def test_lda_is_as_accurate_as_scikit_learns_on_digits():
    digits, labels = load_digits(return_X_y=True)
    train, test, y_train, y_test = train_test_split(digits, labels, test_size=0.5, random_state=0)
    theirs = discriminant_analysis.LinearDiscriminantAnalysis().fit(train, y_train)
    ours = es.LDA().fit(train, y_train)
    assert abs(ours.score(test, y_test) - theirs.score(test, y_test)) <= 0.005
    np.testing.assert_allclose(ours.predict_proba(test), theirs.predict_proba(test), atol=1e-6)
    np.testing.assert_allclose(ours.explained_variance_ratio_, theirs.explained_variance_ratio_, atol=1e-6)
    same_up_to_sign(ours.transform(test)[:, :3], theirs.transform(test)[:, :3], 1e-6)


def test_lda_of_names_of_two_classes_and_with_priors():
    lda = es.LDA().fit(X, LABELS)
    theirs = discriminant_analysis.LinearDiscriminantAnalysis().fit(X, LABELS)
    np.testing.assert_array_equal(lda.predict(X), theirs.predict(X))
    assert lda.transform(X).shape == (600, 2)
    np.testing.assert_allclose(lda.means_, theirs.means_)
    np.testing.assert_allclose(lda.decision_function(X), X @ lda.coef_.T + lda.intercept_, atol=1e-8)
    two = LABELS[LABELS != "elm"], X[LABELS != "elm"]
    pair, other = es.LDA().fit(two[1], two[0]), discriminant_analysis.LinearDiscriminantAnalysis().fit(two[1], two[0])
    np.testing.assert_allclose(pair.predict_proba(X), other.predict_proba(X), atol=1e-6)
    np.testing.assert_allclose(pair.coef_, other.coef_, atol=1e-6)
    priors = [0.8, 0.1, 0.1]
    np.testing.assert_allclose(
        es.LDA(priors=priors).fit(X, LABELS).predict_proba(X),
        discriminant_analysis.LinearDiscriminantAnalysis(priors=priors).fit(X, LABELS).predict_proba(X),
        atol=1e-6,
    )
    one = es.LDA(n_components=1).fit(X, LABELS)
    assert one.transform(X).shape == (600, 1)
    np.testing.assert_array_equal(one.predict(X), lda.predict(X))


def test_lda_learns_a_class_that_comes_late():
    order = np.argsort(LABELS, kind="stable")
    model = es.LDA()
    for part in np.array_split(order, 20):
        model.partial_fit(X[part], LABELS[part], classes=["oak", "elm", "ash"])
    np.testing.assert_allclose(model.predict_proba(X), es.LDA().fit(X, LABELS).predict_proba(X), atol=1e-8)
    half = es.LDA().partial_fit(X[order[:300]], LABELS[order[:300]], classes=["ash", "elm", "oak"])
    assert "oak" not in set(half.predict(X))


LDA_MISTAKES = {
    "no classes": (lambda: es.LDA().partial_fit(X, LABELS), "classes must be given"),
    "other classes": (
        lambda: es.LDA().partial_fit(X, LABELS, classes=np.unique(LABELS)).partial_fit(X, LABELS, classes=["a", "b"]),
        "not the same",
    ),
    "unknown class": (lambda: es.LDA().partial_fit(X, LABELS, classes=["ash", "elm"]), "'oak'"),
    "too many": (lambda: es.LDA(n_components=3).fit(X, LABELS), "n_components=3"),
    "priors": (lambda: es.LDA(priors=[1.0]).fit(X, LABELS), "priors"),
    "a stream without classes": (lambda: es.LDA().fit_stream(iter([(X, LABELS)])), "read once only"),
}


@pytest.mark.parametrize("case", LDA_MISTAKES)
def test_lda_names_mistakes(case):
    act, words = LDA_MISTAKES[case]
    with pytest.raises(ValueError, match=words):
        act()


def test_ica_recovers_the_papers_signals_as_well_as_eigh():
    mixed, sources = es.datasets.mixed_signals()
    A, B = oracles.ica(mixed)
    _, V = oracles.leading(A, B, 3)

    def match(S):
        return np.abs(np.corrcoef(S.T, sources.T)[:3, 3:]).max(1).min()

    ica = es.ICA().fit(mixed)
    found = ica.transform(mixed)
    assert match(found) == pytest.approx(match(mixed @ V), abs=1e-6)
    assert match(found) > 0.98
    np.testing.assert_allclose(ica.inverse_transform(found), mixed, atol=1e-8)
    np.testing.assert_allclose(found.var(0), 1, atol=1e-8)
    assert ica.score(mixed) > 0.5
    first = es.ICA(n_components=1).fit(mixed)
    assert abs(first.eigenvalues_[0]) == pytest.approx(np.abs(ica.eigenvalues_).max())
    with pytest.raises(ValueError, match=r'which="largest" or "smallest"'):
        es.ICA(n_components=1, solver="paper").fit(mixed)


@pytest.mark.parametrize("name", ["PCA", "CCA", "PLS", "MultiviewCCA", "LDA"])
def test_a_streaming_solver_gives_the_same_attributes(name):
    """What a streaming solver does not keep, variances of scores and loadings, is measured on the rows."""
    solver = es.solvers.Paper(learning_rate=0.02 if name == "CCA" else 0.005, optimizer=optax.adam, averaging=0.1)
    exact, rows = fitted(name, n_components=1)
    model, _ = fitted(name, n_components=1, solver=solver, max_epochs=100)
    assert set(vars(exact)) == set(vars(model))
    same_up_to_sign(flat(model.transform(rows)), flat(exact.transform(rows)), 0.15)
    for attribute in ("correlations_", "covariances_", "explained_variance_ratio_", "mean_", "x_mean_"):
        if hasattr(exact, attribute) and name != "LDA":
            np.testing.assert_allclose(getattr(model, attribute), getattr(exact, attribute), rtol=0.02, atol=1e-4)
    if name in ("CCA", "PLS"):
        np.testing.assert_allclose(model.predict(X), exact.predict(X), atol=0.3)
        np.testing.assert_allclose(model.x_loadings_, exact.x_loadings_, atol=0.1)
        assert model.history_
        # The same from a stream that can be read once only, measured on the last rows it held.
        once = getattr(es, name)(n_components=1, solver=solver)
        once.fit_stream((x, y) for x, y in 100 * list(es.streams.batches(X, Y)))
        np.testing.assert_allclose(once.correlations_, exact.correlations_, rtol=0.05)
        if name == "CCA":
            np.testing.assert_allclose(once.transform(X).var(), 1, rtol=0.1)


def test_a_failed_step_is_warned_of():
    with pytest.warns(UserWarning, match="not finite"):
        model = es.CCA(n_components=1, solver=es.solvers.SGHA(learning_rate=1e6)).fit(1e3 * X, 1e3 * Y)
    assert np.isfinite(model.x_weights_).all()


def test_streams_of_every_kind():
    wanted = es.CCA(n_components=2).fit(X, Y)
    lists = [(X[i : i + 90], Y[i : i + 90]) for i in range(0, 600, 90)]
    for stream in (lists, iter(lists), es.streams.batches(X, Y), [list(pair) for pair in lists]):
        model = es.CCA(n_components=2).fit_stream(stream)
        np.testing.assert_allclose(model.correlations_, wanted.correlations_, atol=1e-9)
        assert model.n_features_in_ == 7
    for stream in ([(X[:300], LABELS[:300]), (X[300:], LABELS[300:])], es.streams.batches(X, LABELS)):
        np.testing.assert_array_equal(es.LDA().fit_stream(stream).predict(X), es.LDA().fit(X, LABELS).predict(X))
    once = es.LDA().fit_stream(iter([(X, LABELS)]), classes=np.unique(LABELS))
    np.testing.assert_array_equal(once.predict(X), es.LDA().fit(X, LABELS).predict(X))


def test_a_torch_data_loader():
    torch = pytest.importorskip("torch", reason="PyTorch is an extra")
    from torch.utils.data import DataLoader, TensorDataset

    views = TensorDataset(torch.tensor(X), torch.tensor(Y))
    model = es.CCA(n_components=2).fit_stream(DataLoader(views, batch_size=64, shuffle=True))
    np.testing.assert_allclose(model.correlations_, es.CCA(n_components=2).fit(X, Y).correlations_, atol=1e-9)
    alone = es.PCA(n_components=2).fit_stream(DataLoader(TensorDataset(torch.tensor(X)), batch_size=64))
    np.testing.assert_allclose(alone.explained_variance_, es.PCA(n_components=2).fit(X).explained_variance_)
    tracked = [torch.tensor(X, requires_grad=True), torch.tensor(X, dtype=torch.bfloat16)]
    assert es.PCA(n_components=2).fit_stream(tracked).n_samples_seen_ == 1200


def block_model(sizes, inside, outside, seed=0):
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chance = np.where(labels[:, None] == labels, inside, outside)
    upper = np.triu(generator.random(chance.shape) < chance, 1)
    return (upper + upper.T).astype(float), labels


def wrong(found, truth):
    """Members in another cluster than most of their own, clusters named by their majority."""
    return sum((truth[found == c] != np.bincount(truth[found == c]).argmax()).sum() for c in np.unique(found))


def test_spectral_clustering_finds_planted_blocks():
    graph, truth = block_model([60, 80, 100], 0.3, 0.02)
    i, j = np.nonzero(np.triu(graph))
    for model in (
        es.SpectralClustering(3, affinity="precomputed").fit(graph),
        es.SpectralClustering(3, affinity="precomputed").fit(scipy.sparse.csr_array(graph)),
        es.SpectralClustering(3).fit_stream([(i, j)], n_nodes=240),
        es.SpectralClustering(3).fit_stream(es.streams.edges(np.c_[i, j], batch_size=100)),
    ):
        assert wrong(model.labels_, truth) == 0
        assert len(model.labels_) == 240
    weighted = es.SpectralClustering(3).fit_stream(iter([(i, j, np.ones(len(i)))]), n_nodes=240)
    assert wrong(weighted.labels_, truth) == 0


@pytest.mark.slow
def test_a_streaming_solver_finds_planted_blocks_in_a_stream_of_edges():
    graph, truth = block_model([30, 30], 0.5, 0.02)
    i, j = np.nonzero(np.triu(graph))
    stream = es.streams.edges(np.c_[i, j], batch_size=100)
    solver = es.solvers.Paper(learning_rate=50.0, averaging=0.1)
    for make in (
        es.SpectralClustering(2, solver=solver, max_epochs=60),
        es.SpectralEmbedding(1, solver=solver, max_epochs=60),
    ):
        model = make.fit_stream(stream)
        sides = getattr(model, "labels_", (model.embedding_[:, -1] > 0).astype(int))
        assert wrong(sides, truth) <= 2


#: Zachary's karate club (1977): the friendships, members numbered from 0, and the members who left with the officer.
KARATE = (
    "0-1 0-2 0-3 0-4 0-5 0-6 0-7 0-8 0-10 0-11 0-12 0-13 0-17 0-19 0-21 0-31 1-2 1-3 1-7 1-13 1-17 1-19 1-21 1-30 2-3 "
    "2-7 2-8 2-9 2-13 2-27 2-28 2-32 3-7 3-12 3-13 4-6 4-10 5-6 5-10 5-16 6-16 8-30 8-32 8-33 9-33 13-33 14-32 14-33 "
    "15-32 15-33 18-32 18-33 19-33 20-32 20-33 22-32 22-33 23-25 23-27 23-29 23-32 23-33 24-25 24-27 24-31 25-31 26-29 "
    "26-33 27-33 28-31 28-33 29-32 29-33 30-32 30-33 31-32 31-33 32-33"
)
OFFICERS = [9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]


def test_spectral_clustering_finds_the_factions_of_the_karate_club():
    i, j = np.array([edge.split("-") for edge in KARATE.split()]).astype(int).T
    assert len(i) == 78
    truth = np.isin(np.arange(34), OFFICERS).astype(int)
    model = es.SpectralClustering(2).fit_stream([(i, j)])
    assert wrong(model.labels_, truth) <= 2


def test_spectral_embedding_is_scikit_learns():
    from sklearn.manifold import SpectralEmbedding

    points = np.random.default_rng(0).normal(size=(80, 3))
    for affinity in ("rbf", "nearest_neighbors"):
        ours = es.SpectralEmbedding(n_components=3, affinity=affinity, n_neighbors=12).fit(points)
        theirs = SpectralEmbedding(3, affinity=affinity, n_neighbors=12, eigen_solver="arpack").fit(points)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = theirs.affinity_matrix_
        graph = graph.toarray() if scipy.sparse.issparse(graph) else graph
        np.fill_diagonal(graph, 0)
        again = es.SpectralEmbedding(n_components=3, affinity="precomputed").fit(graph)
        same_up_to_sign(ours.embedding_, again.embedding_, 1e-8)
        assert es.metrics.subspace_error(ours.embedding_, theirs.embedding_) < 1e-6
    assert es.SpectralEmbedding().fit_transform(points).shape == (80, 79)
    with pytest.raises(ValueError, match="memory_budget"):
        es.SpectralEmbedding(memory_budget=1e4).fit(points)
    with pytest.raises(ValueError, match="read once only"):
        es.SpectralEmbedding(2).fit_stream(iter([]))
    with pytest.raises(ValueError, match="square"):
        es.SpectralEmbedding(2, affinity="precomputed").fit(points)
    with pytest.raises(ValueError, match="affinity=3"):
        es.SpectralEmbedding(2, affinity=3).fit(points)


def test_permutation_p_values_are_uniform_without_a_relation_and_small_with_one():
    generator = np.random.default_rng(0)
    firsts = []
    for _ in range(150):
        A, B = generator.normal(size=(40, 3)), generator.normal(size=(40, 2))
        firsts.append(
            es.permutation_test(es.CCA(), A, B, n_permutations=39, random_state=generator.integers(2**31)).p_values[0]
        )
    # Under the null a p-value is at most 0.1 with probability 0.1: 15 of 150, give or take 3.7.
    assert 4 <= np.sum(np.array(firsts) <= 0.1) <= 26
    test = es.permutation_test(es.CCA(), X, Y, n_permutations=99)
    assert (test.p_values <= 0.01).tolist() == [True, True, True, False, False]
    assert (np.diff(test.p_values) >= 0).all()
    np.testing.assert_allclose(test.statistics, es.CCA().fit(X, Y).correlations_, atol=1e-9)
    assert test.null.shape == (99, 5)
    pls = es.permutation_test(es.PLS(n_components=1), X, Y, n_permutations=99)
    assert pls.p_values.shape == (1,)
    assert pls.p_values[0] == 0.01
    ridged = es.permutation_test(es.CCA(ridge=0.1), X, Y, n_permutations=9)
    np.testing.assert_allclose(ridged.statistics, es.CCA(ridge=0.1).fit(X, Y).eigenvalues_, atol=1e-9)
    with pytest.raises(ValueError, match="n_permutations=0"):
        es.permutation_test(es.CCA(), X, Y, n_permutations=0)
    with pytest.raises(ValueError, match="give a CCA or a PLS"):
        es.permutation_test(es.PCA(), X, Y)


def test_random_state_may_be_none_or_a_generator():
    for state in (None, np.random.RandomState(0)):
        model = es.PCA(n_components=1, solver=PAPER, random_state=state, max_epochs=5).fit(X / 3)
        assert np.isfinite(model.components_).all()


@pytest.mark.slow
@pytest.mark.skipif(not (es.datasets.folder() / "mnist.npz").exists(), reason="mnist.npz is not in the data folder")
def test_pca_of_mnist_is_scikit_learns():
    images = es.datasets.mnist()["x_train"].reshape(60_000, -1).astype(np.float64) / 255
    theirs = decomposition.PCA(32, svd_solver="covariance_eigh").fit(images)
    ours = es.PCA(n_components=32).fit(images.astype(np.float32))
    assert es.metrics.subspace_error(ours.components_.T, theirs.components_.T) < 1e-6
    np.testing.assert_allclose(ours.explained_variance_, theirs.explained_variance_, rtol=1e-5)

"""CCA of several views."""

import numpy as np
import pytest
import scipy.sparse
from sklearn.exceptions import NotFittedError

import eigenstream as es
from data import X, Y, Z


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
def test_mistakes_are_named(case):
    act, words = MULTIVIEW_MISTAKES[case]
    with pytest.raises(ValueError, match=words):
        act(es.MultiviewCCA())


def test_the_estimator_contract_holds_for_lists_of_views():
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

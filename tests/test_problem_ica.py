"""Independent components by fourth moments."""

import numpy as np
import pytest
import scipy.linalg

import eigenstream as es
import oracles


def batches(X, size):
    return [X[i : i + size] for i in range(0, len(X), size)]


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


def test_one_pass_is_refused_for_wide_rows():
    wide = np.random.default_rng(0).normal(size=(300, 129))
    with pytest.raises(ValueError, match=r"129.*single pass.*read twice.*center=False"):
        es.solve(es.problems.ica(), iter([wide]), 2)
    centred = wide - wide.mean(0)
    by_promise = es.solve(es.problems.ica(center=False), iter([centred]), 2)
    np.testing.assert_allclose(by_promise.eigenvalues, es.solve(es.problems.ica(), [wide], 2).eigenvalues, rtol=1e-9)


EIGENVALUES = (-11.286, -5.326, -3.393)


def test_the_papers_signals_have_the_papers_eigenvalues():
    X, _ = es.datasets.mixed_signals()
    np.testing.assert_allclose(scipy.linalg.eigh(*oracles.ica(X), eigvals_only=True), EIGENVALUES, atol=5e-4)
    for batches in ([X], [X[:700], X[700:]], iter([X[:700], X[700:]])):
        result = es.solve(es.problems.ica(), batches, 3, which="smallest")
        np.testing.assert_allclose(result.eigenvalues, EIGENVALUES, atol=5e-4)

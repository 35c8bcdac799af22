"""Permutation tests of canonical correlations."""

import numpy as np
import pytest

import eigenstream as es
from data import X, Y


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

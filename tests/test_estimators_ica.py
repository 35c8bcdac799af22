"""ICA of the paper's signals."""

import numpy as np
import pytest

import eigenstream as es
import oracles


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

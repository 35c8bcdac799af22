"""Passes over a stream."""

import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
from conftest import check_refused
from data import FEW, Counted, Once, X


@pytest.mark.parametrize(
    ("problem", "options"), [(es.problems.ica(), {}), (es.problems.pca(), {"solver": "paper", "max_epochs": 3})]
)
def test_batches_that_cannot_be_read_again_are_refused(problem, options):
    with pytest.raises(ValueError, match="gave nothing when read again"):
        es.solve(problem, Once(np.random.default_rng(0).normal(size=(4, 100, 17))), 2, **options)


def test_a_stream_is_opened_once_a_pass():
    for options, passes in (({}, 1), ({"solver": "paper", "max_epochs": 3}, 3)):
        batches = Counted(np.split(X, 4))
        es.solve(es.problems.pca(), batches, 2, **options)
        assert batches.opened == passes


MISTAKES = {
    "empty stream": (lambda: es.solve(es.problems.pca(), [], 2), "batches is empty"),
    "no stream": (lambda: es.solve(es.problems.pca(), None, 2), "needs data"),
    "an array for a stream": (lambda: es.solve(es.problems.pca(), FEW, 2), r"\[X\] for a single one"),
    "epochs of an iterator": (
        lambda: es.solve(es.problems.pca(), iter([FEW]), 2, solver="paper", max_epochs=2),
        "read once only",
    ),
    "a sparse matrix for a stream": (lambda: es.solve(es.problems.pca(), scipy.sparse.csr_matrix(FEW), 1), "one array"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

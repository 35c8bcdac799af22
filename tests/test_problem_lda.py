"""Linear discriminants."""

import jax
import numpy as np
import pytest
from sklearn.datasets import load_digits

import eigenstream as es
import oracles
from conftest import check_refused
from data import FEW, X, scaled
from eigenstream.core import players
from eigenstream.solvers import Paper, direction


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_lda_is_asymptotically_unbiased():
    """With class means of m rows, the error of the direction falls as 1/√m."""
    rng = np.random.default_rng(5)
    rows = np.random.default_rng(0).standard_t(6, size=(30, 4))
    labels = np.arange(30) % 3
    data = (rows + labels[:, None] * [1.0, -0.5, 0, 0], labels)
    problem = es.problems.lda(3)
    V = players.normal(jax.random.key(0), 2, problem.template(data))
    exact_memory = problem.observe(problem.start(data), data)
    exact = problem.estimate(exact_memory, data, V, False)[0][0]
    wanted = direction(V, [(exact, exact)], exact.BV, players.dot(V, exact.BV))

    def error_after(m):
        index = rng.integers(0, 30, m)
        seen = jax.tree.map(lambda leaf: leaf[index], data)
        memory = problem.observe(problem.start(data), seen)
        # The expectation over a batch is the mean over the population: A comes from memory, B is linear in rows.
        found = direction(V, problem.estimate(memory, data, V, False), exact.BV, players.dot(V, exact.BV))
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    sizes = (300, 30_000, 3_000_000)
    errors = [np.mean([error_after(m) for _ in range(8)]) for m in sizes]
    # A hundred times the rows divide the error by ten, within a factor of two.
    assert 5 < errors[0] / errors[1] < 20
    assert 5 < errors[1] / errors[2] < 20
    assert errors[2] < 5e-3


@pytest.mark.slow
def test_lda_from_a_stream_learns_its_classes():
    X, y = load_digits(return_X_y=True)
    X = (X / 16 + 0.1 * np.random.default_rng(0).normal(size=X.shape)).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    pieces = [(X[i : i + 100], y[i : i + 100]) for i in range(0, len(X), 100)]
    A, B = oracles.lda(X.astype(np.float64), y)
    exact = es.solve(es.problems.lda(10), pieces, 9)
    np.testing.assert_allclose(exact.eigenvalues, oracles.leading(A, B, 9)[0], rtol=1e-4)
    solver = Paper(learning_rate=1.0, averaging=0.1)
    result = es.solve(es.problems.lda(10), pieces, 2, solver=solver, max_epochs=60)
    assert es.metrics.proportion_captured(result.V, A, B) > 0.97


def test_labels_may_be_whole_floats():
    X, y = scaled(200), np.arange(200) % 2
    a, b = (es.solve(es.problems.lda(2), [(X, labels)], 1).eigenvalues for labels in (y, y.astype(float)))
    np.testing.assert_array_equal(a, b)


def test_the_number_of_classes_may_be_a_numpy_integer():
    labels = np.arange(600) % 2
    assert es.solve(es.problems.lda(labels.max() + 1), [(X, labels)], 1).V.shape == (7, 1)


MISTAKES = {
    "k too large for classes": (
        lambda: es.solve(es.problems.lda(3), [(FEW, np.arange(50) % 3)], 3),
        "at most 2",
    ),
    "labels too large": (lambda: es.solve(es.problems.lda(2), [(FEW, np.arange(50) % 3)], 1), "n_classes - 1 = 1"),
    "labels not whole": (lambda: es.solve(es.problems.lda(2), [(FEW, np.full(50, 0.5))], 1), "whole numbers"),
    "labels too few": (lambda: es.solve(es.problems.lda(2), [(FEW, np.zeros(3, int))], 1), "one label a row"),
    "no labels": (lambda: es.solve(es.problems.lda(2), [FEW], 1), r"pair \(X, labels\)"),
    "a bare pair": (lambda: es.solve(es.problems.lda(2), (FEW, np.zeros(50, int)), 1), r"\[\(X, labels\)\]"),
    "labels in words": (lambda: es.solve(es.problems.lda(2), [(FEW, np.array(["a"] * 50))], 1), "np.unique"),
    "one class": (lambda: es.problems.lda(1), "n_classes=1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

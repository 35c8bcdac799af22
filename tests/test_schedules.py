"""The paper's learning rate."""

import numpy as np
import optax
import pytest

import eigenstream as es
import oracles
from conftest import check_refused
from eigenstream.solvers import Paper

pytestmark = pytest.mark.usefixtures("x64")


def test_warmup_then_harmonic_decay():
    base, final, warmup, total = 1e-2, 1e-4, 100, 5000
    rate = es.solvers.warmup_harmonic(base, final, warmup, total)
    np.testing.assert_allclose(rate(np.arange(0, warmup + 1)), base * np.arange(warmup + 1) / warmup, atol=1e-12)
    np.testing.assert_allclose(rate(total), final, rtol=1e-9)
    inverse = 1 / np.asarray(rate(np.arange(warmup, total)))
    np.testing.assert_allclose(np.diff(inverse), np.diff(inverse)[0], rtol=1e-6)


def test_adam_with_the_papers_schedule_finds_the_answer():
    lam_true = np.array([1.0, 0.7, 0.4, 0.1, 0.05])
    A, B = oracles.pencil(lam_true, 100.0)
    rate = es.solvers.warmup_harmonic(1e-2, 3e-4, 100, 8000)
    solver = Paper(learning_rate=rate, optimizer=optax.adam, averaging=0.1)
    result = es.solve(es.problems.matrices(A, B), None, 3, solver=solver, max_steps=8000)
    np.testing.assert_allclose(result.eigenvalues, lam_true[:3], rtol=1e-3)


MISTAKES = {
    "schedule": (lambda: es.solvers.warmup_harmonic(1e-3, 1e-2, 10, 100), "final < base"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

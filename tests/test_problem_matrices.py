"""Given matrices, in every form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.experimental import sparse as jsparse

import eigenstream as es
import oracles
from conftest import check_refused
from data import FEW
from eigenstream.core import players

pytestmark = pytest.mark.usefixtures("x64")
A_, B_ = oracles.pencil(np.linspace(-1, 2, 8))


FORMS = {
    "numpy": lambda M: M,
    "csr": scipy.sparse.csr_matrix,
    "coo array": scipy.sparse.coo_array,
    "operator": sla.aslinearoperator,
    "jax": jnp.asarray,
    "bcoo": lambda M: jsparse.BCOO.fromdense(jnp.asarray(M)),
    "function": lambda M: lambda v: jnp.asarray(M) @ v,
}


ALIKE = [(form, form) for form in FORMS]
MIXED = [(a, b) for a in FORMS for b in [*FORMS, None] if a != b]


@pytest.mark.parametrize(("form_a", "form_b"), [*ALIKE, *(pytest.param(*f, marks=pytest.mark.slow) for f in MIXED)])
def test_matrices_in_every_form(form_a, form_b):
    B = None if form_b is None else FORMS[form_b](B_)
    problem = es.problems.matrices(FORMS[form_a](A_), B, size=8)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    found = jax.jit(lambda p, V: p.products(None, V))(problem, V)
    oracles.assert_products(found, V, A_, np.eye(8) if form_b is None else B_)
    exact = es.solve(problem, None, 3, solver="exact")
    lam, _ = oracles.leading(A_, None if form_b is None else B_, 3)
    np.testing.assert_allclose(exact.eigenvalues, lam, atol=1e-8)


@pytest.mark.parametrize("form", ["numpy", "csr", "jax", "bcoo"])
def test_ridge_on_matrices(form):
    problem = es.problems.matrices(FORMS[form](A_), FORMS[form](B_), ridge=0.5)
    V = players.normal(jax.random.key(0), 3, problem.template(None))
    oracles.assert_products(problem.products(None, V), V, A_, oracles.ridged(B_, 0.5))
    if form in ("numpy", "csr"):
        lam, _ = oracles.leading(A_, oracles.ridged(B_, 0.5), 3)
        np.testing.assert_allclose(es.solve(problem, None, 3, solver="exact").eigenvalues, lam, atol=1e-10)


MISTAKES = {
    "data for matrices": (lambda: es.solve(es.problems.matrices(np.eye(3)), [FEW], 2), "batches=None"),
    "ridge on an operator": (
        lambda: es.problems.matrices(scipy.sparse.linalg.aslinearoperator(np.eye(3)), ridge=0.1),
        "hides",
    ),
    "a negative ridge on matrices": (lambda: es.problems.matrices(np.eye(2), ridge=-2), "ridge=-2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

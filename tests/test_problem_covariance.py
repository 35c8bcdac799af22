"""PCA, CCA, PLS and multiview CCA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data
import eigenstream as es
import oracles
from conftest import check_refused
from data import FEW
from eigenstream.core import players
from eigenstream.solvers.paper import direction

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(64, d)), jnp.float32) for d in (30, 20))
V = tuple(jnp.asarray(RNG.normal(size=(4, d)), jnp.float32) for d in (30, 20))


@pytest.mark.parametrize("center", [True, False, "running"])
@pytest.mark.parametrize("kind", ["pca", "cca", "pls", "multiview"])
def test_inner_products_of_players_come_from_scores(kind, center):
    problem = getattr(es.problems, kind)(center=center)
    views = {"pca": X, "multiview": (X, Y, X[:, :7])}.get(kind, (X, Y))
    W = {"pca": V[0], "multiview": (*V, V[0][:, :7])}.get(kind, V)
    memory = problem.observe(problem.start(views), views)
    [(p, _)] = problem.estimate(memory, views, W, False)
    assert p.in_A is not None
    np.testing.assert_allclose(p.VAV(W), players.gram(W, p.AV), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(p.VBV(W), players.gram(W, p.BV), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(p.vBv(W), players.dot(W, p.BV), rtol=1e-4, atol=1e-4)
    bare = es.problems.Products(*p)
    norms = players.dot(W, p.BV)
    for a, b in zip(*(jax.tree.leaves(direction(W, [(q, q)], p.BV, norms)) for q in (p, bare)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("x64")
def test_leaves_of_a_view_may_have_any_shape():
    X, Y = data.X[:60], data.Y[:60]
    images, extra = X[:, :4].reshape(60, 2, 2), X[:, 4:]
    structured, flat = {"conv": images, "dense": extra}, X
    problem = es.problems.cca(ridge=0.1)
    V = oracles.drawn(problem, (structured, Y))
    assert V[0]["conv"].shape == (3, 2, 2)
    oracles.assert_products(oracles.batch_products(problem, (structured, Y), V), V, *oracles.views([X, Y], ridge=0.1))
    by_leaf, by_matrix = (es.solve(problem, [(view, Y)], 2) for view in (structured, flat))
    np.testing.assert_allclose(by_leaf.eigenvalues, by_matrix.eigenvalues, rtol=1e-12)
    assert by_leaf.eigenvectors[0]["conv"].shape == (2, 2, 2)


MISTAKES = {
    "one view": (lambda: es.solve(es.problems.cca(), [FEW], 2), "tuple of 2 views"),
    "three views for two": (
        lambda: es.solve(es.problems.cca(), [(FEW, FEW[:, :3], FEW[:, :3])], 2),
        "3 views: give a tuple of 2",
    ),
    "one view for many": (lambda: es.solve(es.problems.multiview(), [(FEW,)], 2), "two or more"),
    "ridge": (lambda: es.problems.pca(ridge=-1), "ridge=-1"),
    "center": (lambda: es.problems.cca(center="maybe"), "center='maybe'"),
    "an infinite ridge": (lambda: es.problems.pca(ridge=np.inf), "ridge=inf"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

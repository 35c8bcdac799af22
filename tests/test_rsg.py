"""RSG+: the fixed point of its paper, its pull and its manifolds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
from conftest import check_refused
from data import FEW, captured, two_views
from eigenstream.solvers import RSGPlus
from eigenstream.solvers.rsg import Factors, towards_span

pytestmark = pytest.mark.usefixtures("x64")


def test_rsg_plus_rests_where_its_paper_says():
    """At the leading singular subspaces of Cxy its gradient is normal to the manifold, and a symmetric population
    pulls a principal subspace nowhere."""
    X, Y = two_views()
    C = X.T @ Y / len(X)
    U, s, Wt = np.linalg.svd(C)
    Qx, Qy = jnp.asarray(U[:, :2]), jnp.asarray(Wt[:2].T)
    G = -C @ Qy
    tangent = G - Qx @ (G.T @ Qx)
    assert np.abs(tangent).max() < 1e-10 * s[0]
    skew = Qx.T @ C @ Qy
    np.testing.assert_allclose(skew, skew.T, atol=1e-10 * s[0])
    # Blocks mirrored in the subspace, x and its reflection, cancel.
    rng = np.random.default_rng(1)
    block = jnp.asarray(rng.normal(size=(2, 8)))
    inside = block @ Qx @ Qx.T
    mirrored = 2 * inside - block
    pulls = towards_span(Qx, block), towards_span(Qx, mirrored)
    assert np.abs(pulls[0]).max() > 0.1
    np.testing.assert_allclose(pulls[0] + pulls[1], 0, atol=1e-4)
    np.testing.assert_allclose(towards_span(Qx, inside), 0, atol=1e-4)


def test_the_pull_of_a_block_reaches_its_span():
    """Following the geodesic of length 1 along the tangent ends in the span of the block."""
    rng = np.random.default_rng(0)
    Q = jnp.linalg.qr(jnp.asarray(rng.normal(size=(7, 2))))[0]
    block = jnp.asarray(rng.normal(size=(2, 7)))
    P, angle, Rt = jnp.linalg.svd(towards_span(Q, block), full_matrices=False)
    end = (Q @ Rt.T * jnp.cos(angle) + P * jnp.sin(angle)) @ Rt
    outside = end - block.T @ jnp.linalg.lstsq(block.T, end)[0]
    assert np.abs(outside).max() < 1e-4


@pytest.mark.slow
def test_rsg_plus_is_biased_unless_canonical_directions_are_principal():
    for agree in (True, False):
        X, Y = two_views(agree=agree)
        batches = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100)]
        solver = RSGPlus(warm_steps=len(batches))
        result = es.solve(es.problems.cca(), batches, 2, solver=solver, max_epochs=2)
        assert (captured((X, Y), result.V, 2) > 0.97) == agree
        if agree:
            scores = X @ result.V[:8], Y @ result.V[8:]
            found = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores[0].T, scores[1].T, strict=True)]
            np.testing.assert_allclose(found, result.eigenvalues, atol=0.05)


@pytest.mark.slow
def test_rsg_plus_frames_stay_on_their_manifolds():
    X, Y = two_views(2000)
    solver, problem = RSGPlus(), es.problems.cca()
    state = solver.init(problem, (X, Y), 2, jax.random.key(0))
    step = jax.jit(partial(solver.step, problem))
    for i in range(0, 2000, 100):
        state, _ = step(state, (X[i : i + 100], Y[i : i + 100]))
    for f in state.views:
        assert isinstance(f, Factors)
        np.testing.assert_allclose(f.Q.T @ f.Q, np.eye(2), atol=1e-12)
        np.testing.assert_allclose(f.T.T @ f.T, np.eye(2), atol=1e-12)


MISTAKES = {
    "RSG+ elsewhere": (lambda: es.solve(es.problems.pca(), [FEW], 1, solver=RSGPlus()), "two-view CCA"),
    "RSG+ with leaves": (
        lambda: es.solve(es.problems.cca(), [({"a": FEW}, FEW.reshape(50, 2, 2))], 1, solver=RSGPlus()),
        "flat",
    ),
    "RSG+ and sparse": (
        lambda: es.solve(es.problems.cca(), [(scipy.sparse.csr_matrix(FEW), FEW[:, :3])], 1, solver=RSGPlus()),
        "dense views",
    ),
    "tol for RSG+": (lambda: es.solve(es.problems.cca(), [(FEW, FEW)], 1, RSGPlus(), tol=0.1), "tol"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])

"""Every solver finds the eigenvectors of prescribed spectra; every baseline has its own paper's fixed point."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
import oracles
from conftest import quick
from eigenstream.core import players, views
from eigenstream.solvers import SGHA, EckartYoung, Exact, Oja, Paper, RSGPlus, Smooth
from eigenstream.solvers.rsg import Factors, towards_span

pytestmark = pytest.mark.usefixtures("x64")

K = 3
#: Solver, whether it orders the eigenvectors, whether it needs B = I.
SOLVERS = {
    "exact": (Exact(), True, False),
    "algorithm 1": (Paper(learning_rate=0.4, averaging=None), True, False),
    "algorithm 2": (Paper(learning_rate=0.3, averaging=1.0), True, False),
    "algorithm 3": (Smooth(learning_rate=0.3, averaging=0.2, floor=0.1, ceiling=10.0), True, False),
    "eckart-young": (EckartYoung(learning_rate=0.05, shift=0.0, polish=True), True, False),
    "eckart-young nested": (EckartYoung(learning_rate=0.05, shift=0.0, nested=True), True, False),
    "sgha": (SGHA(learning_rate=0.3, shift=0.0, polish=True), True, False),
    "sgha ordered": (SGHA(learning_rate=0.3, shift=0.0, ordered=True), True, False),
    "oja": (Oja(learning_rate=5.0, shift=0.0), True, True),
}


@pytest.mark.parametrize("d", quick((3, 20, 100, 500), 3))
@pytest.mark.parametrize("kind", oracles.SPECTRA)
@pytest.mark.parametrize("name", SOLVERS)
def test_prescribed_spectra(name, kind, d):
    solver, ordered, identity = SOLVERS[name]
    lam = oracles.spectrum(kind, d, K)
    A, B = oracles.pencil(lam, seed=d, identity=identity)
    _, V = oracles.leading(A, B, K)
    options = {} if isinstance(solver, Exact) else {"max_steps": 6000, "tol": 1e-9}
    result = es.solve(es.problems.matrices(A, B), None, K, solver=solver, **options)
    np.testing.assert_allclose(result.eigenvalues, lam[:K], atol=2e-4 if kind == "clustered" else 1e-6)
    assert oracles.same_space(result.V, V, B) < 1e-8
    if ordered and kind in ("stepped", "decaying"):
        assert es.metrics.angles(result.V, V, B).max() < 1e-4
    norms = np.einsum("ik,ik->k", result.V, result.V if B is None else B @ result.V)
    np.testing.assert_allclose(norms, 1, atol=1e-6)


def at_fixed_point(solver, problem, V, k):
    state = solver.init(problem, None, k, jax.random.key(0))._replace(V=V)
    return solver.step(problem, state, None)[0].V


def pencil():
    lam = np.array([0.9, 0.7, 0.5, 0.2, 0.1, 0.05])
    A, B = oracles.pencil(lam, 5.0)
    return lam, A, B, oracles.leading(A, B, K)[1].T


ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(K, K)))[0]


def test_eckart_young_rests_at_eigenvectors_of_squared_norm_lambda():
    lam, A, B, V = pencil()
    problem = es.problems.matrices(A, B)
    W = jnp.asarray(np.sqrt(lam[:K])[:, None] * V)
    for nested in (False, True):
        solver = EckartYoung(shift=0.0, nested=nested)
        np.testing.assert_allclose(at_fixed_point(solver, problem, W, K), W, atol=1e-12)
    # The loss knows only the subspace: a rotation of W rests too, but not in the ordered form.
    turned = ROTATION @ W
    np.testing.assert_allclose(at_fixed_point(EckartYoung(shift=0.0), problem, turned, K), turned, atol=1e-12)
    moved = at_fixed_point(EckartYoung(shift=0.0, nested=True), problem, turned, K)
    assert np.abs(moved - turned).max() > 1e-2


def test_eckart_young_descends_the_gradient_of_its_loss():
    _, A, B, _ = pencil()
    W = jnp.asarray(np.random.default_rng(0).normal(size=(6, K)))

    def loss(W):
        return -2 * jnp.trace(W.T @ A @ W) + jnp.trace(jnp.linalg.matrix_power(W.T @ B @ W, 2))

    problem = es.problems.matrices(A, B)
    first = problem.products(None, W.T)
    found = EckartYoung().direction(W.T, (), [(first, first)])
    np.testing.assert_allclose(found, -jax.grad(loss)(W).T, rtol=1e-10)


def test_sgha_rests_at_b_orthonormal_eigenvectors():
    _, A, B, V = pencil()
    problem, V = es.problems.matrices(A, B), jnp.asarray(V)
    for ordered in (False, True):
        np.testing.assert_allclose(at_fixed_point(SGHA(shift=0.0, ordered=ordered), problem, V, K), V, atol=1e-12)
    turned = ROTATION @ V
    np.testing.assert_allclose(at_fixed_point(SGHA(shift=0.0), problem, turned, K), turned, atol=1e-12)
    assert np.abs(at_fixed_point(SGHA(shift=0.0, ordered=True), problem, turned, K) - turned).max() > 1e-3
    # Eigenvectors of another length do not rest.
    assert np.abs(at_fixed_point(SGHA(shift=0.0), problem, 2 * V, K) - 2 * V).max() > 1e-2


def test_oja_rests_at_ordered_eigenvectors_and_keeps_orthonormal_rows():
    A, _ = oracles.pencil(np.array([0.9, 0.7, 0.5, 0.2, 0.1]), identity=True)
    V = jnp.asarray(oracles.leading(A, None, K)[1].T)
    problem, solver = es.problems.matrices(A), Oja(shift=0.0)
    np.testing.assert_allclose(at_fixed_point(solver, problem, V, K), V, atol=1e-12)
    start = solver.init(problem, None, K, jax.random.key(0)).V
    moved = at_fixed_point(solver, problem, start, K)
    np.testing.assert_allclose(moved @ moved.T, np.eye(K), atol=1e-12)
    Q, R = np.linalg.qr((start + 0.1 * start @ A).T)
    np.testing.assert_allclose(moved, (Q * np.sign(np.diag(R))).T, atol=1e-12)


def two_views(n=20_000, agree=True):
    """Views whose leading principal directions are the canonical ones, or are not."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(n, 2))
    blocks = []
    for d in (8, 6):
        rho = np.sqrt([0.9, 0.6])
        signal = rho * shared + np.sqrt(1 - rho**2) * rng.normal(size=(n, 2))
        noise = rng.normal(size=(n, d - 2)) * (1.0 if agree else 6.0)
        Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
        blocks.append(np.c_[[4.0, 3.0] * signal, noise] @ Q)
    return blocks


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


def captured(X, Y, result):
    exact = es.solve(es.problems.cca(), [(X, Y)], 2)
    V = result.V
    return es.metrics.tcc(X @ V[: X.shape[1]], Y @ V[X.shape[1] :], exact.eigenvalues)


@pytest.mark.slow
def test_rsg_plus_finds_canonical_directions_that_are_principal_and_is_biased_elsewhere():
    for agree in (True, False):
        X, Y = two_views(agree=agree)
        batches = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100)]
        solver = RSGPlus(warm_steps=len(batches))
        result = es.solve(es.problems.cca(), batches, 2, solver=solver, max_epochs=2)
        assert (captured(X, Y, result) > 0.97) == agree
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


STREAMING = {
    "paper": Paper(learning_rate=0.3),
    "smooth": Smooth(learning_rate=0.3, floor=1e-2, ceiling=1e2),
    "eckart-young": EckartYoung(learning_rate=0.01, polish=True),
    "sgha": SGHA(learning_rate=0.05, polish=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMING)
def test_streams_of_two_views(name):
    X, Y = two_views(40_000)
    X, Y = X / 4, Y / 4
    batches = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, len(X), 100)]
    result = es.solve(es.problems.cca(), batches, 2, solver=STREAMING[name])
    assert captured(X, Y, result) > 0.97
    assert result.n_samples_seen == 40_000


@pytest.mark.parametrize("name", quick([*STREAMING, "oja"], "paper"))
def test_state_keeps_its_structure_and_types_through_scan_and_cond(name):
    solver = STREAMING.get(name, Oja())
    problem = es.problems.pca(center="running") if name == "oja" else es.problems.cca(center="running")
    X = np.random.default_rng(0).normal(size=(5, 40, 6))
    data = X if name == "oja" else (X, X[..., :4])
    batch = jax.tree.map(lambda leaf: leaf[0], data)
    state = solver.init(problem, batch, 2, jax.random.key(0))

    def body(state, batch):
        return solver.step(problem, state, batch)

    scanned, _ = jax.lax.scan(body, state, data)
    stepped, step = state, jax.jit(body)
    for i in range(5):
        stepped, _ = step(stepped, jax.tree.map(lambda leaf, i=i: leaf[i], data))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    kept = jax.lax.cond(True, lambda: body(state, batch)[0], lambda: state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), kept) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


def test_float32_stays_float32():
    with jax.enable_x64(False):
        X = np.random.default_rng(0).normal(size=(400, 6))
        for solver in (Paper(), Smooth(), EckartYoung(), SGHA()):
            result = es.solve(es.problems.cca(), [(X, X[:, :4])], 2, solver=solver)
            floats = [leaf for leaf in jax.tree.leaves(result.state) if leaf.dtype.kind == "f"]
            assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}


def test_shards_average_directions_and_use_every_row():
    """M machines on equal rows is M = 1 on one machine's rows; uneven ones still sum to the batch."""
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(12, 5)), rng.normal(size=(12, 4))
    problem = es.problems.cca(center=False)
    one = Paper(shards=1)
    three = Paper(shards=3)
    state = one.init(problem, (X, Y), 2, jax.random.key(0))
    tripled = (np.vstack([X] * 3), np.vstack([Y] * 3))
    a, b = one.step(problem, state, (X, Y))[0], three.step(problem, state, tripled)[0]
    np.testing.assert_allclose(players.to_matrix(a.V), players.to_matrix(b.V), atol=1e-12)
    assert [views.n_rows(part) for part in views.split((X[:11], Y[:11]), (1, 1, 1))] == [3, 4, 4]

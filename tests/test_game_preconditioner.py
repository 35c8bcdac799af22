"""The sketch of all rows and the diagonal in the place of B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import eigenstream as es
from data import GAME, POWER, batched
from eigenstream.solvers.game import move, preconditioner
from eigenstream.solvers.game.preconditioner import SHRUNK, Diagonal, Sketch

PCA, CCA = es.problems.lda(n_classes=2), es.problems.cca()
OBSERVE = jax.jit(Sketch.observe)
REFRESHED = jax.jit(lambda sketch, problem: sketch.factor(problem, False, 1).metric)


def learned(views, parts, rank, ridge=0.0, problem=PCA):
    """A sketch of rows that came in several parts, before the last one is decomposed."""
    sketch = Sketch.empty(tuple(jax.ShapeDtypeStruct(x.shape[1:], jnp.float32) for x in views), rank, ridge)
    for i, part in enumerate(zip(*(np.split(x, parts) for x in views), strict=True)):
        sketch = REFRESHED(sketch, problem) if i else sketch
        sketch = OBSERVE(sketch, tuple(map(jnp.asarray, part)), np.inf)
    return sketch


def solved(X, G, rank=16, exactly=False, parts=4, ridge=0.0):
    return np.asarray(learned([X], parts, rank, ridge).factor(PCA, exactly, 1).solves[0](jnp.asarray(G)))


def rows(n, deviations, seed=0):
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(len(deviations), len(deviations))))[0]
    return (rng.normal(size=(n, len(deviations))) * deviations @ Q).astype("f4")


def matrix(Z, delta):
    return np.asarray(Z, float).T @ np.asarray(Z, float) + np.diag(np.asarray(delta, float))


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_a_sketch_solves_like_its_matrix(ridge):
    sketch = learned([rows(400, np.r_[5, 4, 3, np.full(57, 0.3)])], 20, 20, ridge)
    found = sketch.factor(PCA, False, 1)
    P = matrix(found.metric.Z[0], found.metric.delta[0])
    G = np.random.default_rng(1).normal(size=(3, 60)).astype("f4")
    expected = np.linalg.solve(P, G.T).T
    np.testing.assert_allclose(found.solves[0](jnp.asarray(G)), expected, rtol=1e-3, atol=1e-3 * abs(expected).max())


def test_a_sketch_holds_the_leading_moments_of_all_rows():
    """Rows of 12 dimensions are held exactly; of others the floor is the variance that is left."""
    low = rows(2000, np.r_[np.linspace(3, 1, 12), np.zeros(48)])
    sketch = learned([low], 100, 20).factor(PCA, False, 1).metric
    assert float(sketch.weight) == 2000
    Z = np.asarray(sketch.Z[0], float)
    np.testing.assert_allclose(Z.T @ Z, low.T.astype(float) @ low / 2000, atol=1e-3)
    noisy = rows(2000, np.r_[np.full(8, 5.0), np.full(92, 0.2)])
    floor = float(learned([noisy], 50, 40).factor(PCA, False, 1).metric.floor)
    assert 0.5 < floor / (0.2**2 / (noisy**2).mean()) < 2


def test_units_of_the_columns_do_not_matter():
    """Not even where their fourth powers overflow or vanish in float32."""
    X, units = rows(2000, np.linspace(2, 0.2, 24)), 2.0 ** np.random.default_rng(0).integers(-40, 40, 24)
    G = np.random.default_rng(1).normal(size=(2, 24)).astype("f4")
    plain = solved(X, G, 10, parts=100)
    scaled = solved((X * units).astype("f4"), (G * units).astype("f4"), 10, parts=100)
    np.testing.assert_allclose(scaled * units, plain, rtol=2e-3, atol=2e-3 * abs(plain).max())


def test_few_rows_leave_room_in_a_sketch():
    """Fewer rows than its rank: the floor is not that of the empty rows."""
    X = rows(60, np.ones(100))
    sketch = learned([X], 2, 40).factor(PCA, False, 1).metric
    early = learned([X[:20]], 1, 40).factor(PCA, False, 1).metric
    assert float(early.floor) > 0.1
    assert float(sketch.floor) > 0.1
    assert float(sketch.weight) == 60
    later = learned([np.concatenate([X[:20], rows(2000, np.ones(100), 1)[:180]])], 10, 40).factor(PCA, False, 1).metric
    assert (np.asarray(later.Z[0] ** 2).sum(1) > 0.1).all()


def test_columns_without_values_do_not_count_as_variance_outside():
    X = rows(2000, np.r_[np.full(8, 5.0), np.full(52, 0.2)])
    sparse = np.hstack([X, np.zeros((2000, 60), "f4")])
    plain, padded = (learned([x], 20, 20).factor(PCA, False, 1) for x in (X, sparse))
    np.testing.assert_allclose(float(padded.metric.rest), float(plain.metric.rest), rtol=0.05)
    np.testing.assert_allclose(float(padded.cover), float(plain.cover), rtol=0.05)


def test_a_sketch_forgets_with_a_horizon():
    old, new = rows(4000, np.full(30, 3.0)), rows(4000, np.ones(30), 1)
    sketch = Sketch.empty((jax.ShapeDtypeStruct((30,), jnp.float32),), 10, 0.0)
    for part in np.split(np.concatenate([old, new]), 80):
        sketch = REFRESHED(OBSERVE(sketch, (jnp.asarray(part),), 500.0), PCA)
    assert float((sketch.Z[0] ** 2).sum(1).max()) < 2


def test_a_refused_move_empties_the_sketch():
    state = es.solve(es.problems.cca(), batched(POWER)[:10], 4, es.solvers.Game(rank=40), memory_budget=1).state
    poisoned = state._replace(metric=state.metric._replace(inner=state.metric.inner * jnp.nan, held=jnp.float32(9)))
    after = es.solvers.Game(rank=40).move(es.problems.cca(), poisoned)
    assert int(after.refused) == 1
    assert np.isfinite(np.asarray(after.metric.inner)).all()


def test_a_column_that_few_rows_touch_counts_as_larger():
    """Otherwise one such row would decide a move."""
    calm = rows(1000, np.ones(100))
    rare = calm.copy()
    rare[:, 0] = 30 * (np.arange(1000) == 321)
    e = np.eye(100, dtype="f4")[:1]

    def moved(X):
        return float(solved(X, e, parts=10)[0, 0] * (X[:, 0] ** 2).mean())

    assert moved(rare) < 0.1 * moved(calm)


def test_columns_without_values_and_few_rows_are_finite():
    X = rows(6, np.ones(12))
    X[:, 5] = 0
    for exactly in (False, True):
        assert np.isfinite(solved(X, np.ones((1, 12), "f4"), exactly=exactly, parts=1)).all()


def test_leverages_are_those_of_new_rows():
    """κ = E[h²] / E[h] of rows that P does not hold, and their mean over the dimension."""
    X = rows(6000, np.r_[np.full(20, 3.0), np.full(180, 0.3)])
    before = learned([X[:5900]], 59, 100)
    known = before.factor(PCA, False, 1).metric
    found = known.observe((jnp.asarray(X[5900:]),), np.inf).factor(PCA, False, 1)
    P = matrix(known.Z[0], known.delta[0])
    h = (X[5900:] * np.linalg.solve(P, X[5900:].T).T).sum(1)
    assert 0.95 < float(found.kappa) / ((h**2).mean() / h.mean()) < 1.05
    assert 0.95 < float(found.cover) / (h.mean() / 200) < 1.05


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dims", [(30, 24), (18, 15, 20)])
def test_the_eigenvectors_of_a_sketch_are_those_of_its_matrices(dims, sign):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1500, 6))
    views = [(z @ rng.normal(size=(6, d)) + rng.normal(size=(1500, d))).astype("f4") for d in dims]
    sketch = learned(views, 50, 20, problem=CCA)
    found = sketch.factor(CCA.with_sign(sign), False, 5)
    E, PE, lam = found.sketched
    Z = [np.asarray(z, float) for z in found.metric.Z]
    blocks = zip(Z, found.metric.delta, strict=True)
    P = scipy.linalg.block_diag(*(matrix(z, SHRUNK * np.asarray(d)) for z, d in blocks))
    A = sign * np.block([[0 * a.T @ b if a is b else a.T @ b for b in Z] for a in Z])
    E, PE = (np.concatenate(x, 1) for x in (E, PE))
    np.testing.assert_allclose(PE, E @ P, atol=2e-3 * abs(PE).max())
    np.testing.assert_allclose(E @ PE.T, np.eye(5), atol=5e-3)
    np.testing.assert_allclose(np.diag(E @ A @ E.T), lam, atol=5e-3)
    np.testing.assert_allclose(lam, scipy.linalg.eigh(A, P, eigvals_only=True)[::-1][:5], atol=2e-3)


def leading_factors(n=3000, d=600, latent=60):
    """Two views of correlated factors and little noise: the leading directions hold the correlation."""
    rng = np.random.default_rng(0)
    rho, z = np.linspace(0.95, 0.5, 4), rng.normal(size=(n, 4))
    views = []
    for _ in range(2):
        e = rng.normal(size=(n, latent))
        e[:, :4] = np.sqrt(rho) * z + np.sqrt(1 - rho) * e[:, :4]
        rotation, maps = (np.linalg.qr(rng.normal(size=(m, latent)))[0] for m in (latent, d))
        spread = np.arange(1, latent + 1) ** -0.5
        views.append(((e @ rotation * spread) @ maps.T + 0.1 * spread[-1] * rng.normal(size=(n, d))).astype("f4"))
    return views


def heldout(views, **options):
    jax.clear_caches()
    result = es.solve(es.problems.cca(), batched(views), 4, es.solvers.Game(rank=160), memory_budget=1, **options)
    assert int(result.state.refused) == 0
    return abs(result.heldout.sum())


@pytest.mark.slow
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_eigenvectors_of_the_sketch_become_players_where_rows_prefer_them(which, monkeypatch):
    views = leading_factors()
    found = heldout(views, which=which)
    monkeypatch.setattr(move, "_quotients", lambda state, start, count: jnp.zeros(count))
    assert found > heldout(views, which=which) + 0.2
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.slow
def test_eigenvectors_that_are_not_finite_are_not_tried(monkeypatch):
    views, known = leading_factors(), preconditioner._eigenvectors
    monkeypatch.setattr(preconditioner, "_eigenvectors", lambda *a: jax.tree.map(lambda x: x * jnp.nan, known(*a)))
    assert heldout(views) > 1.5
    monkeypatch.undo()
    jax.clear_caches()


def test_a_diagonal_is_finite_where_no_row_had_a_value():
    metric = Diagonal(jnp.array([1.0, 0.0]), jnp.array(4.0), jnp.array(1.0))
    assert np.isfinite(np.asarray(metric.factor(PCA, False, 1).solves[0](jnp.ones((1, 2))))).all()


@pytest.mark.slow
def test_sketches_go_on_learning_with_a_half_life():
    solver = es.solvers.Game(rank=32)
    later = [v * np.float32(3) for v in POWER]
    stream = batched(POWER) + batched(later)
    for half_life, least in ((500, 8.0), (None, 4.0)):
        result = es.solve(es.problems.cca(), stream, 2, solver, half_life=half_life, memory_budget=1)
        squares = np.asarray(result.state.metric.squares[0]).mean() / (POWER[0] ** 2).mean()
        assert least < squares < 9.5
    assert GAME["memory_budget"] == 1

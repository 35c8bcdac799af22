"""The exact solution of a pencil on the host and on a device: against LAPACK, for every problem."""

import operator
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
import oracles
from eigenstream.core import device_moments, krylov, pencil, players, whitening
from eigenstream.core.device_moments import FAST_FLOAT64, DeviceMoments
from eigenstream.core.moments import Moments, NotFinite
from eigenstream.core.precision import wide
from eigenstream.run.engine import Setup
from eigenstream.run.exact_engine import ExactEngine, name_memory
from eigenstream.run.placement import Placement
from eigenstream.streams.blocks import Blocks
from planted import log_uniform, planted

rng = np.random.default_rng(0)
LATENT = rng.normal(size=(4000, 12))


def rows(d, seed, scale=1.0):
    """Columns with common latent variables and independent noise."""
    own = np.random.default_rng(seed)
    return (LATENT @ own.normal(size=(12, d)) * np.geomspace(1, 0.2, d) + own.normal(size=(4000, d))) * scale


X, Y, Z = rows(130, 1), rows(120, 2), rows(110, 3)
CODES = (LATENT[:, 0] > 0).astype(int) + 2 * (LATENT[:, 1] > 0.5)
PROBLEMS = {
    "pca": (es.problems.pca(), X, oracles.pca(X)),
    "pca, ridge": (es.problems.pca(ridge=0.5), X, oracles.pca(X, ridge=0.5)),
    "pca, not centred": (es.problems.pca(center=False), X + 1, oracles.pca(X + 1, center=False)),
    "cca": (es.problems.cca(), (X, Y), oracles.views([X, Y])),
    "cca, ridge": (es.problems.cca(ridge=0.1), (X, Y), oracles.views([X, Y], ridge=0.1)),
    "multiview": (es.problems.multiview(), (X, Y, Z), oracles.views([X, Y, Z])),
    "pls": (es.problems.pls(), (X, Y), oracles.pls(X, Y)),
    "lda": (es.problems.lda(4), (X, CODES), oracles.lda(X, CODES)),
    "ica": (es.problems.ica(), X[:, :120], oracles.ica(X[:, :120])),
}


MESH = jax.make_mesh((1, 1), ("data", "feature"), axis_types=2 * (jax.sharding.AxisType.Auto,))
WHERE = ["host", "device", "mesh"]


@pytest.fixture(autouse=True)
def sharded(monkeypatch):
    """Small sums on a mesh are solved where they are, as large ones."""
    monkeypatch.setattr(device_moments, "GATHERED", 0)


def summed(problem, batches, k, where):
    """The exact solver's state after these batches, with its sums on the host, on a device or on a mesh."""
    solver, batches = es.solvers.Exact(), [problem.accept(batch) for batch in batches]
    state = solver.init(problem, batches[0], k, mesh=MESH if where == "mesh" else None)
    if where == "device" and hasattr(state.statistics, "on_device"):
        state = state._replace(statistics=state.statistics.on_device(None))
    for batch in batches:
        state = solver.step(problem, state, batch)
    return state


def solved(problem, batches, k, where, which="largest"):
    """Eigenvalues, vectors, residuals and the ranks of B."""
    state = summed(problem, batches, k, where)
    if where != "host" and hasattr(state.statistics, "moments"):
        assert isinstance(state.statistics.moments, DeviceMoments)
    found, V, info, _ = es.solvers.Exact().solve(problem, state, which, 4000)
    return found.eigenvalues, players.to_matrix(V), info.residuals, found.ranks


def batched(batch, size=700):
    return [jax.tree.map(operator.itemgetter(slice(i, i + size)), batch) for i in range(0, 4000, size)]


@pytest.mark.parametrize(("which", "where"), [*(("largest", where) for where in WHERE), ("smallest", "host")])
@pytest.mark.parametrize("name", PROBLEMS)
def test_leading_pairs_are_those_of_lapack(name, which, where):
    problem, batch, (A, B) = PROBLEMS[name]
    k = 3
    wanted = oracles.leading(A, B, len(A), which)[0]
    lam, V, residuals, _ = solved(problem, batched(batch), k, where, which)
    np.testing.assert_allclose(lam, wanted[:k], atol=1e-10 * abs(wanted).max())
    np.testing.assert_allclose(V.T @ B @ V, np.eye(k), atol=1e-10)
    rest = np.abs(A @ V - B @ V * lam).max()
    assert rest < 1e-8 * np.abs(A).sum(1).max() * np.abs(V).max()
    assert residuals.max() < 1e-9


@pytest.mark.parametrize("where", WHERE)
def test_many_pairs_and_the_largest_magnitudes_are_those_of_lapack(where):
    problem, batch, (A, B) = PROBLEMS["ica"]
    wanted = np.sort(np.abs(oracles.leading(A, B, 120)[0]))[::-1]
    lam = solved(problem, batched(batch), 20, where, "magnitude")[0]
    np.testing.assert_allclose(np.abs(lam), wanted[:20], atol=1e-10 * wanted[0])
    A, B = oracles.views([X, Y])
    lam = solved(es.problems.cca(), batched((X, Y)), None, where)[0]
    np.testing.assert_allclose(lam, oracles.leading(A, B, 120)[0], atol=1e-10)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_singular_b_has_the_answer_of_its_independent_columns(where, dtype):
    base = rng.normal(size=(4000, 60)).astype(dtype)
    turn = rng.integers(-2, 3, size=(60, 49)).astype(dtype)
    redundant = np.c_[base, base @ turn, np.full(4000, 3.0, dtype)]
    other = (base[:, :40] + rng.normal(size=(4000, 40))).astype(dtype)
    lam, V, residuals, ranks = solved(es.problems.cca(), batched((redundant, other)), 4, where)
    A, B = oracles.views([base.astype(np.float64), other.astype(np.float64)])
    assert ranks == [60, 40]
    np.testing.assert_allclose(lam, oracles.leading(A, B, 4)[0], atol=1e-5 if dtype == np.float32 else 1e-10)
    assert np.isfinite(V).all()
    assert residuals.max() < 1e-6
    with pytest.raises(ValueError, match=r"k=45 is too large: B has ranks \[60, 40\]"):
        solved(es.problems.cca(), batched((redundant, other)), 45, where)


@pytest.mark.parametrize("where", WHERE)
def test_units_of_a_condition_of_ten_to_the_twelve_and_far_means_change_nothing(where):
    """Variances from 1 to 10¹², and means of 10⁸ standard deviations that float64 holds exactly."""
    exact = [np.round(view * 2.0**10) / 2.0**10 for view in (X, Y)]
    wanted = oracles.leading(*oracles.views(exact), 4)[0]
    units = [2.0 ** np.linspace(0, 20, view.shape[1]).round() for view in exact]
    far = [(view + 2.0**27) * unit for view, unit in zip(exact, units, strict=True)]
    lam, _, residuals, _ = solved(es.problems.cca(), batched(tuple(far)), 4, where)
    np.testing.assert_allclose(lam, wanted, atol=1e-10)
    assert residuals.max() < 1e-9


def test_float32_products_reach_the_rounding_of_the_rows():
    moments = DeviceMoments(130, short=True)
    for batch in batched(X.astype(np.float32)):
        moments.add(batch)
    wanted = np.cov(X.astype(np.float32).astype(np.float64).T)
    found = moments.on_host().panel(0, 130, 3999)
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
    # The sum of 4,000 products in float32 alone would be off by more.
    assert np.abs(moments.group_means()[0] - X.mean(0)).max() < 1e-6


@pytest.mark.parametrize("condition", [10.0, 1e6])
def test_float32_products_are_within_a_millionth_or_warn(condition):
    views = planted(8000, (130, 120), log_uniform(condition))
    problem, solver = es.problems.cca(), es.solvers.Exact()
    state = summed(problem, [views], 4, "device")
    wanted = solver.solve(problem, state, "largest", 8000)[0].eigenvalues
    moments = DeviceMoments(250, short=True).add(list(views))
    state = state._replace(statistics=replace(state.statistics, moments=moments))
    with pytest.warns(UserWarning, match="multiplies in float32") if condition > 1e4 else nullcontext():
        found = solver.solve(problem, state, "largest", 8000)[0].eigenvalues
    assert np.abs(found - wanted).max() < (1e-6 if condition < 1e4 else 1e-2)


def test_batches_on_the_device_stay_there_and_are_joined():
    problem = es.problems.cca()
    engine = ExactEngine(Setup(problem, es.solvers.Exact(), 2, (X, Y), placement=Placement(MESH)))
    engine.state = engine.state._replace(statistics=problem.statistics((X, Y), False).on_device(None))
    for x, y in batched((X.astype(np.float32), Y.astype(np.float32)), 100):
        engine.take((jnp.asarray(x), jnp.asarray(y)), 0, 100)
    queued = engine._blocks.rest()
    assert all(isinstance(view, jax.Array) and len(view) == 4000 for view in queued)
    engine.take(queued, 0, 4000)
    wanted = es.solve(problem, [(X.astype(np.float32), Y.astype(np.float32))], 2, "exact").eigenvalues
    np.testing.assert_allclose(engine.finish(4000, "", None).eigenvalues, wanted, rtol=1e-10)


def test_a_block_keeps_its_memory_while_others_are_filled():
    blocks = Blocks(10, valid=3)
    found = [block for i in range(12) for block in blocks.add(np.full((5, 2), i // 2))]
    assert len(found) == 6
    assert [set(block.ravel().tolist()) for block in found[-3:]] == [{3}, {4}, {5}]
    # Three blocks later the memory is used again.
    assert [set(block.ravel().tolist()) for block in found[:3]] == [{3}, {4}, {5}]


def test_a_triangle_is_inverted_by_halves():
    L = np.tril(np.random.default_rng(0).normal(size=(2100, 2100))) / 50 + np.eye(2100)
    with wide():
        found = np.asarray(whitening.inverse_triangle(jnp.asarray(L)))
    np.testing.assert_allclose(found @ L, np.eye(2100), atol=1e-10)


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        *((name, True) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2", "cpu")),
        *((name, False) for name in ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A1000", "Quadro P1000", "TPU v5")),
    ],
)
def test_devices_with_fast_float64_are_known_by_name(name, fast):
    assert bool(FAST_FLOAT64.search(name)) == fast


def test_a_device_without_memory_names_the_way_out():
    words = r"exact sums of 20000 features take 3.2 GB.*memory_budget.*mesh.*game"
    with pytest.raises(MemoryError, match=words), name_memory(20_000):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    with pytest.raises(jax.errors.JaxRuntimeError), name_memory(20_000):
        raise jax.errors.JaxRuntimeError("INTERNAL: another error")


def test_every_refused_block_is_reported_and_the_rest_is_summed():
    spoilt = [X[:500], np.where(np.arange(500)[:, None] == 3, np.nan, X[500:1000]), X[1000:1500]]
    moments = DeviceMoments(130)
    for rows in spoilt:
        moments.add(rows, stays=True)
    moments.add(spoilt[1], stays=True)
    for _ in range(2):
        with pytest.raises(NotFinite):
            moments.on_host()
    assert moments.n == 1000
    np.testing.assert_allclose(moments.on_host().panel(0, 130, 999), np.cov(np.r_[X[:500], X[1000:1500]].T), atol=1e-12)


def test_rows_that_are_not_finite_are_named_and_left_out():
    spoilt = X.copy()
    spoilt[1500, 3] = np.nan
    for where in WHERE:
        with pytest.raises(ValueError, match="batch holds NaN or infinity, first in its row 100"):
            solved(es.problems.pca(), batched(spoilt), 2, where)
    moments = DeviceMoments(130)
    moments.add(X[:2000])
    with pytest.raises(NotFinite):
        moments.add(spoilt[:2000]).on_host()
    np.testing.assert_allclose(moments.on_host().panel(0, 130, 1999), np.cov(X[:2000].T), atol=1e-12)


@pytest.mark.parametrize("groups", [1, 4])
def test_moments_on_a_device_are_those_on_the_host(groups):
    labels = CODES if groups > 1 else None
    host, device = Moments.empty(130, groups), DeviceMoments(130, groups)
    for lo, hi in ((0, 1), (1, 64), (64, 2100), (2100, 4000)):
        part = None if labels is None else labels[lo:hi]
        host, device = host.add(X[lo:hi] + 100, part), device.add(X[lo:hi] + 100, part)
    both = host, device.on_host()
    for name in ("counts", "means", "pilot"):
        np.testing.assert_allclose(*(getattr(moments, name) for moments in both), atol=1e-12)
    np.testing.assert_allclose(*(moments.panel(0, 130, 1.0) for moments in both), atol=1e-9)
    np.testing.assert_allclose(device.panel(20, 90, 7.0, True), host.panel(20, 90, 7.0, True), rtol=1e-12)
    np.testing.assert_allclose(device.total_scatter(), host.total_scatter(), rtol=1e-13)
    again = DeviceMoments.of(device.on_host()).add(X[:50] + 100, None if labels is None else labels[:50])
    np.testing.assert_allclose(again.n, 4050)


SPECTRA = {
    "gaps": np.linspace(1, 0, 600) ** 2,
    "a plateau wider than a block": np.r_[np.ones(30), np.linspace(0.9, 0, 570)],
    "rank three": np.r_[3.0, 2.0, 1.0, np.zeros(597)],
    "negative": -np.linspace(1, 2, 600),
    "zero": np.zeros(600),
}


def _times(diagonal, V):
    return diagonal[:, None] * V


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_iteration_finds_the_largest_of_any_spectrum(name, on_host):
    values = np.random.default_rng(1).permutation(SPECTRA[name])
    with wide():
        diagonal = values if on_host else jnp.asarray(values)
        found = krylov.largest(pencil.Reduced(diagonal, None, _times, 1), 600, 12, on_host)
        V = np.asarray(found.vectors)
    size = max(np.abs(values).max(), 1e-300)
    np.testing.assert_allclose(found.values, np.sort(values)[::-1][:12], atol=1e-10 * size)
    np.testing.assert_allclose(V.T @ V, np.eye(12), atol=1e-12)
    assert np.abs(values[:, None] * V - V * np.asarray(found.values)).max() <= 2e-10 * size


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("k", [3, 20])
def test_few_rows_are_solved_by_their_range(k, where):
    few = X[:20] * np.geomspace(1, 1e-5, 130)
    state = summed(es.problems.pca(), [few], k, where)
    found, V, info, _ = es.solvers.Exact().solve(es.problems.pca(), state, "largest", 20)
    wanted = oracles.leading(*oracles.pca(few), k)[0]
    assert found.method == "range of few rows"
    np.testing.assert_allclose(found.eigenvalues, wanted, rtol=1e-9, atol=1e-15 * wanted[0])
    np.testing.assert_allclose(players.to_matrix(V).T @ players.to_matrix(V), np.eye(k), atol=1e-12)
    assert info.residuals.max() < 1e-12
    # The smallest are not in the range.
    assert np.abs(solved(es.problems.pca(), [few], 3, where, "smallest")[0]).max() < 1e-14 * wanted[0]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("dx", "dy", "k"), [(130, 6, 3), (6, 120, 6), (130, 1, 1), (20, 100, 20)])
def test_views_of_unequal_width_are_solved_by_the_smaller(dx, dy, k, where):
    for problem, oracle in ((es.problems.cca(ridge=0.01), oracles.views), (es.problems.pls(), None)):
        batch = X[:, :dx], Y[:, :dy]
        A, B = oracles.pls(*batch) if oracle is None else oracle(batch, ridge=0.01)
        lam, V, residuals, _ = solved(problem, batched(batch), k, where)
        np.testing.assert_allclose(lam, oracles.leading(A, B, k)[0], atol=1e-10 * np.abs(A).max())
        np.testing.assert_allclose(V.T @ B @ V, np.eye(k), atol=1e-10)
        assert residuals.max() < 1e-9


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("n", [700, 790, 900])
def test_correlations_that_crowd_at_one_are_solved_by_an_inverse(n, where):
    """About as many rows as columns. With fewer rows, 90 correlations are 1; copied columns make one block singular.

    On a mesh such a block is decomposed.
    """
    few = rng.normal(size=(n, 400)), rng.normal(size=(n, 390))
    wanted = oracles.leading(*oracles.views(few), 1)[0]
    few = np.c_[few[0], few[0][:, :5]], few[1]
    state = summed(es.problems.cca(), [few], 1, where)
    found, _, info, _ = es.solvers.Exact().solve(es.problems.cca(), state, "largest", n)
    np.testing.assert_allclose(found.eigenvalues, wanted, atol=1e-10)
    assert found.method == ("eigh" if where == "mesh" else "shifted inverse")
    assert found.residual < 1e-10
    assert info.residuals.max() < 1e-9


def test_noise_crowds_at_one_with_as_many_rows_as_columns_and_not_with_many_rows():
    for n, sizes in ((600, [200, 190]), (3000, [200, 190])):
        x, y = (np.linalg.qr(rng.normal(size=(n, d)))[0] for d in sizes)
        largest = np.linalg.norm(x.T @ y, 2) ** 2
        assert pencil.crowd(n, sizes) == (largest > pencil.CROWDED)


def test_an_indefinite_inverse_is_left_out():
    """Correlations above 1, as rounding errors of nearly singular blocks give: there is no Cholesky factor."""
    C = 1.1 * np.eye(40)
    with wide():
        for xp in (np, jnp):
            T, one = [xp.eye(40)] * 2, xp.eye(40)
            assert pencil._inverted(xp.asarray(C), T, lambda one=one: one, (40, 40), 2) is None


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("unit", [1e5, 1e6])
def test_one_column_in_large_units_does_not_hide_the_others(unit, where):
    """The largest eigenvalue is up to 10¹² times the next one: residuals must not be relative to it alone."""
    big, other = X.copy(), Y.copy()
    big[:, 0] *= unit
    other[:, 0] *= unit
    cases = [
        (es.problems.pca(), big, oracles.pca(big), "largest"),
        (es.problems.pca(), big, oracles.pca(big), "smallest"),
        (es.problems.pls(), (big, other), oracles.pls(big, other), "largest"),
    ]
    for problem, batch, (A, B), which in cases:
        lam = solved(problem, batched(batch), 5, where, which)[0]
        # Rounding errors of either answer.
        rounding = 4e-15 * np.abs(A).max()
        np.testing.assert_allclose(lam, oracles.leading(A, B, 5, which)[0], rtol=1e-9, atol=rounding)


def test_a_batch_that_its_owner_overwrites_is_summed_as_it_was():
    """Rows under way to a device are copied before their owner gets them back."""
    problem, buffers = es.problems.cca(), tuple(np.empty((8192, 130)) for _ in range(2))
    engine = ExactEngine(Setup(problem, es.solvers.Exact(), 2, buffers))
    engine.state = engine.state._replace(statistics=engine.state.statistics.on_device(None))
    rows = [rng.normal(size=(2, 8192, 130)) for _ in range(3)]
    engine.block_rows = engine._blocks.block_rows = 4096
    for pair in rows:
        for buffer, view in zip(buffers, pair, strict=True):
            buffer[:] = view
        engine.take(buffers, 0, 8192)
    found = engine.finish(3 * 8192, "", None).eigenvalues
    wanted = es.solve(problem, [tuple(pair) for pair in rows], 2, "exact").eigenvalues
    np.testing.assert_allclose(found, wanted, rtol=1e-10)

"""The accelerated game: accuracy on planted problems, drift and safety."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import eigenstream as es
from data import GAME, POWER, batched, block_edges, captured
from eigenstream.core import players


@pytest.mark.slow
def test_one_pass_captures_the_correlations(game_on_power):
    assert captured(POWER, game_on_power.V, 4) > 0.985


@pytest.mark.slow
def test_no_other_streaming_solver_captures_as_much(game_on_power):
    best = captured(POWER, game_on_power.V, 4)
    for other in (es.solvers.Paper(learning_rate=0.1), es.solvers.EckartYoung(learning_rate=0.01)):
        assert captured(POWER, es.solve(es.problems.cca(), batched(POWER), k=4, solver=other).V, 4) < best


@pytest.mark.slow
@pytest.mark.parametrize("rank", [256, 40])
def test_the_units_of_the_columns_change_nothing(rank):
    """Each column is multiplied by its own factor between 1/1000 and 1000: a power of two, which rounds nothing."""
    rng = np.random.default_rng(0)
    scaled = [v * 2.0 ** rng.integers(-10, 11, size=v.shape[1]).astype("f4") for v in POWER]
    solver = es.solvers.Game(rank=rank)
    found = [
        captured(v, es.solve(es.problems.cca(), batched(v), 4, solver, memory_budget=1).V, 4) for v in (POWER, scaled)
    ]
    assert abs(found[0] - found[1]) < 1e-4


@pytest.mark.slow
def test_the_size_of_batches_hardly_matters(game_on_power):
    for size in (20, 500):
        result = es.solve(es.problems.cca(), batched(POWER, size), k=4, **GAME)
        assert abs(captured(POWER, result.V, 4) - captured(POWER, game_on_power.V, 4)) < 1e-2


@pytest.mark.slow
def test_more_passes_are_not_worse(game_on_power):
    twice = es.solve(es.problems.cca(), batched(POWER), k=4, **GAME, max_epochs=2)
    assert captured(POWER, twice.V, 4) > captured(POWER, game_on_power.V, 4)


@pytest.mark.slow
def test_multiview_and_pls_and_lda_reach_the_exact_answer():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(6000, 2))
    views = [(z @ rng.normal(size=(2, 60)) + rng.normal(size=(6000, 60))).astype("f4") for _ in range(3)]
    for problem, data in ((es.problems.multiview(), views), (es.problems.pls(), views[:2])):
        game = es.solve(problem, batched(data), k=2, max_epochs=3, **GAME)
        exact = es.solve(problem, batched(data), k=2, solver="exact")
        assert np.abs(game.eigenvalues / exact.eigenvalues - 1).max() < 1e-3
    labels = np.arange(6000) % 3
    X = (rng.normal(size=(6000, 150)) + 2 * np.eye(150)[labels]).astype("f4")
    batches = [(X[i : i + 100], labels[i : i + 100]) for i in range(0, 6000, 100)]
    game = es.solve(es.problems.lda(3), batches, k=2, **GAME)
    exact = es.solve(es.problems.lda(3), batches, k=2, solver="exact")
    assert es.metrics.subspace_error(game.V, exact.V) < 0.05


@pytest.mark.slow
def test_ica_finds_the_least_gaussian_direction():
    rng = np.random.default_rng(0)
    S = np.c_[rng.uniform(-1, 1, 9000) * 3, rng.normal(size=(9000, 4))].astype("f4")
    game = es.solve(es.problems.ica(), np.split(S, 90), k=1, **GAME, which="smallest")
    assert abs(game.V[0, 0]) / np.linalg.norm(game.V) > 0.98


@pytest.mark.slow
def test_given_matrices_are_solved_to_rounding():
    A = np.diag(np.linspace(1, 9, 300)).astype("f4")
    B = np.diag(np.linspace(1, 2, 300)).astype("f4")
    exact = scipy.linalg.eigh(A, B)[0]
    for which, wanted in (("largest", exact[::-1][:3]), ("smallest", exact[:3])):
        result = es.solve(es.problems.matrices(A, B), None, k=3, solver="game", which=which, max_steps=100)
        assert result.converged
        assert np.abs(result.eigenvalues - wanted).max() < 1e-4


@pytest.mark.slow
def test_blocks_of_a_graph_are_found_in_its_edges():
    edges, degrees = block_edges(300, 3, 0.3, 0.02)
    problem = es.problems.laplacian(n_nodes=300)
    options = {"k": 3, "which": "smallest"}
    exact = es.solve(problem, edges, solver="exact", **options)
    game = es.solve(problem, edges, solver="game", **options)
    assert es.metrics.subspace_error(game.V, exact.V, np.diag(degrees)) < 0.03


@pytest.mark.slow
def test_small_eigenvalues_of_a_graph_are_found_without_keeping_its_edges():
    """Eigenvalues of -A are negative; noise in B must not raise them."""
    stream, degrees = block_edges(500, 4, 0.2, 0.02)
    problem = es.problems.laplacian(n_nodes=500)
    game = es.solve(problem, stream, 4, which="smallest", max_epochs=3, **GAME)
    exact = es.solve(problem, stream, 4, "exact", which="smallest")
    assert es.metrics.subspace_error(game.V, exact.V, np.diag(degrees)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["game", "exact"])
def test_a_half_life_follows_a_rotating_covariance(solver):
    rng = np.random.default_rng(0)
    n, d = 12000, 60
    angle = np.linspace(0, np.pi / 2, n)
    lead = np.zeros((n, d))
    lead[:, 0], lead[:, 1] = np.cos(angle), np.sin(angle)
    X = (rng.normal(size=(n, d)) + 3 * rng.normal(size=(n, 1)) * lead).astype("f4")
    batches = np.split(X, 120)

    def cosine(half_life):
        options = GAME if solver == "game" else {"solver": solver}
        result = es.solve(es.problems.pca(), batches, k=1, half_life=half_life, **options)
        return abs(result.V[1, 0]) / np.linalg.norm(result.V)

    assert cosine(1000) > 0.97
    assert cosine(None) < 0.9


@pytest.mark.slow
def test_a_batch_of_many_half_lives_is_learned():
    stream = [tuple(v[i : i + 1500] for v in POWER) for i in range(0, 6000, 1500)]
    result = es.solve(es.problems.cca(), stream, k=2, **GAME, half_life=20)
    assert int(result.state.refused) == 0


@pytest.mark.slow
def test_constant_and_duplicate_columns_small_batches_and_few_rows():
    X, Y = (v.copy() for v in POWER)
    X[:, 3], X[:, 4] = 5.0, X[:, 5]
    result = es.solve(es.problems.cca(), batched((X, Y)), k=4, **GAME)
    assert captured((np.delete(X, [3, 4], 1), Y), np.delete(result.V, [3, 4], 0), 4) > 0.97
    pairs = es.solve(es.problems.cca(), batched([v[:600] for v in POWER], 2), k=2, **GAME)
    assert np.isfinite(pairs.V).all()
    few = [v[:90] for v in POWER]
    ridged = es.solve(es.problems.cca(ridge=0.5), batched(few, 30), k=2, **GAME)
    assert np.isfinite(ridged.V).all()


def test_every_component_of_a_small_problem():
    X = np.random.default_rng(0).normal(size=(2000, 5)) * [5, 4, 3, 2, 1]
    result = es.solve(es.problems.pca(), np.split(X, 20), k=5, solver=es.solvers.Game(rank=5))
    assert np.allclose(result.eigenvalues, [25, 16, 9, 4, 1], rtol=0.15)


@pytest.mark.slow
def test_a_step_is_pure_and_serves_scan():
    solver, problem = es.solvers.Game(), es.problems.cca()
    batches = batched(POWER)[:30]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    first = jax.tree.map(jnp.asarray, batches[0])
    state = solver.init(problem, first, 2, jax.random.key(0))
    scanned, _ = jax.jit(lambda s, b: jax.lax.scan(lambda s, x: solver.step(problem, s, x), s, b))(state, stacked)
    step = jax.jit(lambda s, b: solver.step(problem, s, b))
    for batch in batches:
        state, _ = step(state, jax.tree.map(jnp.asarray, batch))
    assert int(scanned.moves) == int(state.moves) > 2
    one, other = (players.to_matrix(players.take(s.S, 0, 2)) for s in (state, scanned))
    assert es.metrics.subspace_error(one, other) < 1e-3


def test_settings_are_checked():
    for settings in ({"extra": -1}, {"rank": 0}, {"half_life": 0.0}, {"outlier": 1.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            es.solvers.Game(**settings)
    with pytest.raises(ValueError, match="half_life"):
        es.solve(es.problems.pca(), [np.eye(4)], k=1, solver="paper", half_life=10.0)

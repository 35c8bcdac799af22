"""Rows with far more than the mean squared norm."""

import numpy as np
import pytest

import eigenstream as es
from data import POWER, batched, captured
from eigenstream.run.outliers import Outliers


@pytest.mark.slow
def test_outliers_are_scaled_down_and_named(game_on_power):
    rng = np.random.default_rng(0)
    dirty = [v.copy() for v in POWER]
    rows = rng.choice(len(dirty[0]), 12, replace=False)
    for view in dirty:
        view[rows] *= 30
    solver = es.solvers.Game(rank=100, outlier=20.0)
    with pytest.warns(UserWarning, match="12 of 6000 rows have over 20 times the mean squared norm"):
        result = es.solve(es.problems.cca(), batched(dirty), k=4, solver=solver, memory_budget=1)
    assert captured(POWER, result.V, 4) > captured(POWER, game_on_power.V, 4) - 0.02
    guard = Outliers(20.0)
    for batch in batched(dirty):
        guard.tame(batch)
    assert guard.count == 12
    assert set(guard.named) <= set(rows.tolist())


def test_no_solver_changes_rows_unless_asked():
    """Whether ``auto`` takes the exact solver or the game must not decide which rows are solved for."""
    X = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)
    X[7] *= 100
    exact, game = (es.PCA(2, memory_budget=budget).fit(X) for budget in (4e9, 1))
    assert isinstance(exact.solver_, es.solvers.Exact)
    assert isinstance(game.solver_, es.solvers.Game)
    # One row of 300 holds most of the variance.
    np.testing.assert_allclose(game.explained_variance_, exact.explained_variance_, rtol=0.02)
    with pytest.warns(UserWarning, match="takes rows as they are"):
        scaled = es.PCA(2, solver=es.solvers.Game(outlier=100.0)).fit(X)
    assert scaled.explained_variance_[0] < 0.5 * exact.explained_variance_[0]


@pytest.mark.slow
def test_large_node_numbers_are_no_outliers():
    """Edges in the order of their nodes, so that later batches hold larger numbers."""
    n = 3000
    i = np.arange(n - 1)
    ends = np.sort(np.concatenate([np.stack([i, i + 1], 1), np.stack([i // 2, i + 1], 1)]), axis=0)
    stream = [tuple(part.T) for part in np.array_split(ends, 60)]
    result = es.solve(es.problems.laplacian(n_nodes=n), stream, 2, "game", which="smallest")
    assert "scaled down" not in result.message
    assert abs(result.eigenvalues[0]) < 1e-3

"""Rows of far more than the mean energy."""

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
    with pytest.warns(UserWarning, match="rows have over 100 times the mean energy"):
        result = es.solve(es.problems.cca(), batched(dirty), k=4, solver="game")
    assert captured(POWER, result.V, 4) > captured(POWER, game_on_power.V, 4) - 0.05
    guard = Outliers(100.0)
    for batch in batched(dirty):
        guard.tame(batch)
    assert guard.count == 12
    assert set(guard.named) <= set(rows.tolist())


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

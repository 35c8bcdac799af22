"""Sketches and diagonals in the place of B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import POWER, batched
from eigenstream.solvers.game.preconditioner import Diagonal, Sketch


def sketch_of(X, rank, parts, ridge=0.0):
    """A sketch that was updated with each of several parts of the rows."""
    sketch = Sketch.empty(jax.ShapeDtypeStruct(X.shape[1:], jnp.float32), rank, ridge)
    for part in np.split(X, parts):
        sketch = sketch.keep(jnp.asarray(part)).update(np.inf)
    return sketch


def test_a_sketch_of_all_directions_is_the_second_moment():
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(2000, 12)) * np.linspace(3, 1, 12)).astype("f4")
    sketch = sketch_of(X, 12, 8)
    C = X.T @ X / len(X)
    reached = np.asarray(sketch.U).T * np.asarray(sketch.seen) @ np.asarray(sketch.U)
    assert np.abs(reached - C).max() < 1e-4 * np.abs(C).max()
    U = np.asarray(sketch.U)
    assert np.abs(U @ U.T - np.eye(12)).max() < 1e-5


def test_a_full_sketch_learns_every_queued_row():
    """One update after ten batches, which are more rows than its buffer holds."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(600, 400)) / np.arange(1, 401)).astype("f4")
    sketch = Sketch.empty(jax.ShapeDtypeStruct((400,), jnp.float32), 400, 0.0)
    for part in np.split(X, 10):
        sketch = sketch.keep(jnp.asarray(part))
    sketch = sketch.update(np.inf)
    assert float(sketch.rows) == 600
    C = X.T @ X / len(X)
    reached = np.asarray(sketch.U).T * np.asarray(sketch.seen) @ np.asarray(sketch.U)
    assert np.abs(reached - C).max() < 1e-4 * np.abs(C).max()


def test_a_few_last_rows_change_a_sketch_little():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 50)).astype("f4")
    sketch = sketch_of(X, 50, 8)
    after = sketch.keep(jnp.zeros((3, 50), jnp.float32)).update(np.inf)
    assert float(after.energy) > 0.98 * float(sketch.energy)
    assert float(after.held.sum()) > 0.98 * float(sketch.held.sum())


def test_solve_is_the_inverse_of_apply():
    rng = np.random.default_rng(1)
    X = (rng.normal(size=(600, 40)) * np.linspace(5, 0.2, 40)).astype("f4")
    sketch = sketch_of(X, 10, 3, ridge=0.1)
    V = jnp.asarray(rng.normal(size=(5, 40)), jnp.float32)
    assert np.abs(np.asarray(sketch.solve(sketch.apply(V)) - V)).max() < 1e-3


def test_the_floor_of_a_sketch_rises_where_few_rows_carry_a_direction():
    rng = np.random.default_rng(2)
    calm = rng.normal(size=(4000, 30)).astype("f4") * np.r_[np.ones(20), np.full(10, 1e-2)].astype("f4")
    rare = calm.copy()
    rare[:, 20:] *= 30 * (rng.uniform(size=(4000, 10)) < 1e-3)

    def floor(X):
        sketch = Sketch.empty(jax.ShapeDtypeStruct((30,), jnp.float32), 30, 0.0)
        for part in np.split(X, 16):
            sketch = sketch.keep(jnp.asarray(part)).update(np.inf)
        return float(sketch.floor)

    assert floor(rare) > 10 * floor(calm)


def test_a_diagonal_is_finite_where_no_row_had_a_value():
    metric = Diagonal(jnp.array([1.0, 0.0]), jnp.array(4.0), jnp.array(1.0))
    assert np.isfinite(np.asarray(metric.solve(jnp.ones((1, 2))))).all()


@pytest.mark.slow
def test_sketches_go_on_learning_with_a_half_life():
    def updates(rows):
        stream = batched([v[:rows] for v in POWER])
        return float(es.solve(es.problems.cca(), stream, k=2, solver="game", half_life=500).state.metric[0].updates)

    # Without a half-life, twice the rows give two or three more updates.
    assert updates(6000) > updates(3000) + 4

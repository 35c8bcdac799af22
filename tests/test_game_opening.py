"""The first rows of a stream: moves on them, validation rows, and streams that are kept whole."""

import numpy as np
import pytest

import eigenstream as es
from data import POWER, batched, captured, power_law
from eigenstream.run.engine import Setup
from eigenstream.run.game_engine import GameEngine
from eigenstream.run.loop import Run
from eigenstream.solvers.game import opening
from planted import log_uniform, planted


@pytest.mark.slow
@pytest.mark.parametrize("n", [150, 800])
def test_a_stream_kept_whole_is_solved_like_exact(n):
    views = [v[:n] for v in POWER]
    problem = es.problems.cca(ridge=0.1)
    game, exact = (es.solve(problem, batched(views), k=4, solver=s) for s in ("game", "exact"))
    assert es.metrics.subspace_error(game.V, exact.V) < 1e-3
    np.testing.assert_allclose(game.eigenvalues, exact.eigenvalues, rtol=1e-3)
    assert game.converged
    assert "all rows were kept" in game.message


def test_a_stream_kept_whole_is_solved_once():
    problem, batches = es.problems.cca(ridge=0.1), batched([v[:200] for v in POWER])
    run = Run(problem, 4, "game")
    for batch in batches:
        run.take(batch)
    once, result = run.result(), es.solve(problem, batches, 4, "game")
    assert 0 < int(once.state.moves) == int(result.state.moves)
    assert "200 rows in 2 batches" in result.message


def test_passes_over_rows_that_are_kept_add_nothing():
    views = [v[:900] for v in POWER]
    once, thrice = (
        es.solve(es.problems.cca(ridge=0.1), batched(views), k=4, solver="game", max_epochs=e) for e in (1, 3)
    )
    np.testing.assert_array_equal(once.V, thrice.V)
    assert len(thrice.history) == 1


@pytest.mark.slow
def test_the_first_rows_give_a_better_start_than_none():
    """4,000 rows are more than are kept and few for the problem."""
    views = [v[:4000] for v in POWER]
    with_them = es.solve(es.problems.cca(), batched(views), k=4, solver="game")
    without = es.solve(es.problems.cca(), batched(views), k=4, solver=es.solvers.Game(opening=0))
    assert 1 - captured(views, with_them.V, 4) < 0.5 * (1 - captured(views, without.V, 4))


@pytest.mark.slow
def test_a_small_device_keeps_fewer_of_the_first_rows():
    """The first rows leave memory for a move; with room for none the game opens with a single block."""
    assert opening.room(2.0, 1.0, np.inf) == 2.0 > opening.room(2.0, 1.0, opening.MOVING) == 0
    result = es.solve(es.problems.cca(), batched(POWER), k=4, solver=es.solvers.Game(opening=1e-9))
    assert captured(POWER, result.V, 4) > 0.95


@pytest.mark.slow
def test_one_batch_larger_than_the_opening_is_solved():
    result = es.solve(es.problems.cca(), [tuple(POWER)], 4, "game")
    assert result.converged
    assert captured(POWER, result.V, 4) > 0.99


def watched(batches, solver, see):
    """Run the game over all batches; ``see`` is told every method before it is applied."""

    class Watched(GameEngine):
        def _apply(self, method, state, *more):
            see(method, state, *more)
            return super()._apply(method, state, *more)

    engine = Watched(Setup(es.problems.cca(), solver, 4, batches[0]))
    for batch in batches:
        engine.take(batch, 0, len(batch[0]))


@pytest.mark.slow
def test_the_opening_stops_when_validation_rows_show_overfitting():
    """One planted correlation for four players: the others fit noise."""
    views = planted(3000, (200, 150), power_law, [0.95])
    moves = []
    watched(
        batched(views, 40), es.solvers.Game(opening=0.2), lambda method, state, *more: moves.append((method, *more))
    )
    assert 1 < moves.count(("move", True)) < opening.OPENING_MOVES


@pytest.mark.slow
def test_validation_rows_are_not_learned_twice():
    """A sketch updated without queued rows would halve its spectrum."""
    waiting = []

    def see(method, state, *more):
        if method == "update_sketch":
            waiting.append(min(float(sketch.waiting) for sketch in state.metric))

    watched(batched([v[:6000] for v in POWER], 1000), es.solvers.Game(), see)
    assert len(waiting) > 2
    assert min(waiting) > 0


def test_a_kept_stream_whose_moves_stall_has_not_converged():
    """Variances over six decades and a sketch of rank 8: each move gains little, far from the answer."""
    views = [view.astype(np.float32) for view in planted(1500, (300, 250), log_uniform(1e6))]
    game = es.solve(es.problems.cca(), batched(views), 3, es.solvers.Game(extra=3, rank=8, opening=1e9))
    exact = es.solve(es.problems.cca(), batched(views), 3, "exact")
    assert game.eigenvalues.sum() < 0.9 * exact.eigenvalues.sum()
    assert not game.converged
    assert "not converged: all rows were kept and" in game.message
    assert "larger rank" in game.message

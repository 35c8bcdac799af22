"""The gain of new products over the known ones."""

import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from data import GAME, POWER, batched, captured
from eigenstream.solvers.game import filter


def test_the_gain_weighs_rows_alike_where_players_stand_still():
    # Noise 1/300 known, 1/100 new: the mean of 400 rows.
    P = jnp.asarray(np.diag([1.0, 4.0]))
    gain = filter.gain(P / 300, P / 100, False)
    assert np.allclose(gain, 0.25 * np.eye(2), atol=1e-4)
    after = filter.noise_after(gain, P / 300, P / 100)
    assert np.allclose(after, P / 400, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, 6.0])
def test_one_odd_last_row_changes_little(factor, game_on_power):
    last = tuple(factor * v[:1] for v in POWER)
    odd = es.solve(es.problems.cca(), [*batched(POWER), last], k=4, **GAME)
    assert captured(POWER, odd.V, 4) > captured(POWER, game_on_power.V, 4) - 0.002

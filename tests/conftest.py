import gc

import jax
import pytest

import eigenstream as es
from data import GAME, POWER, batched


def check_refused(call, words):
    """The call raises a ValueError that says this."""
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


def quick(values, *fast):
    """Mark all parameters as slow but those named, which run in `make check`."""
    several = [v if isinstance(v, tuple) else (v,) for v in values]
    return [v if v in fast else pytest.param(*s, marks=pytest.mark.slow) for v, s in zip(values, several, strict=True)]


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Free the compiled programs of a module: each maps memory, and a process may hold a limited number of maps."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never touches the setting."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def game_on_power():
    """The result of the game after one pass over the planted views."""
    return es.solve(es.problems.cca(), batched(POWER), 4, **GAME)

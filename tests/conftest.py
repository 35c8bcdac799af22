import gc

import jax
import pytest


def quick(values, *fast):
    """Parameters of which only those named run in `make check`."""
    several = [v if isinstance(v, tuple) else (v,) for v in values]
    return [v if v in fast else pytest.param(*s, marks=pytest.mark.slow) for v, s in zip(values, several, strict=True)]


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Let a module's programs go: each maps memory of its own, and a process may hold only so many maps."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never touches the setting."""
    with jax.enable_x64(True):
        yield

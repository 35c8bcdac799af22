import jax
import pytest


def quick(values, *fast):
    """Parameters of which only those named run in `make check`."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never touches the setting."""
    with jax.enable_x64(True):
        yield

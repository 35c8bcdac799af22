import jax
import pytest


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never touches the setting."""
    with jax.enable_x64(True):
        yield

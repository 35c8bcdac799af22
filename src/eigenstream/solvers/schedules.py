"""Schedules of step sizes, and the half-life of old rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["warmup_harmonic"]


def warmup_harmonic(base: float, final: float, warmup: int, total: int) -> Callable[[Any], Any]:
    """Linear warm-up to ``base`` over ``warmup`` steps, then decay as ``1 / (t + Δt)`` to ``final`` at ``total``.

    Parameters
    ----------
    base, final : float
        ``η_0`` and ``η_T``.
    warmup, total : int
        ``t_c`` and ``T``.

    Examples
    --------
    >>> import eigenstream as es
    >>> rate = es.solvers.warmup_harmonic(base=1e-2, final=1e-4, warmup=100, total=1000)
    >>> [round(float(rate(t)), 6) for t in (0, 50, 100, 1000)]
    [0.0, 0.005, 0.01, 0.0001]
    """
    if not (0 < final < base and 0 <= warmup < total):
        raise ValueError(
            f"base={base}, final={final}, warmup={warmup}, total={total}: give final < base, warmup < total"
        )
    # base·h / (t - t_c + h) is base at t_c, and final at T for this h.
    h = (total - warmup) * final / (base - final)

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.result_type(float))
        rising = base * step / max(warmup, 1)
        falling = base * h / (jnp.maximum(step - warmup, 0) + h)
        return jnp.where(step < warmup, rising, falling)

    return rate


def check_half_life(half_life: float | None) -> None:
    number = isinstance(half_life, int | float | np.number) and not isinstance(half_life, bool)
    if half_life is not None and not (number and 0 < half_life < np.inf):
        raise ValueError(f"half_life={half_life!r}: give a number of rows, or None to weigh all rows the same")


def memory_rows(half_life: float | None) -> float:
    """The number of equally weighted rows that exponential weights of this half-life amount to."""
    return np.inf if half_life is None else half_life / np.log(2)

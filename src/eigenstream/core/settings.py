"""Checks of settings."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_count(name: str, value: Any, least: int = 1, none: str = "") -> None:
    """Require a whole number of at least ``least``. A non-empty ``none`` allows None and says what it means."""
    if value is None and none:
        return
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) and value >= least):
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}{none and f', or None {none}'}")

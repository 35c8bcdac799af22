"""Checks of settings, with errors that name the argument and the cure."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_count(name: str, value: Any, least: int = 1, none: str = "") -> None:
    """Refuse what is not a whole number of at least ``least``; ``none`` says what None means, if it is allowed."""
    if value is None and none:
        return
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) and value >= least):
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}{none and f', or None {none}'}")

"""Types that signatures name."""

from __future__ import annotations

from typing import Any

#: A JAX pytree: players with leaves ``(k, ...)``, rows with leaves ``(b, ...)``, or a solver's state.
Tree = Any

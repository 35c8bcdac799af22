"""Precision of the large products: one setting, by JAX's own means.

``"float32"`` and ``"tf32"`` are settings of `jax.default_matmul_precision`. For ``"bf16"`` the operands are rounded to
bfloat16 and the sums kept in float32, which halves what is read and lets a GPU use its fastest units; states stay in
float32 either way. On a processor that knows one way to multiply, all are the same but for that rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: What users call a precision, and what JAX does.
NAMES = {"float32": "float32", "tf32": "tensorfloat32", "bf16": "bfloat16"}


def check_precision(precision: Any) -> None:
    if precision is not None and precision not in NAMES:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(map(repr, NAMES))}, or None for JAX's own")


def scope(precision: str | None) -> AbstractContextManager[Any]:
    """Where products are of this precision; None: as they are outside. It is part of what JAX compiles for."""
    return nullcontext() if precision is None else jax.default_matmul_precision(NAMES[precision])


def matmul(a: Any, b: Any) -> Any:
    """``a @ b`` of arrays on a device or, as they are, on the host."""
    if isinstance(a, np.ndarray) or not _rounds() or jnp.result_type(a, b) != jnp.float32:
        return a @ b
    return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _rounds() -> bool:
    return jax.config.jax_default_matmul_precision == "bfloat16"  # type: ignore[attr-defined]

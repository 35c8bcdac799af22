"""Precision of the large products.

``"float32"`` and ``"tf32"`` are settings of `jax.default_matmul_precision`. ``"bf16"`` rounds the operands to bfloat16
and sums in float32, which halves the bytes read and uses the fastest units of a GPU. States are float32 in all cases.
On a processor with one kind of product, ``"tf32"`` equals ``"float32"``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Our names of the settings of JAX.
NAMES = {"float32": "float32", "tf32": "tensorfloat32", "bf16": "bfloat16"}


def check_precision(precision: Any) -> None:
    if precision is not None and precision not in NAMES:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(map(repr, NAMES))}, or None for JAX's own")


def scope(precision: str | None) -> AbstractContextManager[Any]:
    """A context that sets the precision; None leaves it. JAX compiles a program for each setting."""
    return nullcontext() if precision is None else jax.default_matmul_precision(NAMES[precision])


def matmul(a: Any, b: Any) -> Any:
    """``a @ b``, with operands rounded to bfloat16 if that is set and they are float32 on a device."""
    if isinstance(a, np.ndarray) or not _rounds() or jnp.result_type(a, b) != jnp.float32:
        return a @ b
    return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _rounds() -> bool:
    return jax.config.jax_default_matmul_precision == "bfloat16"  # type: ignore[attr-defined]


#: `jax.jit` for programs of large products, by the kernels that the vendor's library chooses. XLA would otherwise
#: compile others and time all of them. That takes up to a minute, gains nothing here, and may choose others next time.
compiled = partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})


def wide() -> AbstractContextManager[Any]:
    """A context in which JAX computes in float64; the global setting is left alone."""
    return jax.enable_x64(True)


def for_moves(exact: bool) -> AbstractContextManager[Any]:
    """A context for the products of a move: float32, by split operands on a GPU unless the rest is ``exact``."""
    split = not exact and jax.default_backend() == "gpu"
    return jax.default_matmul_precision("TF32_TF32_F32_X3" if split else "highest")

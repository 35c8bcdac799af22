"""Inverse Cholesky factors of matrices that fit no single device.

The rows of a matrix are sharded over the ``feature`` axis of a mesh, in equal parts as `padded` gives them. One part of
the rows, or of the columns, is sent to all devices at a time. Every device then multiplies its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eigenstream import distributed
from eigenstream.core.device_sums import broadcast, padded
from eigenstream.core.precision import compiled

ROWS = P("feature")


def is_spread(x: Any) -> bool:
    """Whether the rows of an array are sharded over a mesh."""
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.spec == ROWS


def diagonal(block: Any) -> np.ndarray:
    """The diagonal of an ``(n or more, n)`` array, on the host."""
    return distributed.fetched(_run(_diagonal, (), block))[: block.shape[1]]


def inverse_factor(block: Any, factors: np.ndarray) -> tuple[jax.Array, Any]:
    """``T = D L⁻ᵀ`` for ``D B D = L Lᵀ`` with ``D`` of these factors, and a bound on the condition of ``D B D``.

    Not finite if there is no such factor. Where a factor is 0, so are the row and the column of ``T``.
    """
    every = np.pad(factors, (0, len(block) - len(factors)))
    T, bound = _run(_inverse_factor, (_width(block),), block, every, out=(ROWS, P()))
    return columns(T, np.arange(len(factors))), distributed.fetched(bound)


def shifted(X: Any, C: Any, T: Any, shift: float) -> jax.Array:
    """``shift · X - C T Tᵀ Cᵀ``."""
    return _run(_shifted, (_width(C), _width(X), shift), X, C, T)


def columns(T: Any, index: np.ndarray) -> jax.Array:
    """The columns of these indices."""
    return _columns(T.sharding.mesh)(T, index)


def spread(T: Any, block: Any) -> jax.Array:
    """A whole array with its rows sharded like those of ``block``."""
    return jax.block_until_ready(_spread(block.sharding.mesh, len(block))(T))


def _width(block: Any) -> int:
    """The number of columns to send at once: that of the rows of the same features."""
    return padded(block.shape[1], block.sharding.mesh.shape["feature"])[1]


def _inverse_factor(width: int, block: Any, factors: Any) -> tuple[Any, Any]:
    """Gauss-Jordan: eliminate one part of the columns after the other, in the matrix and in the identity."""
    m, shard = len(block), jax.lax.axis_index("feature")
    n = m * jax.lax.psum(1, "feature")
    rows, index = shard * m + jnp.arange(m), jnp.arange(n)
    every = jax.lax.all_gather(factors, "feature", tiled=True)
    unit = factors[:, None] * jnp.pad(block, ((0, 0), (0, n - block.shape[1]))) * every
    unit += jnp.where((rows[:, None] == index) & (every == 0), 1.0, 0.0)
    largest = jax.lax.pmax(jnp.abs(unit).sum(1).max(), "feature")

    def eliminate(j: Any, both: tuple[Any, Any]) -> tuple[Any, Any]:
        rest, inverse = both
        at = j * width
        panel = jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(rest, at, width, 1), "feature", tiled=True)
        corner = jnp.linalg.cholesky(jax.lax.dynamic_slice_in_dim(panel, at, width))
        below = jax.lax.linalg.triangular_solve(corner, panel, lower=True, transpose_a=True)
        below = jnp.where((index >= at + width)[:, None], below, 0)
        own = jax.lax.dynamic_slice_in_dim(below, shard * m, m)
        # The inverse is sharded by columns, so that its rows are complete here.
        top = jax.lax.dynamic_slice_in_dim(inverse, at, width)
        top = jax.lax.linalg.triangular_solve(corner, top, left_side=True, lower=True)
        return rest - own @ below.T, jax.lax.dynamic_update_slice_in_dim(inverse - below @ top, top, at, 0)

    identity = jnp.where(index[:, None] == rows, 1.0, 0.0)
    inverse = jax.lax.fori_loop(0, n // width, eliminate, (unit, identity))[1]
    squares = jax.lax.psum((inverse * inverse).sum(), "feature")
    return factors[:, None] * inverse.T, largest * squares


def _shifted(width: int, own_width: int, shift: float, X: Any, C: Any, T: Any) -> Any:
    C = jnp.pad(C, ((0, 0), (0, _length(T) - C.shape[1])))

    def add(j: Any, N: Any) -> Any:
        return N + jax.lax.dynamic_slice_in_dim(C, j * width, width, 1) @ broadcast(T, j, width)

    N = jax.lax.fori_loop(0, _length(T) // width, add, jnp.zeros((len(C), T.shape[1])))

    def subtract(j: Any, S: Any) -> Any:
        at = j * own_width
        part = jax.lax.dynamic_slice_in_dim(S, at, own_width, 1) - N @ broadcast(N, j, own_width).T
        return jax.lax.dynamic_update_slice_in_dim(S, part, at, 1)

    S = jnp.pad(shift * X, ((0, 0), (0, _length(X) - X.shape[1])))
    return jax.lax.fori_loop(0, _length(X) // own_width, subtract, S)[:, : X.shape[1]]


def _length(own: Any) -> int:
    """The number of rows of all shards."""
    return len(own) * jax.lax.psum(1, "feature")


def _diagonal(block: Any) -> Any:
    rows = jax.lax.axis_index("feature") * len(block) + jnp.arange(len(block))
    return jnp.where(rows[:, None] == jnp.arange(block.shape[1]), block, 0).sum(1)


@cache
def _spread(mesh: Mesh, rows: int) -> Any:
    return compiled(lambda T: jnp.pad(T, ((0, rows - len(T)), (0, 0))), out_shardings=NamedSharding(mesh, ROWS))


@cache
def _columns(mesh: Mesh) -> Any:
    return compiled(lambda T, index: jnp.take(T, index, axis=1), out_shardings=NamedSharding(mesh, ROWS))


def _run(local: Callable[..., Any], options: tuple[Any, ...], *arrays: Any, out: Any = ROWS) -> Any:
    """Run ``local(*options, *shards)`` on every device, for arrays whose rows are sharded."""
    program = _compiled(arrays[0].sharding.mesh, local, options, len(arrays), out)
    # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
    return jax.block_until_ready(program(*arrays))


@cache
def _compiled(mesh: Mesh, local: Callable[..., Any], options: tuple[Any, ...], arguments: int, out: Any) -> Any:
    specs: Any = (ROWS,) * arguments
    program = jax.shard_map(partial(local, *options), mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    # Name the sharding: for an axis of one device JAX would return another one.
    return compiled(program, out_shardings=jax.tree.map(partial(NamedSharding, mesh), out))

"""Copy host rows to the device in several threads, and pick batches from them there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core.types import Tree

#: Threads that copy. One thread reaches less than half of the bandwidth of pageable memory.
THREADS = 8
#: Fewer bytes than this are copied by the calling thread.
FEW_BYTES = 2**23


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "eigenstream-copy")


def send(jobs: Iterable[Callable[[], Tree]], room: int | None = None, device: Any = None) -> Callable[[], Tree]:
    """Start to copy host rows to a device, if none is given JAX's default, and return at once.

    Each job gives one piece of the rows, in a thread. The function returned waits for the copies and gives all rows in
    one tree of device arrays, padded with zero rows to ``room``.
    """
    # A thread does not inherit what the caller set for a block of code: the device, and whether float64 is allowed.
    put = partial(_put, device, jax.config.jax_default_device, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    pieces = [_pool(os.getpid()).submit(put, job) for job in jobs]
    return lambda: _joined(room, *[piece.result() for piece in pieces])


def _put(device: Any, default: Any, wide: bool, job: Callable[[], Tree]) -> Tree:
    with jax.default_device(default), jax.enable_x64(wide):
        # A CPU would share aligned memory with the host array, whatever may_alias says.
        rows = jax.tree.map(np.array, job()) if jax.default_backend() == "cpu" else job()
        return jax.block_until_ready(jax.device_put(rows, device))


@partial(jax.jit, static_argnums=0)
def _joined(room: int | None, *pieces: Tree) -> Tree:
    def one(*leaves: jax.Array) -> jax.Array:
        rows = jnp.concatenate(leaves)
        more = 0 if room is None else room - len(rows)
        return jnp.pad(rows, [(0, more)] + [(0, 0)] * (rows.ndim - 1)) if more else rows

    return jax.tree.map(one, *pieces)


def put(leaf: np.ndarray) -> jax.Array:
    """Copy a host array to the device, in several threads if it is large; waits until the array is read."""
    if leaf.nbytes < FEW_BYTES or len(leaf) < THREADS or jax.default_backend() == "cpu":
        return jax.device_put(leaf, may_alias=True)
    return send([partial(lambda piece: piece, piece) for piece in np.array_split(leaf, THREADS)])()


class Window:
    """Runs of consecutive rows on their way to the device."""

    def __init__(self, jobs: Iterable[Callable[[], Tree]], room: int):
        self.room = room
        self._arrival: Callable[[], Tree] | None = send(jobs, room)
        self._rows: Tree = None

    def rows(self) -> Tree:
        """The rows on the device; waits for them."""
        if self._arrival is not None:
            self._rows, self._arrival = self._arrival(), None
        return self._rows


class Picked:
    """A batch whose rows are not copied yet: for each window, the positions of its rows."""

    def __init__(self, parts: list[tuple[Window, np.ndarray]]):
        self.parts = parts
        self.shape = (sum(len(positions) for _, positions in parts),)


def pick(*batches: Picked) -> Tree:
    """The rows of several batches in one tree of device arrays."""
    parts = [part for batch in batches for part in batch.parts]
    windows = list({id(window): window for window, _ in parts}.values())
    starts = dict(zip(map(id, windows), np.cumsum([0] + [w.room for w in windows]).tolist(), strict=False))
    index = np.concatenate([starts[id(window)] + positions for window, positions in parts])
    return _picked(index.astype(np.int32), *[window.rows() for window in windows])


@jax.jit
def _picked(index: jax.Array, *windows: Tree) -> Tree:
    """Rows by their index in all windows, one after the other, without joining these."""

    def one(*leaves: jax.Array) -> jax.Array:
        found, start = jnp.take(leaves[0], index, axis=0, mode="clip"), len(leaves[0])
        for leaf in leaves[1:]:
            later = (index >= start).reshape((-1,) + (1,) * (leaf.ndim - 1))
            found = jnp.where(later, jnp.take(leaf, index - start, axis=0, mode="clip"), found)
            start += len(leaf)
        return found

    return jax.tree.map(one, *windows)

"""Check, sum and tame rows on the device, in one program, and fetch what it found without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, views
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.transfer import Picked
from eigenstream.core.types import Tree
from eigenstream.problems.checks import check_finite
from eigenstream.run.outliers import Outliers

#: Blocks under way before what was found in the oldest is read: one is computed while the next is prepared.
UNDER_WAY = 2


class Found(NamedTuple):
    """What a block of rows shows."""

    finite: jax.Array
    #: Whether each row was scaled down.
    scaled: jax.Array | None
    #: Means of the features, leaves ``(1, ...)``, and the sum of squared distances from them.
    means: Tree
    scatter: jax.Array | None


class Block(NamedTuple):
    """Rows whose findings the host has not read yet."""

    rows: Tree
    #: The sizes of the batches they came in, and the rows of these batches that are before them.
    sizes: list[int]
    start: int
    #: The rows of the stream before them.
    seen: int
    found: Found

    def check_on_host(self) -> None:
        """Raise if a number is not finite; the row is named by its number in its batch."""
        whole = jax.tree.map(lambda x: np.pad(x, [(self.start, 0)] + [(0, 0)] * (x.ndim - 1)), self.rows)
        for part in host_batches.cut(whole, self.sizes):
            check_finite(part)


@partial(jax.jit, static_argnums=(0, 1))
def _examined(
    limit: float, summed: bool, rows: Tree, point: Tree, energies: jax.Array, weight: float
) -> tuple[Tree, jax.Array, Found]:
    """Rows less the pilot, those above the limit scaled down to it; their mean energies so far; and what they show."""
    near = rows if point is None else jax.tree.map(jnp.subtract, rows, point)
    leaves = jax.tree.leaves(near)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    scaled, means, scatter = None, None, None
    if summed:
        # A summary is of the rows as they came.
        ones = jnp.ones((views.n_rows(near), 1), leaves[0].dtype)
        means = jax.tree.map(lambda leaf: views.column_sums(leaf, ones) / len(leaf), near)
        scatter = sum(((leaf - mean) ** 2).sum() for leaf, mean in zip(leaves, jax.tree.leaves(means), strict=True))
    if limit != np.inf:
        lengths = jnp.stack([_lengths(leaf) for leaf in leaves])
        if not len(energies):
            # The first block starts from its median, which holds if fewer than half of its rows are outliers.
            energies = jnp.median(lengths**2, axis=1)
        longest = jnp.sqrt(jnp.where(energies > 0, limit * energies, jnp.inf))
        excess = (lengths / longest[:, None]).max(0)
        scaled, factor = excess > 1, 1 / jnp.maximum(excess, 1)
        near = views.scale_rows(near, factor)
        energies = energies + weight * (((lengths * factor) ** 2).mean(1) - energies)
    return near, energies, Found(finite, scaled, means, scatter)


def _lengths(leaf: jax.Array) -> jax.Array:
    """Norms of rows; their squares may overflow."""
    flat = leaf.reshape(len(leaf), -1)
    largest = jnp.abs(flat).max(1, keepdims=True)
    return largest[:, 0] * jnp.sqrt(((flat / jnp.where(largest > 0, largest, 1)) ** 2).sum(1))


class Intake:
    """Takes in blocks of dense rows on the device; the host reads what they show when it is there."""

    def __init__(self, outliers: Outliers, summed: bool):
        self.outliers, self.summed = outliers, summed
        self._under_way: deque[Block] = deque()

    def add(self, rows: Tree, point: Tree, sizes: list[int], start: int = 0) -> Tree:
        """Device rows less ``point``, checked and tamed: those from ``start`` on of batches with these sizes."""
        guard, b = self.outliers, views.n_rows(rows)
        weight = b / (guard.seen + b)
        rows, guard.energies, found = _examined(guard.limit, self.summed, rows, point, guard.energies, weight)
        jax.tree.map(lambda x: x.copy_to_host_async(), found)
        self._under_way.append(Block(rows, sizes, start, guard.seen, found))
        guard.seen += b
        return rows

    def settled(self, left: int = 0) -> Iterator[Moments]:
        """Read what was found, except in the last ``left`` blocks: moments, if they are wanted."""
        while len(self._under_way) > left:
            block = self._under_way.popleft()
            found = block.found
            if not found.finite:
                block.check_on_host()
            if found.scaled is not None:
                self.outliers.note(block.seen, np.asarray(found.scaled))
            if self.summed:
                means, scatter = jax.tree.map(lambda x: np.asarray(x, np.float64), (found.means, found.scatter))
                yield Summary(np.array([views.n_rows(block.rows)], np.float64), means, scatter).moments()


def on_accelerator(state: Tree) -> bool:
    """Whether arrays are on another device than the host's processor."""
    return next(iter(jax.tree.leaves(state)[0].devices())).platform != "cpu"


def is_dense(batch: Tree) -> bool:
    """Whether a batch is dense rows alone, on the host or a device: neither sparse rows, labels nor edges."""
    dense = (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 1 for leaf in views.leaves(batch))
    return isinstance(batch, Picked) or all(dense)

"""Join small batches into blocks, so that there are fewer and larger matrix products."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import scipy.sparse

from eigenstream.core.host_batches import join
from eigenstream.core.moments import BLOCK_ROWS
from eigenstream.core.types import Tree
from eigenstream.core.views import n_rows


class Blocks:
    """A queue of batches that returns blocks of ``block_rows`` rows or more.

    Rows are copied, so a source may reuse its memory. A block is a view of the queue's memory, which is used again
    after ``valid`` more blocks. Device arrays are fetched to the host, unless ``on_device``.
    """

    def __init__(self, block_rows: int = BLOCK_ROWS, valid: int = 1, on_device: bool = False) -> None:
        self.block_rows, self.valid, self.on_device = block_rows, valid, on_device
        #: Memory of the last blocks.
        self._used: list[list[Any]] = []
        #: Rows in the queue.
        self.waiting = 0
        self._rows: list[Any] = []
        self._form: Any = None

    def add(self, batch: Tree) -> list[Tree]:
        """The blocks that this batch completes. A large batch is returned without a copy."""
        leaves, structure = jax.tree.flatten(batch, is_leaf=scipy.sparse.issparse)
        if not self.on_device:
            leaves = [np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        out = []
        form = structure, [_kind(leaf) for leaf in leaves]
        if self.waiting and not (form == self._form and self._has_room(n_rows(batch))):
            out.append(self.rest())
        if not self.waiting and n_rows(batch) >= self.block_rows:
            return [*out, jax.tree.unflatten(structure, leaves)]
        if not self.waiting and not (form == self._form and self._has_room(n_rows(batch))):
            self._form, self._rows, self._used = form, [self._room(leaf) for leaf in leaves], []
        self._append(leaves)
        return [*out, self.rest()] if self.waiting >= self.block_rows else out

    def rest(self) -> Tree:
        """All queued rows as one block."""
        count, self.waiting = self.waiting, 0
        leaves = [join(*x) if isinstance(x, list) else x[:count] for x in self._rows]
        self._used.append([[] if isinstance(x, list) else x for x in self._rows])
        again = len(self._used) >= self.valid
        self._rows = self._used.pop(0) if again else [self._room(x[:0]) for x in leaves]
        return jax.tree.unflatten(self._form[0], leaves)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the queued rows without the unused memory behind them."""
        kept = [x if isinstance(x, list) else x[: self.waiting].copy() for x in self._rows]
        rest: dict[str, Any] = {"_rows": kept} if self.waiting else {"_rows": [], "_form": None}
        return {**vars(self), **rest, "_used": []}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        for i, x in enumerate(self._rows):
            if not isinstance(x, list):
                self._rows[i] = self._room(x)
                self._rows[i][: self.waiting] = x

    def _has_room(self, count: int) -> bool:
        return all(isinstance(x, list) or self.waiting + count <= len(x) for x in self._rows)

    def _append(self, leaves: list[Any]) -> None:
        b = leaves[0].shape[0]
        for kept, leaf in zip(self._rows, leaves, strict=True):
            if isinstance(kept, list):
                kept.append(leaf if isinstance(leaf, jax.Array) else leaf.copy())
            else:
                kept[self.waiting : self.waiting + b] = leaf
        self.waiting += b

    def _room(self, leaf: Any) -> Any:
        in_list = scipy.sparse.issparse(leaf) or isinstance(leaf, jax.Array)
        return [] if in_list else np.empty((2 * self.block_rows, *leaf.shape[1:]), leaf.dtype)


def _kind(leaf: Any) -> tuple[Any, ...]:
    return ("csr" if scipy.sparse.issparse(leaf) else leaf.shape[1:], leaf.dtype, isinstance(leaf, jax.Array))

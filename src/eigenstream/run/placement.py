"""Shard arrays over a mesh of devices: rows over one axis, features over the other.

The solvers are written for whole arrays, and the compiler shards them. Between two steps arrays are `Placed`: padded
with zeros to sizes that the mesh divides. A step first removes the padding, which moves no data, and pads its result
again. With sharded features no device holds a whole player. A step then communicates only scores and small matrices,
whatever the dimension (the accelerated game also communicates its sketches).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eigenstream import distributed
from eigenstream.core import host_batches, views
from eigenstream.core.precision import scope
from eigenstream.core.types import Tree

#: The axes of a mesh: rows of a batch, and features of every view and of the players.
AXES = ("data", "feature")


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape", "sharding"])
@dataclass(frozen=True)
class Placed:
    """A sharded array, padded with zeros; ``shape`` is its shape without padding."""

    array: Any
    shape: tuple[int, ...]
    sharding: NamedSharding

    @classmethod
    def of(cls, x: Any, sharding: NamedSharding) -> Placed:
        """Shard a whole array."""
        return cls(_put(_padded(x, sharding), sharding), x.shape, sharding)

    @classmethod
    def of_rows(cls, part: np.ndarray, start: int, total: int, sharding: NamedSharding) -> Placed:
        """Shard ``total`` rows. Each process gives a part, starting at row ``start``, that covers its devices' rows."""
        shape = (total, *part.shape[1:])
        padded = tuple(n + m for n, m in zip(shape, _padding(shape, sharding), strict=True))

        def shard(index: Any) -> np.ndarray:
            bounds = [s.indices(n)[:2] for s, n in zip(index, padded, strict=True)]
            lo, hi = bounds[0][0] - start, min(bounds[0][1], total) - start
            found = part[(slice(lo, max(lo, hi)), *(slice(*b) for b in bounds[1:]))]
            return np.pad(found, [(0, b - a - n) for (a, b), n in zip(bounds, found.shape, strict=True)])

        return cls(jax.make_array_from_callback(padded, sharding, shard), shape, sharding)


def make_mesh(given: Any) -> Mesh | None:
    """The mesh that a user describes: ``"auto"``, ``"data=2,feature=4"``, a `jax.sharding.Mesh`, or None."""
    if given is None:
        return None
    devices = jax.devices()
    if isinstance(given, Mesh):
        if set(given.axis_names) != set(AXES):
            raise ValueError(f"mesh has the axes {given.axis_names}: give one with both axes, 'data' and 'feature'")
        # A copy without axis types: the compiler chooses the shardings.
        mesh = Mesh(given.devices, given.axis_names)
    else:
        # "auto" shards rows over processes, which read their own rows, and features over the devices of each.
        each = len(devices) // distributed.count()
        shape = (len(devices) // each, each) if given == "auto" else _parsed(given)
        size = shape[0] * shape[1]
        if size > len(devices):
            raise ValueError(f"mesh={given!r} needs {size} devices, and there are {len(devices)}: give smaller numbers")
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[:size])
    if distributed.count() > 1 and mesh.size < len(devices):
        raise ValueError(f"mesh={given!r} has {mesh.size} devices, and the processes have {len(devices)}: use them all")
    return None if mesh.size == 1 and not isinstance(given, Mesh) else mesh


def _parsed(given: Any) -> tuple[int, int]:
    """Sizes of the axes from a text such as ``"data=2,feature=4"``."""
    sizes = dict.fromkeys(AXES, 1)
    for part in given.split(",") if isinstance(given, str) else [""]:
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in sizes or not number.isdigit() or int(number) < 1:
            raise ValueError(f"mesh={given!r}: give 'auto', numbers as in 'data=2,feature=4', or a jax.sharding.Mesh")
        sizes[name] = int(number)
    return sizes["data"], sizes["feature"]


class Placement:
    """Puts batches and states on a mesh, or without a mesh on JAX's default device, and runs programs there."""

    def __init__(self, mesh: Mesh | None = None, precision: str | None = None):
        self.mesh, self.precision = mesh, precision

    def __getstate__(self) -> dict[str, Any]:
        """Drop the mesh: the devices of another machine are unknown, so an unpickled run uses one device."""
        return {"mesh": None, "precision": self.precision}

    def feature_shards(self, batch: Tree) -> int:
        """Devices, each with memory of its own, that share the sums of batches like this one.

        Sparse rows are summed on the host, and the devices of a CPU share its memory.
        """
        if self.mesh is None or jax.default_backend() == "cpu" or any(map(scipy.sparse.issparse, views.leaves(batch))):
            return 1
        return self.mesh.shape["feature"]

    @property
    def shares_rows(self) -> bool:
        """Whether processes hold different rows."""
        return self.mesh is not None and distributed.count() > 1 and self.mesh.shape["data"] > 1

    def share(self, total: int) -> tuple[int, int]:
        """The range of rows that this process reads; all, if some process had none or its rows were not contiguous."""
        assert self.mesh is not None
        shards = self._row_shards()
        own = shards[jax.process_index()]
        size = -(-total // self.mesh.shape["data"])
        apart = any(max(those) - min(those) + 1 > len(those) for those in shards.values())
        if (self.mesh.shape["data"] - 1) * size >= total or apart:
            return 0, total
        return min(own) * size, min((max(own) + 1) * size, total)

    def _row_shards(self) -> dict[int, set[int]]:
        """The indices along ``data`` of every process's devices."""
        assert self.mesh is not None
        axis = self.mesh.axis_names.index("data")
        shards: dict[int, set[int]] = {}
        for index, device in np.ndenumerate(self.mesh.devices):
            shards.setdefault(device.process_index, set()).add(index[axis])
        return shards

    @property
    def is_first_with_its_rows(self) -> bool:
        """Whether no process with a lower number holds the same rows."""
        shards = {0: {0}} if self.mesh is None else self._row_shards()
        me = jax.process_index()
        return min(process for process, those in shards.items() if those == shards[me]) == me

    def batch(self, batch: Tree, start: int = 0, total: int | None = None, **how: Any) -> Tree:
        """Put host rows on the devices, as `host_batches.to_device` puts them on one.

        With several processes each gives all rows, or its part of ``total`` rows, starting at row ``start``.
        """
        dense = all(isinstance(leaf, np.ndarray) and leaf.ndim > 1 for leaf in views.leaves(batch))
        if self.mesh is not None and distributed.count() > 1 and dense:
            place = partial(Placed.of_rows, start=start, total=total or views.n_rows(batch))
            return views.map_leaves(lambda leaf: place(leaf, sharding=self._sharding(*AXES)), batch)
        batch = host_batches.to_device(batch, **how)
        if self.mesh is None:
            return batch

        def place_whole(leaf: Any) -> Any:
            # Sparse rows have no columns to shard. Labels and nodes are not sharded either: sums over them came out
            # wrong in XLA when their shards were uneven.
            if isinstance(leaf, views.Filled):
                return views.Filled(place_whole(leaf.rows), place_whole(leaf.counts))
            if not isinstance(leaf, jax.Array) or leaf.ndim == 1:
                return jax.tree.map(lambda x: _put(x, self._sharding()), leaf)
            return Placed.of(leaf, self._sharding(*AXES))

        return views.map_leaves(place_whole, batch)

    def state(self, state: Any, template: Tree) -> Any:
        """Shard the arrays of a solver's state that have a player's shape; replicate the others."""
        if self.mesh is None:
            return state
        shapes = {leaf.shape for leaf in jax.tree.leaves(template)}

        def place(x: jax.Array) -> Any:
            for before in (1, 0):
                if x.ndim > before and x.shape[before:] in shapes:
                    return Placed.of(x, self._sharding(*[None] * before, "feature"))
            return _put(x, self._sharding())

        long = {name: jax.tree.map(place, getattr(state, name)) for name in state.long}
        short = jax.tree.map(lambda x: _put(x, self._sharding()), state._replace(**dict.fromkeys(long)))
        return short._replace(**long)

    def replicate(self, problem: Any) -> Any:
        """Replicate a problem's arrays on every device."""
        if self.mesh is None:
            return problem
        return jax.tree.map(lambda x: _put(x, self._sharding()) if isinstance(x, jax.Array) else x, problem)

    def run(self, f: Callable[..., Any], *arguments: Any) -> Any:
        """Call a compiled function with this placement's precision."""
        with scope(self.precision):
            result = f(*arguments)
        # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(result)
        return result

    def _sharding(self, *axes: str | None) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def n_rows(batch: Tree) -> int:
    """The rows of a batch, placed or not, without padding."""
    first = jax.tree.leaves(batch, is_leaf=_is_placed)[0]
    return first.shape[0] if _is_placed(first) else views.n_rows(batch)


def _unpadded(tree: Tree) -> Tree:
    """Replace placed arrays by their values without padding; for use inside compiled functions."""
    return _map(lambda x: x.array[tuple(slice(n) for n in x.shape)], tree)


def on_host(tree: Tree) -> Tree:
    """Fetch placed arrays and arrays of several processes, whole and without padding; leave the rest."""

    def fetch(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        return distributed.fetched(x)

    tree = _map(lambda x: np.asarray(fetch(x.array))[tuple(slice(n) for n in x.shape)], tree)
    return jax.tree.map(fetch, tree)


def for_checkpoint(tree: Tree) -> Tree:
    """The arrays of a checkpoint. With several processes they stay padded, and each process writes its shards."""
    return on_host(tree) if distributed.count() == 1 else _map(lambda x: x.array, tree)


def _padded_like(tree: Tree, like: Tree) -> Tree:
    """Place whole arrays as another tree's are placed."""

    def pad(old: Any, new: Any) -> Any:
        if not _is_placed(old):
            return new
        array = jax.lax.with_sharding_constraint(_padded(new, old.sharding), old.sharding)
        return Placed(array, new.shape, old.sharding)

    return jax.tree.map(pad, like, tree, is_leaf=_is_placed)


def placed(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step(solver, problem, state, ...)`` for placed arrays; results other than the state are replicated."""

    @wraps(step)
    def on_mesh(solver: Any, problem: Any, state: Any, *more: Any) -> Any:
        out = step(solver, problem, _unpadded(state), *map(_unpadded, more))
        if isinstance(out, type(state)):
            out = _padded_like(out, state)
        elif isinstance(out, tuple) and isinstance(out[0], type(state)):
            out = (_padded_like(out[0], state), *out[1:])
        meshes = [x.sharding.mesh for x in jax.tree.leaves(state, is_leaf=_is_placed) if _is_placed(x)]
        return _replicated(out, meshes[0]) if meshes else out

    return on_mesh


def _replicated(tree: Tree, mesh: Mesh) -> Tree:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: x if _is_placed(x) else jax.lax.with_sharding_constraint(x, whole), tree, is_leaf=_is_placed
    )


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put a whole array on the devices of a sharding, of this and of other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    here = np.asarray(x)
    return jax.make_array_from_callback(here.shape, sharding, lambda index: here[index])


def _is_placed(x: Any) -> bool:
    return isinstance(x, Placed)


def _map(f: Callable[[Placed], Any], tree: Tree) -> Tree:
    return jax.tree.map(lambda x: f(x) if _is_placed(x) else x, tree, is_leaf=_is_placed)


def _padded(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Pad every axis with zeros to a size that the mesh divides."""
    padding = _padding(x.shape, sharding)
    return jnp.pad(x, [(0, n) for n in padding]) if any(padding) else x


def _padding(shape: tuple[int, ...], sharding: NamedSharding) -> list[int]:
    names = [*sharding.spec, *[None] * len(shape)][: len(shape)]
    return [0 if name is None else -n % sharding.mesh.shape[name] for n, name in zip(shape, names, strict=True)]

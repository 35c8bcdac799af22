"""Where arrays live: rows over one axis of a mesh of devices, features over the other.

The mathematics is written for whole arrays, and the compiler shares it out. Between two steps arrays are `Placed`:
filled up with zeros to sizes that the mesh divides. A step opens them first, which moves nothing, since a shard of the
filled array and of the array itself is the same memory, and closes them last. With features shared out no device holds
a whole player, and a step sends scores and small matrices, whatever the dimension (and, of the accelerated game, what
it knows of blocks that it sketches whole).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
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
    """An array of this shape, filled up with zeros and shared out over a mesh."""

    array: Any
    shape: tuple[int, ...]
    sharding: NamedSharding

    @classmethod
    def of(cls, x: Any, sharding: NamedSharding) -> Placed:
        """A whole array, shared out."""
        return cls(_put(_filled(x, sharding), sharding), x.shape, sharding)

    @classmethod
    def of_rows(cls, part: np.ndarray, start: int, total: int, sharding: NamedSharding) -> Placed:
        """Rows of which every process has some: those it holds on its devices, or all."""
        shape = (total, *part.shape[1:])
        filled = tuple(n + m for n, m in zip(shape, _missing(shape, sharding), strict=True))

        def shard(index: Any) -> np.ndarray:
            bounds = [s.indices(n)[:2] for s, n in zip(index, filled, strict=True)]
            lo, hi = bounds[0][0] - start, min(bounds[0][1], total) - start
            found = part[(slice(lo, max(lo, hi)), *(slice(*b) for b in bounds[1:]))]
            return np.pad(found, [(0, b - a - n) for (a, b), n in zip(bounds, found.shape, strict=True)])

        return cls(jax.make_array_from_callback(filled, sharding, shard), shape, sharding)


def make_mesh(given: Any) -> Mesh | None:
    """A mesh of devices as users name it: ``"auto"``, ``"data=2,feature=4"``, a `jax.sharding.Mesh`, or None."""
    if given is None:
        return None
    if isinstance(given, Mesh):
        if set(given.axis_names) != set(AXES):
            raise ValueError(f"mesh has the axes {given.axis_names}: give one with both axes, 'data' and 'feature'")
        if given.devices.size < len(jax.devices()) and distributed.count() > 1:
            raise ValueError(
                f"mesh is of {given.devices.size} devices, and there are {len(jax.devices())}: use them all"
            )
        # Its devices and axes, which the compiler is to share out over by itself.
        return Mesh(given.devices, given.axis_names)
    devices = jax.devices()
    # Rows over processes, which read their own, and features over what each has.
    each = len(devices) // distributed.count()
    sizes = {"data": len(devices) // each, "feature": each} if given == "auto" else _sizes(given)
    count = sizes["data"] * sizes["feature"]
    if count > len(devices):
        raise ValueError(f"mesh={given!r} is of {count} devices, and there are {len(devices)}: give smaller numbers")
    if distributed.count() > 1 and count < len(devices):
        raise ValueError(f"mesh={given!r} is of {count} devices, and the processes have {len(devices)}: use them all")
    if count == 1:
        return None
    shape = sizes["data"], sizes["feature"]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[:count])


def _sizes(given: Any) -> dict[str, int]:
    message = f"mesh={given!r}: give 'auto', numbers as in 'data=2,feature=4', or a jax.sharding.Mesh"
    sizes = dict.fromkeys(AXES, 1)
    if not isinstance(given, str):
        raise ValueError(message)
    for part in given.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in sizes or not number.isdigit() or int(number) < 1:
            raise ValueError(message)
        sizes[name] = int(number)
    return sizes


class Placement:
    """Puts batches and states on a mesh; without one, on the device that JAX would take; runs programs there."""

    def __init__(self, mesh: Mesh | None = None, precision: str | None = None):
        self.mesh, self.precision = mesh, precision

    def __getstate__(self) -> dict[str, Any]:
        """Devices are this machine's: elsewhere a run goes on on one."""
        return {"mesh": None, "precision": self.precision}

    @property
    def shares_rows(self) -> bool:
        """Whether processes hold different rows."""
        return self.mesh is not None and distributed.count() > 1 and self.mesh.shape["data"] > 1

    def share(self, total: int) -> tuple[int, int]:
        """Which rows of a batch this process is to read; all, where some process would have none or rows far apart."""
        assert self.mesh is not None
        held = self._held()
        here = held[jax.process_index()]
        size = -(-total // self.mesh.shape["data"])
        apart = any(max(those) - min(those) + 1 > len(those) for those in held.values())
        if (self.mesh.shape["data"] - 1) * size >= total or apart:
            return 0, total
        return min(here) * size, min((max(here) + 1) * size, total)

    def _held(self) -> dict[int, set[int]]:
        """The places along ``data`` of every process."""
        assert self.mesh is not None
        axis = self.mesh.axis_names.index("data")
        held: dict[int, set[int]] = {}
        for index, device in np.ndenumerate(self.mesh.devices):
            held.setdefault(device.process_index, set()).add(index[axis])
        return held

    @property
    def speaks_for_its_rows(self) -> bool:
        """Whether this is the first of the processes that hold the same rows as it."""
        held = {0: {0}} if self.mesh is None else self._held()
        me = jax.process_index()
        return min(process for process, those in held.items() if those == held[me]) == me

    def batch(self, batch: Tree, start: int = 0, total: int | None = None, **how: Any) -> Tree:
        """Host rows on the devices, as `eigenstream.host.to_device` puts them on one.

        Of several processes each gives a part, from ``start`` on of ``total`` rows, or all.
        """
        if self.mesh is not None and distributed.count() > 1 and all(map(_is_dense, views.leaves(batch))):
            place = partial(Placed.of_rows, start=start, total=total or views.n_rows(batch))
            return views.map_leaves(lambda leaf: place(leaf, sharding=self._sharding(*AXES)), batch)
        batch = host_batches.to_device(batch, **how)
        if self.mesh is None:
            return batch

        def place_whole(leaf: Any) -> Any:
            # Sparse rows have no columns to share out; and sums by label or by node, if these are shared out unevenly,
            # have been seen to go wrong in XLA.
            if isinstance(leaf, views.Filled):
                return views.Filled(place_whole(leaf.rows), place_whole(leaf.counts))
            if not isinstance(leaf, jax.Array) or leaf.ndim == 1:
                return jax.tree.map(lambda x: _put(x, self._sharding()), leaf)
            return Placed.of(leaf, self._sharding(*AXES))

        return views.map_leaves(place_whole, batch)

    def state(self, state: Any, template: Tree) -> Any:
        """A solver's state with what is as long as a player, or part of one, shared out, and the rest everywhere."""
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

    def everywhere(self, problem: Any) -> Any:
        """A problem with its arrays, if it has any, on every device."""
        if self.mesh is None:
            return problem
        return jax.tree.map(lambda x: _put(x, self._sharding()) if isinstance(x, jax.Array) else x, problem)

    def run(self, f: Callable[..., Any], *arguments: Any) -> Any:
        """What a compiled function gives, its products of the precision asked for.

        Devices that are threads of one processor may wait for one another for ever if two programs are under way.
        """
        with scope(self.precision):
            result = f(*arguments)
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(result)
        return result

    def _sharding(self, *axes: str | None) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def n_rows(batch: Tree) -> int:
    """Of a batch, placed or not."""
    first = jax.tree.leaves(batch, is_leaf=_is_placed)[0]
    return first.shape[0] if _is_placed(first) else views.n_rows(batch)


def opened(tree: Tree) -> Tree:
    """Whole arrays in the place of placed ones, inside a compiled function."""
    return _map(lambda x: x.array[tuple(slice(n) for n in x.shape)], tree)


def on_host(tree: Tree) -> Tree:
    """Placed arrays, whole, on the host, and of several processes all arrays; all else as it is."""

    def whole(x: Any) -> Any:
        if isinstance(x, Placed):
            return _fetched(x.array)[tuple(slice(n) for n in x.shape)]
        return x if not isinstance(x, jax.Array) or x.is_fully_addressable else _fetched(x)

    return jax.tree.map(whole, tree, is_leaf=_is_placed)


def _fetched(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def saved(tree: Tree) -> Tree:
    """Arrays as a checkpoint takes them: of several processes where they are, filled up, each to write its part."""
    return on_host(tree) if distributed.count() == 1 else _map(lambda x: x.array, tree)


def closed(tree: Tree, like: Tree) -> Tree:
    """Whole arrays, placed where those of another tree are."""

    def close(old: Any, new: Any) -> Any:
        if not _is_placed(old):
            return new
        filled = _filled(new, old.sharding)
        return Placed(jax.lax.with_sharding_constraint(filled, old.sharding), old.shape, old.sharding)

    return jax.tree.map(close, like, tree, is_leaf=_is_placed)


def placed(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a solver, a problem, a state and more that gives the next state, or more, on placed arrays.

    What is not placed is on every device afterwards.
    """

    @wraps(step)
    def on_mesh(solver: Any, problem: Any, state: Any, *more: Any) -> Any:
        out = step(solver, problem, opened(state), *map(opened, more))
        mesh = next((x.sharding.mesh for x in jax.tree.leaves(state, is_leaf=_is_placed) if _is_placed(x)), None)
        if isinstance(out, type(state)):
            return _everywhere(closed(out, state), mesh)
        if isinstance(out, tuple) and isinstance(out[0], type(state)):
            return _everywhere((closed(out[0], state), *out[1:]), mesh)
        return _everywhere(out, mesh)

    return on_mesh


def _everywhere(tree: Tree, mesh: Mesh | None) -> Tree:
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: x if _is_placed(x) else jax.lax.with_sharding_constraint(x, whole), tree, is_leaf=_is_placed
    )


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """A whole array on the devices of a sharding, some of which may be another process's."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    here = np.asarray(x)
    return jax.make_array_from_callback(here.shape, sharding, lambda index: here[index])


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.ndim > 1


def _is_placed(x: Any) -> bool:
    return isinstance(x, Placed)


def _map(f: Callable[[Placed], Any], tree: Tree) -> Tree:
    return jax.tree.map(lambda x: f(x) if _is_placed(x) else x, tree, is_leaf=_is_placed)


def _filled(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """With zeros at the end of each axis, up to a size that the mesh divides."""
    missing = _missing(x.shape, sharding)
    return jnp.pad(x, [(0, m) for m in missing]) if any(missing) else x


def _missing(shape: tuple[int, ...], sharding: NamedSharding) -> list[int]:
    names = [*sharding.spec, *[None] * len(shape)][: len(shape)]
    return [0 if name is None else -n % sharding.mesh.shape[name] for n, name in zip(shape, names, strict=True)]

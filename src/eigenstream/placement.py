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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eigenstream import host, rows

Tree = Any

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
    def of(cls, x: jax.Array, sharding: NamedSharding) -> Placed:
        """A whole array, shared out."""
        return cls(jax.device_put(_filled(x, sharding), sharding), x.shape, sharding)


def make_mesh(given: Any) -> Mesh | None:
    """A mesh of devices as users name it: ``"auto"``, ``"data=2,feature=4"``, a `jax.sharding.Mesh`, or None."""
    if given is None:
        return None
    if isinstance(given, Mesh):
        if set(given.axis_names) != set(AXES):
            raise ValueError(f"mesh has the axes {given.axis_names}: give one with both axes, 'data' and 'feature'")
        # Its devices and axes, which the compiler is to share out over by itself.
        return Mesh(given.devices, given.axis_names)
    devices = jax.devices()
    sizes = {"data": 1, "feature": len(devices)} if given == "auto" else _sizes(given)
    count = sizes["data"] * sizes["feature"]
    if count > len(devices):
        raise ValueError(f"mesh={given!r} is of {count} devices, and there are {len(devices)}: give smaller numbers")
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
    """Puts batches and states on a mesh; without one, on the device that JAX would take."""

    def __init__(self, mesh: Mesh | None):
        self.mesh = mesh

    def batch(self, batch: Tree, **how: Any) -> Tree:
        """Host rows on the devices, as `eigenstream.host.to_device` puts them on one."""
        batch = host.to_device(batch, **how)
        if self.mesh is None:
            return batch

        def place(leaf: Any) -> Any:
            # Sparse rows have no columns to share out; and sums by label or by node, if these are shared out unevenly,
            # have been seen to go wrong in XLA.
            if not isinstance(leaf, jax.Array) or leaf.ndim == 1:
                return jax.device_put(leaf, self._sharding())
            return Placed.of(leaf, self._sharding(*AXES))

        return rows.map_leaves(place, batch)

    def state(self, state: Any, template: Tree) -> Any:
        """A solver's state with what is as long as a player, or part of one, shared out, and the rest everywhere."""
        if self.mesh is None:
            return state
        shapes = {leaf.shape for leaf in jax.tree.leaves(template)}

        def place(x: jax.Array) -> Any:
            for before in (1, 0):
                if x.ndim > before and x.shape[before:] in shapes:
                    return Placed.of(x, self._sharding(*[None] * before, "feature"))
            return jax.device_put(x, self._sharding())

        long = {name: jax.tree.map(place, getattr(state, name)) for name in state.long}
        short = jax.device_put(state._replace(**dict.fromkeys(long)), self._sharding())
        return short._replace(**long)

    def everywhere(self, problem: Any) -> Any:
        """A problem with its arrays, if it has any, on every device."""
        if self.mesh is None:
            return problem
        return jax.tree.map(lambda x: jax.device_put(x, self._sharding()) if isinstance(x, jax.Array) else x, problem)

    def done(self, result: Any) -> Any:
        """What a compiled function gave, once it has; of one device, at once.

        Devices that are threads of one processor may wait for one another for ever if two programs are under way.
        """
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(result)
        return result

    def _sharding(self, *axes: str | None) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def n_rows(batch: Tree) -> int:
    """Of a batch, placed or not."""
    first = jax.tree.leaves(batch, is_leaf=_is_placed)[0]
    return first.shape[0] if _is_placed(first) else rows.n_rows(batch)


def opened(tree: Tree) -> Tree:
    """Whole arrays in the place of placed ones, inside a compiled function."""
    return _map(lambda x: x.array[tuple(slice(n) for n in x.shape)], tree)


def on_host(tree: Tree) -> Tree:
    """Placed arrays, whole, on the host; all else as it is."""
    return _map(lambda x: np.asarray(x.array)[tuple(slice(n) for n in x.shape)], tree)


def closed(tree: Tree, like: Tree) -> Tree:
    """Whole arrays, placed where those of another tree are."""

    def close(old: Any, new: Any) -> Any:
        if not _is_placed(old):
            return new
        filled = _filled(new, old.sharding)
        return Placed(jax.lax.with_sharding_constraint(filled, old.sharding), old.shape, old.sharding)

    return jax.tree.map(close, like, tree, is_leaf=_is_placed)


def placed(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a solver, a problem, a state and more that gives the next state, on placed arrays."""

    @wraps(step)
    def on_mesh(solver: Any, problem: Any, state: Any, *more: Any) -> Any:
        out = step(solver, problem, opened(state), *map(opened, more))
        return closed(out, state) if isinstance(out, type(state)) else (closed(out[0], state), *out[1:])

    return on_mesh


def _is_placed(x: Any) -> bool:
    return isinstance(x, Placed)


def _map(f: Callable[[Placed], Any], tree: Tree) -> Tree:
    return jax.tree.map(lambda x: f(x) if _is_placed(x) else x, tree, is_leaf=_is_placed)


def _filled(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """With zeros at the end of each axis, up to a size that the mesh divides."""
    names = [*sharding.spec, *[None] * x.ndim][: x.ndim]
    missing = [0 if name is None else -n % sharding.mesh.shape[name] for n, name in zip(x.shape, names, strict=True)]
    return jnp.pad(x, [(0, m) for m in missing]) if any(missing) else x

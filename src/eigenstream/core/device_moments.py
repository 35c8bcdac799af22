"""The moments of `eigenstream.core.moments`, summed on one device or on a mesh of devices.

Sums are in float64, whatever JAX's global setting. Blocks of rows are copied by several threads while earlier blocks
are multiplied. On a mesh every shard of the rows has sums of its own, which are merged when they are read, and the
rows of the scatter are sharded over the ``feature`` axis.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eigenstream import distributed
from eigenstream.core import transfer
from eigenstream.core.moments import Moments, NotFinite, pilot, rows_to_read, spans
from eigenstream.core.precision import compiled, wide

#: Row panels in which one device multiplies the upper triangle.
PANELS = 8
#: Rows in a float32 product: few enough for its rounding to stay near that of the rows.
SHORT = 1024
#: Rows that the pilot is taken from.
PILOT_ROWS = 256
#: Pieces of a block that threads copy, and blocks under way.
PIECES, AHEAD = 4, 3
#: Devices whose float64 products are about as fast as their float32 products.
FAST_FLOAT64 = re.compile(r"cpu|\b([PV]100|A30|A[18]00|G?H[128]00|G?B[12]00|MI\d+\w*)\b", re.IGNORECASE)


class Sums(NamedTuple):
    """The sums of each shard of the rows; the leading axis ``s`` has one entry without a mesh."""

    #: (s, g) counts, and (s, g, d) means minus the pilot.
    counts: Any
    means: Any
    #: Panels of the scatter's rows, each ``(s, w, d - first)``: from the panel's ``first`` row on, which the diagonal
    #: starts. On a mesh one panel has all rows, and rows of zeros to a multiple of the shards.
    scatter: Any


class DeviceMoments:
    """Moments on the devices of a mesh, or on JAX's default device; the methods are those of `Moments`."""

    def __init__(self, d: int, groups: int = 1, mesh: Mesh | None = None, short: bool | None = None):
        self.mesh, self._d = mesh, d
        #: Whether products are in float32, summed in float64 every SHORT rows.
        self.short = not FAST_FLOAT64.search(jax.devices()[0].device_kind) if short is None else short
        #: The pilot; None before the first rows.
        self._pilot: np.ndarray | None = None
        #: Blocks whose copies are under way, and the last block with whether it was finite.
        self._sent: list[tuple[Any, ...]] = []
        self._last: tuple[Any, Any] | None = None
        #: The merged sums, until more rows come.
        self._read: Sums | None = None
        with wide():
            self._sums = _empty(d, groups, mesh)()

    @classmethod
    def of(cls, moments: Moments, mesh: Mesh | None = None) -> DeviceMoments:
        """Moments from the host: the sums of the first shard of the rows."""
        out = cls(len(moments.pilot), len(moments.counts), mesh)
        if not moments.counts.any():
            return out
        d = len(moments.pilot)
        panels = tuple(moments.panel(a, min(b, d), 1.0, columns=(a, d)) for a, b in _spans(d, mesh))

        def placed(like: jax.Array, part: np.ndarray) -> jax.Array:
            whole = np.zeros(like.shape)
            whole[0][tuple(slice(n) for n in part.shape)] = part
            return _place(whole, like.sharding)

        with wide():
            out._sums = jax.tree.map(placed, out._sums, Sums(moments.counts, moments.means, panels))
        out._pilot = moments.pilot
        return out

    def __reduce__(self) -> Any:
        """Pickle as host moments, from which any machine can continue."""
        return Moments, tuple(self.on_host())

    def add(
        self,
        rows: Any,
        labels: np.ndarray | None = None,
        batch: Any = None,
        *,
        stays: bool = False,
        start: int = 0,
        total: int | None = None,
    ) -> DeviceMoments:
        """Add rows: dense matrices side by side, on the host or on a device.

        ``batch``: what an error names. ``stays``: nobody writes to the rows before they are summed. On a mesh of
        several processes, ``rows`` are this process's part of ``total`` rows, from row ``start`` on.
        """
        parts = rows if isinstance(rows, list) else [rows]
        self._read = None
        if self._pilot is None:
            first = np.concatenate([_pilot(x[:PILOT_ROWS]) for x in parts])
            self._pilot = first if self.mesh is None else distributed.gather_all(first)[0]
        if self.mesh is not None:
            self._add_on_mesh(parts, labels, batch, start, total or len(parts[0]))
            return self
        step = rows_to_read(self._d)
        for lo in range(0, len(parts[0]), step):
            block = [x[lo : lo + step] for x in parts]
            sent = [_sent(x) for x in block]
            self._sent.append((sent, None if labels is None else labels[lo : lo + step], len(block[0]), batch))
            if len(self._sent) > AHEAD:
                self._multiply()
        while self._sent and not stays:
            self._multiply()
        return self

    def _multiply(self) -> None:
        """Sum the first block whose copies are under way."""
        sent, labels, count, batch = self._sent.pop(0)
        with wide():
            views = [arrival() for arrival in sent]
            padded = None if labels is None else np.pad(labels, (0, len(views[0]) - count))
            self._sums, finite = _add(self._sums, views, padded, count, self._pilot, self.short)
        # Read while the next block is multiplied.
        self._check((finite, batch))

    def _check(self, following: tuple[Any, Any] | None = None) -> None:
        """Refuse the last block if it was not finite, and so left out of the sums; ``following`` is checked next."""
        last, self._last = self._last, following
        if last is not None and not bool(np.asarray(last[0])):
            raise NotFinite(last[1])

    def _add_on_mesh(self, parts: list[Any], labels: Any, batch: Any, start: int, total: int) -> None:
        assert self.mesh is not None
        shards = self.mesh.shape["data"]
        present = (np.arange(-(-total // shards) * shards) < total).astype(np.float64)
        place = partial(_place_rows, start=start, n=len(present), sharding=NamedSharding(self.mesh, P("data")))
        with wide():
            views = [place(np.asarray(x)) for x in parts]
            labels = None if labels is None else place(labels)
            mask = _place(present, NamedSharding(self.mesh, P("data")))
            self._sums, finite = _mesh_program(self.mesh, self.short)(self._sums, views, labels, mask, self._pilot)
            # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
            jax.block_until_ready(self._sums)
        if not bool(np.asarray(finite)):
            raise NotFinite(batch)

    def _total(self) -> Sums:
        """The merged sums: counts and means on the host, the scatter's panels ``(1, w, ...)`` on the device."""
        while self._sent:
            self._multiply()
        self._check()
        if self._read is None:
            with wide():
                sums = self._sums if self.mesh is None else _merge(self.mesh)(self._sums)
                self._read = Sums(*(np.asarray(x[0]) for x in sums[:2]), sums.scatter)  # type: ignore[call-arg]
        return self._read

    @property
    def counts(self) -> np.ndarray:
        return self._total().counts

    @property
    def means(self) -> np.ndarray:
        return self._total().means

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    def group_means(self) -> np.ndarray:
        return self.on_host(scatter=False).group_means()

    def total_scatter(self) -> float:
        with wide():
            return float(np.asarray(_trace(self._total().scatter)))

    def faded(self, factor: float) -> DeviceMoments:
        while self._sent:
            self._multiply()
        self._read = None
        with wide():
            self._sums = _fade(self._sums, factor)
        return self

    def merged(self, other: Any) -> Moments:
        return self.on_host().merged(other.on_host())

    def on_host(self, scatter: bool = True) -> Moments:
        """The same moments on the host; without the scatter, if that is not wanted."""
        counts, means, on_device = self._total()
        whole = np.zeros((0, 0))
        if scatter:
            whole = np.zeros((self._d, self._d), order="F")
            for (a, b), panel in zip(_spans(self._d, self.mesh), on_device, strict=True):
                # Above the diagonal, which host moments keep alone.
                whole[a:b, a:] = np.triu(_fetched(panel)[0][: self._d - a])
        return Moments(counts, means, whole, np.zeros(self._d) if self._pilot is None else self._pilot)

    def panel(
        self, start: int, stop: int, divisor: float, about_zero: bool = False, columns: tuple[int, int] | None = None
    ) -> Any:
        """Rows ``start`` to ``stop`` of the scatter about the means, or about zero, over ``divisor``."""
        if self.mesh is not None and distributed.count() > 1:
            return self.on_host().panel(start, stop, divisor, about_zero, columns)
        counts, _, scatter = self._total()
        means = self.on_host(scatter=False).group_means()
        centres = np.sqrt(counts)[:, None] * means if about_zero else np.zeros((1, self._d))
        with wide():
            # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
            return jax.block_until_ready(_panel(scatter, centres, divisor, (start, stop), columns or (0, self._d)))


def _updated(sums: Sums, x: Any, labels: Any, present: Any, first: Any, short: bool) -> tuple[Sums, Any]:
    """The sums with a block of float64 rows, and whether it was finite; if not, it is left out.

    ``first``: the first row of the panel of the scatter; None for the upper panels of all of it.
    """
    counts, means, scatter = sums
    g = len(counts)
    member = present[:, None] if g == 1 else jax.nn.one_hot(labels, g, dtype=x.dtype) * present[:, None]
    arrived = member.sum(0)
    mean = member.T @ x / jnp.maximum(arrived, 1)[:, None]
    finite = jnp.isfinite(mean).all()
    arrived, mean = jnp.where(finite, arrived, 0), jnp.where(finite, mean, 0)
    total = counts + arrived
    share, gaps = (arrived / jnp.maximum(total, 1))[:, None], mean - means
    centres = mean - jnp.sqrt(counts / jnp.maximum(total, 1))[:, None] * gaps
    z = jnp.where(finite & (present > 0)[:, None], x - (centres if g == 1 else member @ centres), 0)
    scatter = (_with_short_products if short else _with_product)(scatter, z, first)
    return Sums(total, means + share * gaps, scatter), finite


def _with_product(panels: Any, Z: Any, first: Any) -> Any:
    """The panels of the scatter plus those of ``ZᵀZ``; of one panel that starts at row ``first``, if that is given.

    Each panel is an array of its own, so that a matrix product is added to it in place.
    """
    if first is not None:
        (panel,) = panels
        width = len(panel)
        rows = jax.lax.dynamic_slice_in_dim(jnp.pad(Z, ((0, 0), (0, width))), first, width, axis=1)
        return (panel + (rows.T @ Z).astype(panel.dtype),)
    ends = itertools.pairwise(itertools.accumulate(map(len, panels), initial=0))
    return tuple(
        panel + (Z[:, a:b].T @ Z[:, a:]).astype(panel.dtype) for (a, b), panel in zip(ends, panels, strict=True)
    )


def _with_short_products(scatter: Any, z: Any, first: Any) -> Any:
    """The same by float32 products of SHORT rows each."""
    b, d = z.shape
    rows = jnp.pad(z.astype(jnp.float32), ((0, -b % SHORT), (0, 0))).reshape(-1, SHORT, d)

    def add(scatter: Any, piece: Any) -> tuple[Any, None]:
        with jax.default_matmul_precision("highest"):
            return _with_product(scatter, piece, first), None

    return jax.lax.scan(add, scatter, rows)[0]


def _side_by_side(views: list[Any], point: Any) -> Any:
    """The views side by side, in float64 minus the pilot."""
    return jnp.concatenate([x.astype(jnp.float64) for x in views], axis=1) - point


@partial(compiled, static_argnames="short", donate_argnums=0)
def _add(sums: Sums, views: Any, labels: Any, count: Any, point: Any, short: bool) -> tuple[Sums, Any]:
    x = _side_by_side(views, point)
    present = (jnp.arange(len(x)) < count).astype(x.dtype)
    after, finite = _updated(_first(sums), x, labels, present, None, short)
    return jax.tree.map(lambda part: part[None], after), finite


def _first(sums: Sums) -> Sums:
    """The sums of the first shard of the rows, or of the only one."""
    return jax.tree.map(lambda part: part[0], sums)


_SPECS = Sums(P("data"), P("data"), P("data", "feature"))


@cache
def _mesh_program(mesh: Mesh, short: bool) -> Any:
    """The program that adds rows on a mesh: every device multiplies its rows by its panel of their features."""

    def local(sums: Sums, views: Any, labels: Any, present: Any, point: Any) -> tuple[Sums, Any]:
        first = jax.lax.axis_index("feature") * sums.scatter[0].shape[1]
        x = _side_by_side(views, point)
        after, finite = _updated(_first(sums), x, labels, present, first, short)
        ok = jax.lax.pmin(finite.astype(jnp.int32), ("data", "feature"))
        return jax.tree.map(lambda part: part[None], after), ok

    def program(sums: Sums, views: Any, labels: Any, present: Any, point: Any) -> tuple[Sums, Any]:
        in_specs = (_SPECS, P("data"), P("data"), P("data"), P())
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(_SPECS, P()), check_vma=False)
        return run(sums, views, labels, present, point)

    return compiled(program, donate_argnums=0)


@cache
def _merge(mesh: Mesh) -> Any:
    """The program that merges the sums of all shards of the rows."""

    def program(sums: Sums) -> Sums:
        counts = sums.counts.sum(0)
        share = sums.counts / jnp.where(counts > 0, counts, 1)
        means = (share[:, :, None] * sums.means).sum(0)
        gaps = (jnp.sqrt(sums.counts)[:, :, None] * (sums.means - means)).reshape(-1, sums.means.shape[-1])
        (scatter,) = (panel.sum(0) for panel in sums.scatter)
        rows = jnp.pad(gaps, ((0, 0), (0, len(scatter) - gaps.shape[1])))
        return Sums(counts[None], means[None], ((scatter + rows.T @ gaps)[None],))

    specs = Sums(P(), P(), P(None, "feature"))
    return compiled(program, out_shardings=Sums(*(NamedSharding(mesh, spec) for spec in specs)))


@partial(compiled, donate_argnums=0)
def _fade(sums: Sums, factor: Any) -> Sums:
    return sums._replace(counts=factor * sums.counts, scatter=tuple(factor * panel for panel in sums.scatter))


@compiled
def _trace(panels: Any) -> Any:
    return sum(jnp.trace(panel[0]) for panel in panels)


@partial(compiled, static_argnums=(3, 4))
def _panel(panels: Any, centres: Any, divisor: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Rows and columns of the scatter; columns before a panel are the rows of panels above it."""
    spans = list(itertools.pairwise(itertools.accumulate((panel.shape[1] for panel in panels), initial=0)))
    out = []
    for i, (a, b) in enumerate(spans):
        lo, hi = max(a, rows[0]), min(b, rows[1])
        if lo < hi:
            above = [
                panels[j][0, max(columns[0] - c, 0) : columns[1] - c, lo - c : hi - c].T
                for j, (c, d) in enumerate(spans[:i])
                if max(columns[0], c) < min(columns[1], d)
            ]
            own = panels[i][0, lo - a : hi - a, max(columns[0] - a, 0) : max(columns[1] - a, 0)]
            out.append(jnp.concatenate([*above, own], axis=1))
    return (jnp.concatenate(out) + centres[:, slice(*rows)].T @ centres[:, slice(*columns)]) / divisor


def _pilot(rows: Any) -> np.ndarray:
    return pilot(np.asarray(rows, np.float64))


def _sent(x: Any) -> Callable[[], jax.Array]:
    """Rows on their way to the device, with rows of zeros at the end, so that shapes are few."""
    if isinstance(x, jax.Array):
        return lambda: x
    unit = 1 << max(6, (len(x) - 1).bit_length() - 3)
    size = -(-len(x) // unit) * unit // PIECES

    def piece(lo: int) -> np.ndarray:
        rows = x[lo : lo + size]
        return np.concatenate([rows, np.zeros((size - len(rows), *x.shape[1:]), x.dtype)]) if len(rows) < size else rows

    with wide():
        return transfer.send([partial(piece, lo) for lo in range(0, size * PIECES, size)])


def _spans(d: int, mesh: Mesh | None) -> list[tuple[int, int]]:
    """First and last rows of the panels of the scatter: on a mesh one panel, as long as its shards ask."""
    if mesh is not None:
        return [(0, -(-d // mesh.shape["feature"]) * mesh.shape["feature"])]
    return spans(d, PANELS)


@cache
def _empty(d: int, groups: int, mesh: Mesh | None) -> Any:
    """The program that gives sums of no rows."""
    s = 1 if mesh is None else mesh.shape["data"]

    def program() -> Sums:
        panels = tuple(jnp.zeros((s, b - a, d - a)) for a, b in _spans(d, mesh))
        return Sums(jnp.zeros((s, groups)), jnp.zeros((s, groups, d)), panels)

    if mesh is None:
        return compiled(program)
    return compiled(program, out_shardings=Sums(*(NamedSharding(mesh, spec) for spec in _SPECS)))


def _place(x: np.ndarray, sharding: Any) -> jax.Array:
    """A whole host array on the devices of a sharding, of this and of other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _place_rows(part: np.ndarray, start: int, n: int, sharding: NamedSharding) -> jax.Array:
    """``n`` rows on a mesh, zeros where this process has none; its part starts at row ``start``."""

    def shard(index: Any) -> np.ndarray:
        lo, hi, _ = index[0].indices(n)
        found = part[max(lo - start, 0) : max(hi - start, 0)]
        return np.concatenate([found, np.zeros((hi - lo - len(found), *part.shape[1:]), part.dtype)])

    return jax.make_array_from_callback((n, *part.shape[1:]), sharding, shard)


def _fetched(x: jax.Array) -> np.ndarray:
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))

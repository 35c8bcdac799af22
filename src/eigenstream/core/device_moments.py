"""The moments of `eigenstream.core.moments`, summed on one device or on a mesh of devices.

Sums are in float64, whatever JAX's global setting. Blocks of rows are copied by several threads while earlier blocks
are multiplied. On a mesh every shard of the rows has sums of its own, which are merged when they are read, and the
rows of the scatter are sharded over the ``feature`` axis. See `eigenstream.core.device_sums` for the programs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eigenstream import distributed
from eigenstream.core import device_sums, transfer
from eigenstream.core.device_sums import Sums
from eigenstream.core.moments import Moments, NotFinite, pilot, rows_to_read
from eigenstream.core.precision import wide

#: Rows that the pilot is taken from.
PILOT_ROWS = 256
#: Sums of at most this many features are read from a mesh by every process, and solved by each on one device.
GATHERED = 4096
#: Pieces of a block that threads copy, and blocks under way.
PIECES, AHEAD = 4, 3
#: Devices whose float64 products are about as fast as their float32 products.
FAST_FLOAT64 = re.compile(r"cpu|\b([PV]100|A30|A[18]00|G?H[128]00|G?B[12]00|MI\d+\w*)\b", re.IGNORECASE)


class DeviceMoments:
    """Moments on the devices of a mesh, or on JAX's default device; the methods are those of `Moments`."""

    def __init__(
        self,
        d: int,
        groups: int = 1,
        mesh: Mesh | None = None,
        short: bool | None = None,
        sizes: list[int] | None = None,
    ):
        self.mesh, self._d = mesh, d
        #: First and last rows of the panels of the scatter; on a mesh those of views, whose ``sizes`` are given.
        self._spans = device_sums.row_spans(sizes or [d], mesh)
        #: Whether products are in float32, summed in float64 every SHORT rows.
        self.short = not FAST_FLOAT64.search(jax.devices()[0].device_kind) if short is None else short
        #: The pilot; None before the first rows.
        self._pilot: np.ndarray | None = None
        #: Blocks whose copies are under way, and the last block with whether it was finite.
        self._sent: list[tuple[Any, ...]] = []
        self._last: tuple[Any, Any] | None = None
        #: The merged sums on the devices and on the host; None after more rows have come.
        self._read: Sums | None = None
        self._gathered: Moments | None = None
        with wide():
            self._sums = device_sums.empty(self._spans, groups, mesh)()

    @classmethod
    def of(cls, moments: Moments, mesh: Mesh | None = None, sizes: list[int] | None = None) -> DeviceMoments:
        """Moments from the host: the sums of the first shard of the rows."""
        out = cls(len(moments.pilot), len(moments.counts), mesh, sizes=sizes)
        if not moments.counts.any():
            return out
        d = len(moments.pilot)
        first = [a if mesh is None else 0 for a, _ in out._spans]
        panels = tuple(moments.panel(a, b, 1.0, columns=(c, d)) for (a, b), c in zip(out._spans, first, strict=True))

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
        self._read = self._gathered = None
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
            self._sums, finite = device_sums.add(self._sums, views, padded, count, self._pilot, self.short)
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
        place = partial(_sent_to_mesh, start=start, n=len(present), sharding=NamedSharding(self.mesh, P("data")))
        with wide():
            sent = [place(np.asarray(x)) for x in parts]
            labels = None if labels is None else place(labels)()
            mask = _place(present, NamedSharding(self.mesh, P("data")))
            views = [arrival() for arrival in sent]
            program = device_sums.add_on_mesh(self.mesh, self._spans, self.short)
            self._sums, finite = program(self._sums, views, labels, mask, self._pilot)
        self._check((finite, batch))
        if jax.default_backend() == "cpu":
            # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
            jax.block_until_ready(self._sums)
            self._check()

    def _total(self) -> Sums:
        """The merged sums: counts and means on the host, the scatter's panels ``(1, w, ...)`` on the device."""
        while self._sent:
            self._multiply()
        self._check()
        if self._read is None:
            with wide():
                apart = self.mesh is not None and self.mesh.shape["data"] > 1
                sums = device_sums.merge(self.mesh, self._spans)(self._sums) if apart else self._sums
                self._read = Sums(*(distributed.fetched(x)[0] for x in sums[:2]), sums.scatter)  # type: ignore[call-arg]
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
            return float(np.asarray(device_sums.trace(self._total().scatter, self._spans)))

    def faded(self, factor: float) -> DeviceMoments:
        while self._sent:
            self._multiply()
        self._read = self._gathered = None
        with wide():
            self._sums = device_sums.fade(self._sums, factor)
        return self

    def merged(self, other: Any) -> Moments:
        return self.on_host().merged(other.on_host())

    def on_host(self, scatter: bool = True) -> Moments:
        """The same moments on the host; without the scatter, if that is not wanted."""
        counts, means, on_device = self._total()
        whole = np.zeros((0, 0))
        if scatter:
            whole = np.zeros((self._d, self._d), order="F")
            for (a, b), panel in zip(self._spans, on_device, strict=True):
                for lo, rows in self._rows_of(panel):
                    hi = min(a + lo + len(rows), b)
                    whole[a + lo : hi, a:] = rows[: hi - a - lo, a - self._d :]
                # Host moments keep the triangle above the diagonal alone.
                whole[a:b, a:b] = np.triu(whole[a:b, a:b])
        return Moments(counts, means, whole, np.zeros(self._d) if self._pilot is None else self._pilot)

    def _rows_of(self, panel: jax.Array) -> Iterator[tuple[int, np.ndarray]]:
        """The rows of a panel on the host, each part with the index of its first row."""
        if self.mesh is None or panel.is_fully_addressable:
            yield 0, np.asarray(panel)[0]
            return
        # JAX would gather the whole panel on every device.
        width = device_sums.padded(panel.shape[1], self.mesh.shape["feature"])[1]
        with wide():
            for j in range(panel.shape[1] // width):
                yield j * width, np.asarray(device_sums.part_on_mesh(self.mesh, width)(panel, j))

    def panel(
        self, start: int, stop: int, divisor: float, about_zero: bool = False, columns: tuple[int, int] | None = None
    ) -> Any:
        """Rows ``start`` to ``stop`` of the scatter about the means, or about zero, over ``divisor``.

        Of many features on a mesh, the rows of a view are sharded over ``feature``, with rows of zeros at the end.
        """
        if self.mesh is not None and self._d <= GATHERED:
            self._gathered = self._gathered or self.on_host()
            return self._gathered.panel(start, stop, divisor, about_zero, columns)
        counts, _, scatter = self._total()
        means = self.on_host(scatter=False).group_means()
        centres = np.sqrt(counts)[:, None] * means if about_zero else np.zeros((1, self._d))
        rows, columns = (start, stop), columns or (0, self._d)
        with wide():
            if self.mesh is None:
                return device_sums.panel(scatter, centres, divisor, rows, columns)
            program = device_sums.panel_on_mesh(self.mesh, self._spans, rows, columns)
            # CPU devices are threads of one process. Two programs at once may deadlock, so wait for this one.
            return jax.block_until_ready(program(scatter, centres, divisor))


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


def _place(x: np.ndarray, sharding: Any) -> jax.Array:
    """A whole host array on the devices of a sharding, of this and of other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _sent_to_mesh(part: np.ndarray, start: int, n: int, sharding: NamedSharding) -> Callable[[], jax.Array]:
    """``n`` rows on their way to a mesh, zeros where this process has none; its part starts at row ``start``."""
    shape = n, *part.shape[1:]

    def piece(lo: int, hi: int) -> np.ndarray:
        found = part[max(lo - start, 0) : max(hi - start, 0)]
        return np.concatenate([found, np.zeros((hi - lo - len(found), *shape[1:]), part.dtype)])

    def shard(device: Any, index: Any) -> Callable[[], jax.Array]:
        lo, hi, _ = index[0].indices(n)
        edges = np.linspace(lo, hi, PIECES + 1).astype(int).tolist()
        return transfer.send([partial(piece, a, b) for a, b in itertools.pairwise(edges)], device=device)

    shards = [shard(*where) for where in sharding.addressable_devices_indices_map(shape).items()]
    return lambda: jax.make_array_from_single_device_arrays(shape, sharding, [arrival() for arrival in shards])

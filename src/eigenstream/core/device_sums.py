"""The programs that sum moments on a device or on a mesh, for `eigenstream.core.device_moments`.

On one device the scatter is summed in panels of its upper triangle. On a mesh every shard of the rows has sums of its
own, and the scatter has one panel for each view: all columns of the view's rows, which are sharded over the ``feature``
axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eigenstream.core.moments import spans
from eigenstream.core.precision import compiled

#: The fewest row panels in which one device multiplies the upper triangle, and the most rows of one.
PANELS, TALLEST = 8, 2560
#: Rows in a float32 product: few enough for its rounding to stay near that of the rows.
SHORT = 1024
#: The most rows of a shard that are broadcast at once.
WIDTH = 512

Spans = tuple[tuple[int, int], ...]


class Sums(NamedTuple):
    """The sums of each shard of the rows; the leading axis ``s`` has one entry without a mesh."""

    #: (s, g) counts, and (s, g, d) means minus the pilot.
    counts: Any
    means: Any
    #: Panels of the scatter's rows. On one device ``(s, w, d - first)``: from the panel's ``first`` row on, which the
    #: diagonal starts. On a mesh ``(s, w, d)``, with rows of zeros to the size that `padded` gives.
    scatter: Any


SPECS = Sums(P("data"), P("data"), P("data", "feature"))


def padded(n: int, shards: int) -> tuple[int, int]:
    """Pad ``n`` rows so that every shard has the same number of parts, each of at most WIDTH rows.

    Returns the padded number of rows, and the rows of one part.
    """
    parts = -(-n // (shards * WIDTH))
    width = -(-n // (shards * parts))
    return shards * parts * width, width


def row_spans(sizes: list[int], mesh: Mesh | None) -> Spans:
    """First and last rows of the panels of the scatter of views of these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    d = sum(sizes)
    return tuple(itertools.pairwise(ends)) if mesh is not None else tuple(spans(d, max(PANELS, -(-d // TALLEST))))


@cache
def empty(rows: Spans, groups: int, mesh: Mesh | None) -> Any:
    """The program that gives sums of no rows."""
    s, shards = (1, 0) if mesh is None else (mesh.shape["data"], mesh.shape["feature"])
    d = rows[-1][1]

    def program() -> Sums:
        shapes = [(s, padded(b - a, shards)[0], d) if shards else (s, b - a, d - a) for a, b in rows]
        return Sums(jnp.zeros((s, groups)), jnp.zeros((s, groups, d)), tuple(map(jnp.zeros, shapes)))

    if mesh is None:
        return compiled(program)
    return compiled(program, out_shardings=Sums(*(NamedSharding(mesh, spec) for spec in SPECS)))


@partial(compiled, static_argnames="short", donate_argnums=0)
def add(sums: Sums, views: Any, labels: Any, count: Any, point: Any, short: bool) -> tuple[Sums, Any]:
    """The sums with ``count`` more rows, and whether these were finite; if not, they are left out."""
    x = _side_by_side(views, point)
    present = (jnp.arange(len(x)) < count).astype(x.dtype)
    return _updated(sums, x, labels, present, _with_upper_panels, short)


@cache
def add_on_mesh(mesh: Mesh, rows: Spans, short: bool) -> Any:
    """The program that adds rows on a mesh: every device multiplies its rows by its features."""

    def own_features(panels: Any, Z: Any) -> Any:
        out = []
        for (a, b), panel in zip(rows, panels, strict=True):
            width = len(panel)
            view = jnp.pad(Z[:, a:b], ((0, 0), (0, width * mesh.shape["feature"] - (b - a))))
            own = jax.lax.dynamic_slice_in_dim(view, jax.lax.axis_index("feature") * width, width, axis=1)
            out.append(panel + (own.T @ Z).astype(panel.dtype))
        return tuple(out)

    def local(sums: Sums, views: Any, labels: Any, present: Any, point: Any) -> tuple[Sums, Any]:
        return _updated(sums, _side_by_side(views, point), labels, present, own_features, short, ("data", "feature"))

    in_specs = (SPECS, P("data"), P("data"), P("data"), P())
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(SPECS, P()), check_vma=False)
    return compiled(program, donate_argnums=0)


def _side_by_side(views: list[Any], point: Any) -> Any:
    """The views side by side, in float64 minus the pilot."""
    return jnp.concatenate([x.astype(jnp.float64) for x in views], axis=1) - point


def _updated(
    sums: Sums,
    x: Any,
    labels: Any,
    present: Any,
    with_product: Callable[[Any, Any], Any],
    short: bool,
    axes: tuple[str, ...] = (),
) -> tuple[Sums, Any]:
    """The sums of one shard with a block of float64 rows, and whether it was finite; if not, it is left out.

    ``with_product(panels, Z)`` adds the panels of ``ZᵀZ``. ``axes``: those of a mesh, whose shards agree.
    """
    counts, means, scatter = jax.tree.map(lambda part: part[0], sums)
    g = len(counts)
    member = present[:, None] if g == 1 else jax.nn.one_hot(labels, g, dtype=x.dtype) * present[:, None]
    arrived = member.sum(0)
    mean = member.T @ x / jnp.maximum(arrived, 1)[:, None]
    finite = jax.lax.pmin(jnp.isfinite(mean).all().astype(jnp.int32), axes) > 0
    arrived, mean = jnp.where(finite, arrived, 0), jnp.where(finite, mean, 0)
    total = counts + arrived
    share, gaps = (arrived / jnp.maximum(total, 1))[:, None], mean - means
    centres = mean - jnp.sqrt(counts / jnp.maximum(total, 1))[:, None] * gaps
    z = jnp.where(finite & (present > 0)[:, None], x - (centres if g == 1 else member @ centres), 0)
    scatter = _with_short_products(scatter, z, with_product) if short else with_product(scatter, z)
    return jax.tree.map(lambda part: part[None], Sums(total, means + share * gaps, scatter)), finite


def _with_upper_panels(panels: Any, Z: Any) -> Any:
    """Each panel is an array of its own, so that a matrix product is added to it in place."""
    ends = itertools.pairwise(itertools.accumulate(map(len, panels), initial=0))
    return tuple(
        panel + (Z[:, a:b].T @ Z[:, a:]).astype(panel.dtype) for (a, b), panel in zip(ends, panels, strict=True)
    )


def _with_short_products(scatter: Any, z: Any, with_product: Callable[[Any, Any], Any]) -> Any:
    """The same by float32 products of SHORT rows each."""
    b, d = z.shape
    rows = jnp.pad(z.astype(jnp.float32), ((0, -b % SHORT), (0, 0))).reshape(-1, SHORT, d)

    def add(scatter: Any, piece: Any) -> tuple[Any, None]:
        with jax.default_matmul_precision("highest"):
            return with_product(scatter, piece), None

    return jax.lax.scan(add, scatter, rows)[0]


@cache
def merge(mesh: Mesh, rows: Spans) -> Any:
    """The program that merges the sums of all shards of the rows."""

    def program(sums: Sums) -> Sums:
        counts = sums.counts.sum(0)
        share = sums.counts / jnp.where(counts > 0, counts, 1)
        means = (share[:, :, None] * sums.means).sum(0)
        gaps = (jnp.sqrt(sums.counts)[:, :, None] * (sums.means - means)).reshape(-1, sums.means.shape[-1])
        scatter = tuple(
            (panel.sum(0) + _padded(gaps[:, a:b].T, panel.shape[1]) @ gaps)[None]
            for (a, b), panel in zip(rows, sums.scatter, strict=True)
        )
        return Sums(counts[None], means[None], scatter)

    specs = Sums(P(), P(), P(None, "feature"))
    return compiled(program, out_shardings=Sums(*(NamedSharding(mesh, spec) for spec in specs)))


def _padded(X: Any, rows: int) -> Any:
    return jnp.pad(X, ((0, rows - len(X)), (0, 0)))


@partial(compiled, donate_argnums=0)
def fade(sums: Sums, factor: Any) -> Sums:
    return sums._replace(counts=factor * sums.counts, scatter=tuple(factor * panel for panel in sums.scatter))


@partial(compiled, static_argnums=1)
def trace(panels: Any, rows: Spans) -> Any:
    """The trace of the scatter; the columns of a panel end with the last one."""
    d = rows[-1][1]
    return sum(jnp.trace(panel[0], a - (d - panel.shape[2])) for (a, _), panel in zip(rows, panels, strict=True))


@partial(compiled, static_argnums=(3, 4))
def panel(panels: Any, centres: Any, divisor: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Rows and columns of the scatter on one device; columns before a panel are the rows of panels above it."""
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


def broadcast(own: Any, j: Any, width: int) -> Any:
    """Send part ``j`` of the rows, ``width`` rows of one shard, to every device."""
    parts = len(own) // width
    part = jax.lax.dynamic_slice_in_dim(own, j % parts * width, width)
    return jax.lax.psum(jnp.where(j // parts == jax.lax.axis_index("feature"), part, 0), "feature")


@cache
def part_on_mesh(mesh: Mesh, width: int) -> Any:
    """The program that gives part ``j`` of the rows of a panel to all devices."""
    specs = P(None, "feature"), P()
    program = jax.shard_map(
        lambda panel, j: broadcast(panel[0], j, width), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    return compiled(program)


@cache
def panel_on_mesh(mesh: Mesh, spans: Spans, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """The program for rows of one view, and columns, of merged sums on a mesh, padded with rows of zeros.

    The rows of a whole view stay where they are. Others, those of one leaf of a view, are sent in parts.
    """
    (at,) = (i for i, (a, b) in enumerate(spans) if a <= rows[0] and rows[1] <= b)
    n, width = padded(rows[1] - rows[0], mesh.shape["feature"])

    def leaf(panel: Any) -> Any:
        m, parts = len(panel), n // (width * mesh.shape["feature"])
        shard = jax.lax.axis_index("feature")

        def put(j: Any, out: Any) -> Any:
            row = j * width + jnp.arange(width)
            index = row + (rows[0] - spans[at][0]) - shard * m
            own = (row < rows[1] - rows[0]) & (index >= 0) & (index < m)
            part = jax.lax.psum(jnp.where(own[:, None], panel[jnp.clip(index, 0, m - 1)], 0), "feature")
            here = jax.lax.dynamic_update_slice_in_dim(out, part, j % parts * width, 0)
            return jnp.where(j // parts == shard, here, out)

        return jax.lax.fori_loop(0, n // width, put, jnp.zeros((parts * width, panel.shape[1])))

    def local(panels: Any, centres: Any, divisor: Any) -> Any:
        own = panels[at][0][:, slice(*columns)]
        own = own if rows == spans[at] else leaf(own)
        means = jnp.pad(centres[:, slice(*rows)], ((0, 0), (0, n - (rows[1] - rows[0]))))
        means = jax.lax.dynamic_slice_in_dim(means, jax.lax.axis_index("feature") * len(own), len(own), axis=1)
        return (own + means.T @ centres[:, slice(*columns)]) / divisor

    specs = P(None, "feature"), P(), P()
    program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("feature"), check_vma=False)
    # Name the sharding: for an axis of one device JAX would return another one.
    return compiled(program, out_shardings=NamedSharding(mesh, P("feature")))

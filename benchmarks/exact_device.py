"""Exact CCA on one GPU, rows in host memory, beside a plain program that sums in float64 on the device.

    python benchmarks/exact_device.py                      # one GPU of 140 GB, about ten minutes
    python benchmarks/exact_device.py --sizes 1000 --quick # any machine

Two views with 64 planted correlations and condition 10³. Every figure is a second call. ``share``: the sum of the
correlations over that of the larger ones of both programs: no method can overstate them. Writes
docs/results/exact_device.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import itertools
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eigenstream as es

PANELS, PIECES, AHEAD = 8, 4, 3
#: Columns a view, rows and components.
SIZES = {1000: (100_000, 16), 5000: (100_000, 16), 10_000: (100_000, 32), 20_000: (100_000, 32), 30_000: (60_000, 32)}


@partial(jax.jit, donate_argnums=(0, 1))
def add(G, total, x, pilot):
    """Upper panels of the second moments about a pilot, and the sums."""
    x = (x - pilot).astype(jnp.float64)
    d = x.shape[1]
    width = -(-d // PANELS)
    for lo in range(0, d, width):
        hi = min(d, lo + width)
        panel = jax.lax.dynamic_slice(G, (lo, lo), (hi - lo, d - lo)) + x[:, lo:hi].T @ x[:, lo:]
        G = jax.lax.dynamic_update_slice(G, panel, (lo, lo))
    return G, total + x.sum(0)


def on_device(X, Y, rows, pool):
    """Blocks of rows on the device, copied by several threads while earlier ones are summed."""

    def put(lo):
        edges = np.linspace(lo, min(len(X), lo + rows), PIECES + 1).astype(int)
        pairs = list(itertools.pairwise(edges))
        return [[pool.submit(jax.device_put, view[a:b]) for a, b in pairs] for view in (X, Y)]

    starts = list(range(0, len(X), rows))
    ahead = [put(lo) for lo in starts[:AHEAD]]
    for i in range(len(starts)):
        x, y = (jnp.concatenate([piece.result() for piece in view]) for view in ahead.pop(0))
        if i + AHEAD < len(starts):
            ahead.append(put(starts[i + AHEAD]))
        yield jnp.concatenate([x, y], 1)


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def covariance(G, total, n):
    panel = jnp.arange(len(total)) // -(-len(total) // PANELS)
    G = jnp.where(panel[:, None] > panel[None, :], G.T, G)
    return (G - jnp.outer(total, total) / n) / (n - 1)


@partial(jax.jit, static_argnums=(1, 2, 3))
def top(C, dx, k, iterations):
    """Whiten by Cholesky factors, then subspace iteration."""
    solve = partial(jax.scipy.linalg.solve_triangular, lower=True)
    Lx, Ly = jnp.linalg.cholesky(C[:dx, :dx]), jnp.linalg.cholesky(C[dx:, dx:])
    T = solve(Ly, solve(Lx, C[:dx, dx:]).T).T
    Q = jax.random.normal(jax.random.key(0), (dx, k + 32), T.dtype)
    Q = jax.lax.fori_loop(0, iterations, lambda _, Q: jnp.linalg.qr(T @ (T.T @ Q))[0], Q)
    u, s, vt = jnp.linalg.svd(Q.T @ T, full_matrices=False)
    left, right = Q @ u[:, :k], vt[:k].T
    residual = jnp.linalg.norm(T @ right - left * s[:k], axis=0).max()
    return s[:k], solve(Lx, left, trans=1), solve(Ly, right, trans=1), residual


def plain(X, Y, k, iterations=60):
    """The plain program: seconds for sums and solution, correlations, residual."""
    (n, d), pool = X.shape, cf.ThreadPoolExecutor(2 * PIECES)
    with jax.enable_x64(True):
        start = time.perf_counter()
        pilot = jnp.asarray(np.concatenate([X[:256].mean(0), Y[:256].mean(0)]))
        G, total = jnp.zeros((2 * d, 2 * d)), jnp.zeros(2 * d)
        for x in on_device(X, Y, min(8192, max(1024, 2**28 // (2 * d))), pool):
            G, total = add(G, total, x, pilot)
        jax.block_until_ready(G)
        summed = time.perf_counter()
        C = covariance(G, total, n)
        del G
        rho, _, _, residual = jax.block_until_ready(top(C, d, k, iterations))
        done = time.perf_counter()
        return {
            "sums": summed - start,
            "solve": done - summed,
            "seconds": done - start,
            "rho": np.asarray(rho),
            "residual": float(residual),
        }


def rows(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Two views of condition 10³ with 64 correlations along random whitened directions."""
    rho = np.linspace(0.95, 0.1, 64, dtype=np.float32)
    W = [np.linalg.qr(np.random.default_rng(v).standard_normal((d, 64)))[0].astype(np.float32) for v in range(2)]
    deviations = np.logspace(0, -1.5, d, dtype=np.float32)
    views = tuple(np.empty((n, d), np.float32) for _ in range(2))

    def fill(lo: int) -> None:
        rng, b = np.random.default_rng(lo + 7), min(1000, n - lo)
        shared = rng.standard_normal((b, 64), np.float32)
        for view, w in zip(views, W, strict=True):
            part = view[lo : lo + b]
            rng.standard_normal(dtype=np.float32, out=part)
            wanted = np.sqrt(rho) * shared + np.sqrt(1 - rho) * rng.standard_normal((b, 64), np.float32)
            part += (wanted - part @ w) @ w.T
            part *= deviations

    with cf.ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, n, 1000)))
    return views


def timed(f: Any, repeats: int = 3) -> tuple[float, Any]:
    """The median time of ``f`` after a first call, and its last result."""
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        result = f()
        if i:
            times.append(time.perf_counter() - start)
    return float(np.median(times)), result


def peak() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / 1e9


def table_row(d: int, n: int, k: int, repeats: int) -> dict[str, Any]:
    X, Y = rows(n, d)
    # Ours first: the peak of memory is that of the process so far.
    start = time.perf_counter()
    es.CCA(k).fit(X, Y)
    first = time.perf_counter() - start
    seconds, model = timed(lambda: es.CCA(k).fit(X, Y), repeats)
    found = {
        "columns": d,
        "rows": n,
        "k": k,
        "seconds": seconds,
        "first_call": first,
        "solver": type(model.solver_).__name__,
        "residual": float(model.residuals_.max()),
        "message": model.message_,
        "peak_gb": peak(),
    }
    model._run = None
    found["plain_seconds"], bare = timed(lambda: plain(X, Y, k), repeats)
    found |= {f"plain_{name}": float(bare[name]) for name in ("sums", "solve", "residual")}
    best = np.maximum(bare["rho"], model.correlations_)
    found["share"] = float(model.correlations_.sum() / best.sum())
    found["plain_share"] = float(bare["rho"].sum() / best.sum())
    return found


def from_disk_and_loader(n: int, d: int, k: int) -> dict[str, Any]:
    """The same rows in .npy files and from a PyTorch DataLoader, beside a bare read."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    X, Y = rows(n, d)
    found: dict[str, Any] = {"columns": d, "rows": n, "k": k}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("x.npy", "y.npy")]
        for path, view in zip(paths, (X, Y), strict=True):
            np.save(path, view)
        found["read_files"], _ = timed(lambda: [np.load(path) for path in paths], 2)
        stream = es.streams.batches(*map(str, paths))
        found["fit_files"], model = timed(lambda: es.CCA(k).fit_stream(stream), 2)
        found["correlation_files"] = float(model.correlations_.sum())
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=1000)

    def read() -> None:
        for _ in loader:
            pass

    found["read_loader"], _ = timed(read, 2)
    found["fit_loader"], model = timed(lambda: es.CCA(k).fit_stream(loader), 2)
    found["correlation_loader"] = float(model.correlations_.sum())
    found["fit_memory"], model = timed(lambda: es.CCA(k).fit(X, Y), 2)
    found["correlation_memory"] = float(model.correlations_.sum())
    return found


def on_mesh(n: int, d: int, k: int) -> dict[str, Any]:
    """The programs for sums that are sharded over a mesh, on a mesh of all devices, beside those of one device."""
    X, Y = rows(n, d)
    mesh = jax.make_mesh((1, len(jax.devices())), ("data", "feature"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    found: dict[str, Any] = {"columns": d, "rows": n, "k": k, "devices": mesh.size}
    found["one_seconds"], one = timed(lambda: es.CCA(k).fit(X, Y))
    found["seconds"], model = timed(lambda: es.CCA(k, mesh=mesh).fit(X, Y))
    found["apart"] = float(np.abs(model.correlations_ - one.correlations_).max())
    return found | {"residual": float(model.residuals_.max()), "message": model.message_}


def principal(n: int, d: int, k: int = 16) -> dict[str, Any]:
    """PCA where the sums do not fit, beside torch.pca_lowrank with its copy, and bare copies."""
    import torch

    # Drawn on the device: the threads of a processor take a minute.
    X = np.empty((n, d), np.float32)
    maps = jax.random.normal(jax.random.key(0), (64, d)) * jnp.geomspace(1, 0.1, 64)[:, None]

    @jax.jit
    def drawn(key):
        own, shared = (
            jax.random.normal(part, (500, m)) for part, m in zip(jax.random.split(key), (d, 64), strict=True)
        )
        return own + shared @ maps

    for lo in range(0, n, 500):
        X[lo : lo + 500] = drawn(jax.random.key(1 + lo))[: n - lo]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def lowrank() -> np.ndarray:
        rows = torch.from_numpy(X).to(device)
        rows = rows - rows.mean(0)
        V = torch.pca_lowrank(rows, q=32, center=False, niter=2)[2][:, :k]
        found = ((rows @ V) ** 2).sum().item() / (n - 1)
        del rows
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return found

    found: dict[str, Any] = {"columns": d, "rows": n, "k": k}
    found["torch_seconds"], variance = timed(lowrank, 2)
    with cf.ThreadPoolExecutor(8) as pool:

        def copy(pieces: int) -> None:
            for block in np.array_split(X, 16):
                sent = [pool.submit(jax.device_put, piece) for piece in np.array_split(block, pieces)]
                jax.block_until_ready([piece.result() for piece in sent])

        found["copy_1"], _ = timed(lambda: copy(1), 2)
        found["copy_4"], _ = timed(lambda: copy(4), 2)
    found["seconds"], model = timed(lambda: es.PCA(k).fit(X), 2)
    V = model.components_.T.astype(np.float32)
    scores = (X - model.mean_.astype(np.float32)) @ V
    found |= {"solver": type(model.solver_).__name__, "message": model.message_}
    found["variance_share"] = float((scores.astype(np.float64) ** 2).sum() / (n - 1) / variance)
    return found


def page(found: dict[str, Any]) -> str:
    """The figures in words."""
    titles = "columns a view|rows|k|fit, s|plain, s|ratio|share|plain's share|residual|plain's residual|"
    titles += "peak, GB|first call, s"
    lines = [
        f"# Exact CCA on one {found['device']}",
        "",
        "`python benchmarks/exact_device.py`: rows in host memory, two views with 64 planted correlations and",
        "condition 10³, `es.CCA(k).fit(X, Y)` beside a plain JAX program that sums in float64 on the device and",
        "iterates 60 times. Both are timed after a first call; the first call of `fit` compiles. Share: the sum of",
        "the correlations over that of the larger ones of both programs.",
        "",
        f"| {titles.replace('|', ' | ')} |",
        "| ---: " * 12 + "|",
    ]
    for row in found["table"]:
        values = [f"{row[name]:,}" for name in ("columns", "rows", "k")]
        ratio = row["seconds"] / row["plain_seconds"]
        values += [f"{row['seconds']:.2f}", f"{row['plain_seconds']:.2f}", f"{ratio:.2f}", f"{row['share']:.7f}"]
        values += [f"{row['plain_share']:.5f}", f"{row['residual']:.0e}", f"{row['plain_residual']:.0e}"]
        values += [f"{row[name]:.0f}" for name in ("peak_gb", "first_call")]
        lines.append(f"| {' | '.join(values)} |")
    if "disk" in found:
        disk = found["disk"]
        lines += [
            "",
            f"{disk['rows']:,} rows of {disk['columns']:,} + {disk['columns']:,} columns, k = {disk['k']}: from "
            f"memory {disk['fit_memory']:.2f} s; from two `.npy` files {disk['fit_files']:.2f} s, where `np.load` of "
            f"both takes {disk['read_files']:.2f} s; from a PyTorch `DataLoader` {disk['fit_loader']:.2f} s, where "
            f"reading it takes {disk['read_loader']:.2f} s.",
        ]
    if "mesh" in found:
        mesh = found["mesh"]
        lines += [
            "",
            f"{mesh['rows']:,} rows of {mesh['columns']:,} + {mesh['columns']:,} columns, k = {mesh['k']}, by the "
            f"programs for matrices that no device holds whole, on a mesh of {mesh['devices']}: {mesh['seconds']:.2f} "
            f"s, without a mesh {mesh['one_seconds']:.2f} s; correlations differ by {mesh['apart']:.0e}.",
        ]
    if "pca" in found:
        pca = found["pca"]
        lines += [
            "",
            f"PCA of {pca['rows']:,} × {pca['columns']:,}, k = {pca['k']}, by {pca['solver']}: {pca['seconds']:.1f} s, "
            f"`torch.pca_lowrank(q=32, niter=2)` with its copy {pca['torch_seconds']:.1f} s, a bare copy "
            f"{pca['copy_4']:.1f} s; {pca['variance_share']:.5f} of its variance.",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="A tenth of the rows and columns of the other parts.")
    parser.add_argument("--parts", nargs="*", default=["table", "disk", "mesh", "pca"])
    parser.add_argument("--keep", action="store_true", help="Keep the figures of other parts, from an earlier process.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/results/exact_device.json"))
    options = parser.parse_args()
    shrink = 10 if options.quick else 1
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "table": []}
    if options.keep:
        found |= json.loads(options.out.read_text()) | ({"table": []} if "table" in options.parts else {})

    def keep(name: str, value: Any) -> None:
        print(name, json.dumps(value), flush=True)
        found[name] = found["table"] + [value] if name == "table" else value
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(found))

    for d in options.sizes if "table" in options.parts else ():
        n, k = SIZES[d]
        keep("table", table_row(d, n // shrink, k, options.repeats))
    if "disk" in options.parts:
        keep("disk", from_disk_and_loader(100_000 // shrink, 5000 // shrink, 16))
    if "mesh" in options.parts:
        keep("mesh", on_mesh(100_000 // shrink, 10_000 // shrink, 32 // min(shrink, 2)))
    if "pca" in options.parts:
        keep("pca", principal(40_000 // shrink, 100_000 // shrink))


if __name__ == "__main__":
    main()

"""Ten million rows from disk through PCA and CCA, beside the two limits: a bare read and a bare product.

    python benchmarks/streaming.py [--rows 10000000] [--folder /tmp]

Needs 20 GB of disk for the default size. Writes docs/results/streaming.json and docs/results/streaming.md. Each round
measures everything once, after the files' pages were dropped from memory (cold) and again with them there (warm);
figures are medians over rounds. PCA reads one file of 256 columns, CCA two files of 128.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
COLUMNS, CHUNK, ROUNDS = 256, 100_000, 5
SOLVE_COMPONENTS = 8


def write(folder: Path, n: int) -> dict[str, Path]:
    """Correlated columns with means away from zero, in one file and in two halves."""
    paths = {name: folder / f"eigenstream_bench_{name}.npy" for name in ("whole", "left", "right")}
    shapes = {"whole": COLUMNS, "left": COLUMNS // 2, "right": COLUMNS // 2}
    rng = np.random.default_rng(0)
    mixing = 0.3 * rng.normal(size=(32, COLUMNS)).astype(np.float32)
    means = rng.uniform(-0.5, 0.5, COLUMNS).astype(np.float32)
    files = {name: np.lib.format.open_memmap(paths[name], "w+", np.float32, (n, shapes[name])) for name in paths}
    for lo in range(0, n, CHUNK):
        count = min(CHUNK, n - lo)
        rows = rng.standard_normal((count, 32), np.float32) @ mixing + means
        rows += rng.standard_normal((count, COLUMNS), np.float32)
        files["whole"][lo : lo + count] = rows
        files["left"][lo : lo + count] = rows[:, : COLUMNS // 2]
        files["right"][lo : lo + count] = rows[:, COLUMNS // 2 :]
    for file in files.values():
        file.flush()
    return paths


def drop(paths: list[Path]) -> None:
    """Have the system forget the files' pages, so that the next read is from the disk."""
    gc.collect()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bare_read(paths: list[Path]) -> None:
    buffer = bytearray(16 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bare_product(paths: list[Path]) -> None:
    """``XᵀX`` of the mapped rows in float32, in blocks of 64 MB, summed in float64."""
    (path,) = paths
    rows = np.load(path, mmap_mode="r")
    total = np.zeros((COLUMNS, COLUMNS))
    for lo in range(0, len(rows), 65536):
        block = np.asarray(rows[lo : lo + 65536])
        total += block.T @ block


def pca(paths: list[Path]) -> None:
    es.PCA(n_components=SOLVE_COMPONENTS, solver="exact").fit_stream(es.streams.batches(*paths))


def cca(paths: list[Path]) -> None:
    es.CCA(n_components=SOLVE_COMPONENTS, solver="exact").fit_stream(es.streams.batches(*paths))


def seconds(run: Callable[[list[Path]], None], paths: list[Path], cold: bool) -> float:
    if cold:
        drop(paths)
    else:
        bare_read(paths)
    start = time.perf_counter()
    run(paths)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    paths = write(options.folder, options.rows)
    whole, halves = [paths["whole"]], [paths["left"], paths["right"]]
    jobs = {
        "bare read": (bare_read, whole),
        "bare product": (bare_product, whole),
        "PCA, Exact": (pca, whole),
        "CCA, Exact": (cca, halves),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in jobs}
    for _ in range(ROUNDS):
        for state in ("cold", "warm"):
            for name, (run, files) in jobs.items():
                if name == "bare product" and state == "cold":
                    continue
                times[name][state].append(seconds(run, files, state == "cold"))
                print(f"{state} {name}: {times[name][state][-1]:.2f} s", flush=True)
    for path in paths.values():
        path.unlink()
    median = {name: {state: statistics.median(t) for state, t in by.items() if t} for name, by in times.items()}
    lines = [
        f"# {options.rows:,} rows of {COLUMNS} columns from disk",
        "",
        f"`python benchmarks/streaming.py`: medians of {ROUNDS} rounds, float32. Cold: the files' pages were dropped "
        "from memory before. The product is measured warm only.",
        "",
        "| | rows per second, cold | of the slower limit | rows per second, warm | of the slower limit |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    product = median["bare product"]["warm"]
    for name, by in median.items():
        cells = []
        for state in ("cold", "warm"):
            limit = max(median["bare read"][state], product)
            share = f"{100 * limit / by[state]:.0f}%" if "Exact" in name else ""
            cells.append(f"{options.rows / by[state]:,.0f} | {share}" if state in by else " | ")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "streaming.json").write_text(json.dumps({"rows": options.rows, "seconds": times}, indent=1) + "\n")
    (RESULTS / "streaming.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

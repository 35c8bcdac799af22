"""PCA and CCA of ten million rows on disk, against two limits: a plain read and a plain matrix product.

    python benchmarks/streaming.py [--rows 10000000] [--folder /tmp]

Needs 20 GB of disk for the default size. Writes docs/results/streaming.json and docs/results/streaming.md; with
``--page`` the page alone, from the figures on disk. Each round measures everything twice: with the pages of the files
dropped from memory (cold), and with them cached (warm). Figures are medians over rounds. PCA reads one file of 256
columns, CCA two files of 128.
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
from typing import Any

import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
COLUMNS, CHUNK, ROUNDS = 256, 100_000, 5
SOLVE_COMPONENTS = 8


def write(folder: Path, n: int) -> dict[str, Path]:
    """Correlated columns with nonzero means, in one file and in two halves."""
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
    """Drop the pages of the files from memory, so that the next read is from disk."""
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
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.page:
        found = {"rows": options.rows, "seconds": measured(options.folder, options.rows)}
        (RESULTS / "streaming.json").write_text(json.dumps(found, indent=1) + "\n")
    text = page(json.loads((RESULTS / "streaming.json").read_text()))
    (RESULTS / "streaming.md").write_text(text)
    print(text)


def measured(folder: Path, rows: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by job and state of the cache."""
    paths = write(folder, rows)
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
    return times


def page(found: dict[str, Any]) -> str:
    rows, times = found["rows"], found["seconds"]
    median = {name: {state: statistics.median(t) for state, t in by.items() if t} for name, by in times.items()}
    lines = [
        f"# {rows:,} rows of {COLUMNS} columns from disk",
        "",
        f"`python benchmarks/streaming.py`: medians of {ROUNDS} rounds, float32. Cold: the pages of the files were",
        "dropped from memory before. The product is measured warm only. Percentages are relative to the slower of the",
        "two limits, the bare read and the bare product.",
        "",
        "| | rows per second, cold | of the limit | rows per second, warm | of the limit |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    product = median["bare product"]["warm"]
    for name, by in median.items():
        cells = []
        for state in ("cold", "warm"):
            limit = max(median["bare read"][state], product)
            share = f"{100 * limit / by[state]:.0f}%" if "Exact" in name else ""
            cells.append(f"{rows / by[state]:,.0f} | {share}" if state in by else " | ")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()

"""Peak anonymous memory while CCA is fitted from two files of 4 GB.

    python benchmarks/memory.py [--folder /tmp]

Needs 8 GB of disk. Writes docs/results/memory.json and docs/results/memory.md; with ``--page`` the page alone, from the
figures on disk. Pages of the files themselves, which the
system can drop at any time, are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ROWS, COLUMNS = 2_000_000, 500


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) * 1024  # type: ignore[union-attr]


class Peak:
    """Watches the anonymous memory of this process."""

    def __enter__(self) -> Peak:
        self.bytes, self._done = 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, anonymous())

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._watcher.join()


def fit_and_print_peak(paths: list[str], solver: str) -> None:
    choice = solver if solver == "exact" else es.solvers.Paper(learning_rate=1e-3)
    start = time.perf_counter()
    with Peak() as peak:
        model = es.CCA(n_components=4, solver=choice).fit_stream(es.streams.batches(*paths))
    seconds = time.perf_counter() - start
    print(json.dumps({"rows": model.n_samples_seen_, "peak_bytes": peak.bytes, "seconds": seconds}))


def write(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [folder / f"eigenstream_memory_{name}.npy" for name in ("x", "y")]
    for path in paths:
        rows = np.lib.format.open_memmap(path, "w+", np.float32, (ROWS, COLUMNS))
        for lo in range(0, ROWS, 50_000):
            rows[lo : lo + 50_000] = rng.standard_normal((50_000, COLUMNS), np.float32)
        rows.flush()
    return paths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--fit", nargs=3)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.fit:
        fit_and_print_peak(options.fit[:2], options.fit[2])
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.page:
        (RESULTS / "memory.json").write_text(json.dumps(measured(options.folder), indent=1) + "\n")
    text = page(json.loads((RESULTS / "memory.json").read_text()))
    (RESULTS / "memory.md").write_text(text)
    print(text)


def measured(folder: Path) -> dict[str, Any]:
    paths = write(folder)
    found = {}
    for solver in ("exact", "paper"):
        command = [sys.executable, __file__, "--fit", *map(str, paths), solver]
        found[solver] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for path in paths:
        path.unlink()
    return found


def page(found: dict[str, Any]) -> str:
    lines = [
        "# Memory: CCA from two files of 4 GB",
        "",
        f"`python benchmarks/memory.py`: two files of {ROWS:,} × {COLUMNS} float32, k = 4. The peak is the largest",
        "anonymous resident memory of the process, Python and JAX included, sampled every 10 ms.",
        "",
        "| solver | peak, GB | rows | seconds |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {s} | {v['peak_bytes'] / 1e9:.2f} | {v['rows']:,} | {v['seconds']:.0f} |" for s, v in found.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

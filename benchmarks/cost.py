"""Time of one step of Algorithm 2 as d and k grow, and its peak memory.

    python benchmarks/cost.py

Writes docs/results/cost.json and docs/results/cost.md. Times are medians of repeated steps on CCA of two views of d/2
features; the claim is about their ratio within the run.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
BATCH, SMALL_BATCH = 256, 64
SIZES = [(d, 8) for d in (10_000, 31_622, 100_000, 316_228, 1_000_000)] + [(100_000, k) for k in (16, 32, 64)]


def views(d: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, b, d // 2), np.float32)
    return x, y


def step_seconds(d: int, k: int, repeats: int = 15) -> float:
    """The median time of one compiled step; the batch is on the device."""
    solver, problem = es.solvers.Paper(learning_rate=1e-3), es.problems.cca()
    batch = jax.device_put(views(d, BATCH))
    state = solver.init(problem, batch, k, jax.random.key(0))
    step = jax.jit(lambda state, batch: solver.step(problem, state, batch))
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        state, info = step(state, batch)
        jax.block_until_ready((state, info))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def peak_gigabytes(d: int, k: int) -> float:
    """Peak resident memory of a process that solves from a stream of fresh batches."""
    command = [sys.executable, __file__, "--solve", str(d), str(k)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def solve_and_print_peak(d: int, k: int) -> None:
    def batches():
        for _ in range(5):
            yield views(d, SMALL_BATCH)

    es.solve(es.problems.cca(), batches(), k, solver=es.solvers.Paper(learning_rate=1e-3))
    # The peak of this process alone: getrusage would include its parent's size at the fork.
    status = Path("/proc/self/status").read_text()
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e9)


def main() -> None:
    rows = [{"d": d, "k": k, "seconds": step_seconds(d, k)} for d, k in SIZES]
    memory = peak_gigabytes(1_000_000, 8)
    time_of = {(r["d"], r["k"]): r["seconds"] for r in rows}
    growth = [
        ("d from 10⁴ to 10⁶, k = 8", 100, time_of[1_000_000, 8] / time_of[10_000, 8]),
        ("k from 8 to 64, d = 10⁵", 8, time_of[100_000, 64] / time_of[100_000, 8]),
    ]
    lines = [
        "# Cost of a step of Algorithm 2",
        "",
        f"`python benchmarks/cost.py`: CCA in batches of {BATCH} on a {jax.default_backend()}, JAX {jax.__version__};",
        "the median of 15 steps each.",
        "",
        "| d | k | ms per step |",
        "| ---: | ---: | ---: |",
        *(f"| {r['d']:,} | {r['k']} | {1e3 * r['seconds']:.2f} |" for r in rows),
        "",
        "| growth | size ratio | time ratio | time ratio / size ratio |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {name} | {size} | {ratio:.1f} | {ratio / size:.2f} |" for name, size, ratio in growth),
        "",
        "A step costs `O(bdk + dk²)`: the second term is the players' overlaps, which the batch does not shrink.",
        "",
        f"Peak resident memory of a whole process at d = 10⁶, k = 8, batches of {SMALL_BATCH}: {memory:.2f} GB.",
        "",
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps({"steps": rows, "peak_gigabytes": memory}, indent=1) + "\n")
    (RESULTS / "cost.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    if "--solve" in sys.argv:
        solve_and_print_peak(*map(int, sys.argv[2:]))
    else:
        main()

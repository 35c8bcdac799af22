"""The step of CCA on this device: its time, its rate, its share of the ceiling measured in the same run, its memory.

    python benchmarks/step.py                      # sizes for one H200
    python benchmarks/step.py --small              # sizes for a laptop

Operations are counted as ``6 b d k + 4 d k²``: scores, and two products of each view's rows with them; overlaps with
the parents, and their combination. Writes docs/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eigenstream as es

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
#: Dimension of both views together, players, rows of a batch.
LARGE = [(2_048, 1024, 2048), (116_736, 1024, 2048), (1_000_448, 1024, 2048)]
SMALL = [(2_048, 32, 256), (100_000, 32, 256)]


def seconds(f: Any, *arguments: Any, repeats: int = 5) -> float:
    """The median of a few runs, after one that compiles."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceiling(precision: str, n: int) -> float:
    """TFLOP/s of a square matrix product."""
    A, B = (jax.random.normal(jax.random.key(seed), (n, n)) for seed in range(2))
    if precision == "bf16":
        A, B = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    product = jax.jit(lambda A, B: jnp.matmul(A, B, precision=PRECISIONS[precision]))
    return 2 * n**3 / seconds(product, A, B) / 1e12


def step(solver: Any, d: int, k: int, b: int, precision: str, count: int) -> dict[str, float]:
    """One step, of several that follow one another on the device."""
    views = tuple(jax.random.normal(jax.random.key(seed), (b, d // 2)) for seed in (2, 3))
    problem = es.problems.cca(center=False)

    def run(state: Any, views: Any) -> Any:
        return jax.lax.scan(lambda s, _: (solver.step(problem, s, views)[0], None), state, None, length=count)[0]

    with jax.default_matmul_precision(PRECISIONS[precision]):
        state = jax.tree.map(jnp.copy, solver.init(problem, views, k, jax.random.key(0)))
        compiled = jax.jit(run, donate_argnums=0).lower(state, views).compile()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, views))
        times.append((time.perf_counter() - start) / count)
    took = statistics.median(times[1:])
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
    return {"ms": 1e3 * took, "TFLOP/s": (6 * b * d * k + 4 * d * k**2) / took / 1e12, "peak GB so far": memory}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    arguments = parser.parse_args()
    names = ["float32"] if arguments.small else ["tf32", "bf16"]
    ceilings = {name: ceiling(name, 2048 if arguments.small else 8192) for name in names}
    solvers = {"Paper, Adam": es.solvers.Paper(optimizer=optax.adam, learning_rate=1e-3, independent=False)}
    found = []
    for d, k, b in SMALL if arguments.small else LARGE:
        for label, solver in solvers.items():
            for name in names:
                row = step(solver, d, k, b, name, 100 if d < 10_000 else 5)
                row |= {"share of the ceiling": row["TFLOP/s"] / ceilings[name]}
                found.append({"d": d, "k": k, "b": b, "solver": label, "precision": name, **row})
                print(json.dumps(found[-1]), flush=True)
    device = jax.devices()[0].device_kind
    arguments.out.write_text(json.dumps({"device": device, "ceilings": ceilings, "steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

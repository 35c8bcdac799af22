"""The step on this device: its time, its rate, its share of the ceiling measured in the same run, its memory.

    python benchmarks/step.py                      # sizes for one H200
    python benchmarks/step.py --small              # sizes for a laptop

Operations are counted as ``6 b d k + 4 d k²``: scores, and two products of each view's rows with them; overlaps with
the parents, and their combination. Steps of one batch that lies on the device follow one another in one program. Every
measurement is a process of its own, so that its peak of memory is its own. Writes docs/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eigenstream as es
from eigenstream.core.precision import NAMES, scope

RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: Dimension of both views together, players, rows of a batch.
LARGE = [(2_048, 1024, 2048), (116_736, 1024, 2048), (1_000_448, 1024, 2048)]
SMALL = [(2_048, 32, 256), (100_000, 32, 256)]
PAPER = "Paper, Adam"
GAME = "Game"


class Ceiling:
    """A square matrix product on this device, and its TFLOP/s each time it is asked."""

    def __init__(self, precision: str, n: int):
        dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
        self.operands = [jax.random.normal(jax.random.key(seed), (n, n)).astype(dtype) for seed in range(2)]
        with jax.default_matmul_precision(NAMES[precision]):
            self.product = jax.jit(jnp.matmul).lower(*self.operands).compile()
        self.n, self.rates = n, []
        self.measure()
        self.rates.clear()

    def measure(self, repeats: int = 10) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            out = self.product(*self.operands)
        jax.block_until_ready(out)
        self.rates.append(repeats * 2 * self.n**3 / (time.perf_counter() - start) / 1e12)
        return self.rates[-1]


def paper(d: int, k: int, b: int, precision: str, count: int, ceiling: Ceiling) -> list[float]:
    """Seconds of one step, of several that follow one another on the device, the ceiling measured in between."""
    solver = es.solvers.Paper(optimizer=optax.adam, learning_rate=1e-3, independent=False)
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    views = tuple(jax.random.normal(jax.random.key(seed), (b, d // 2), dtype) for seed in (2, 3))
    problem = es.problems.cca(center=False)

    def run(state: Any, views: Any) -> Any:
        return jax.lax.scan(lambda s, _: (solver.step(problem, s, views)[0], None), state, None, length=count)[0]

    with scope(precision):
        state = jax.jit(solver.init, static_argnums=2)(problem, views, k, jax.random.key(0))
        compiled = jax.jit(run, donate_argnums=0).lower(state, views).compile()
    return repeated(compiled, state, views, count, ceiling)[0]


def game(d: int, k: int, b: int, precision: str, count: int, ceiling: Ceiling) -> tuple[list[float], list[float]]:
    """Seconds of one batch of the accelerated game, in which the players stand still; and of a move."""
    solver = es.solvers.Game()
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    views = tuple(jax.random.normal(jax.random.key(seed), (b, d // 2), dtype) for seed in (2, 3))
    problem = es.problems.cca(center=False)

    def run(state: Any, views: Any) -> Any:
        return jax.lax.scan(lambda s, _: (solver.gather(problem, s, views), None), state, None, length=count)[0]

    with scope(precision):
        state = jax.jit(solver.init, static_argnums=2)(problem, views, k, jax.random.key(0))
        compiled = jax.jit(run, donate_argnums=0).lower(state, views).compile()
        state = jax.block_until_ready(
            jax.jit(lambda s: solver.update_sketch(problem, s), donate_argnums=0)(compiled(state, views))
        )
        move = jax.jit(lambda state, _: solver.move(problem, state, False), donate_argnums=0)
        took, state = repeated(compiled, state, views, count, ceiling)
        return took, repeated(move, state, views, 1)[0]


def repeated(
    compiled: Any, state: Any, views: Any, count: int, ceiling: Ceiling | None = None
) -> tuple[list[float], Any]:
    """Seconds of one of ``count``, several times, after one time that warms up."""
    times: list[float] = []
    for turn in range(6):
        if ceiling is not None and turn:
            ceiling.measure()
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, views))
        times.append((time.perf_counter() - start) / count)
    return times[1:], state


def measured(solver: str, d: int, k: int, b: int, precision: str, square: int) -> dict[str, Any]:
    count = 100 if d < 10_000 else 10
    ceiling = Ceiling(precision, square)
    move: list[float] = []
    if solver == PAPER:
        times = paper(d, k, b, precision, count, ceiling)
    else:
        times, move = game(d, k, b, precision, count, ceiling)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
    rates = [(6 * b * d * k + 4 * d * k**2) / t / 1e12 for t in times]
    # Each beside the product just before it: a machine that others use too changes from one second to the next.
    shares = [rate / most for rate, most in zip(rates, ceiling.rates, strict=True)]
    found = {"d": d, "k": k, "b": b, "solver": solver, "precision": precision, "ms": 1e3 * statistics.median(times)}
    found |= {"TFLOP/s": statistics.median(rates), "ceiling TFLOP/s": statistics.median(ceiling.rates)}
    found |= {"share of the ceiling": statistics.median(shares), "peak GB": peak}
    return found | ({"ms of a move": 1e3 * statistics.median(move)} if move else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    parser.add_argument("--one", help="solver, d, k, b, precision and a square's side as JSON: that measurement alone")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*json.loads(arguments.one))))
        return
    names = ["float32"] if arguments.small else ["tf32", "bf16"]
    square, found = (2048 if arguments.small else 8192), []
    for d, k, b in SMALL if arguments.small else LARGE:
        for solver in (PAPER, GAME):
            for name in names:
                one = json.dumps([solver, d, k, b, name, square])
                done = subprocess.run([sys.executable, __file__, "--one", one], capture_output=True, text=True)
                if done.returncode:
                    print(done.stderr[-2000:], file=sys.stderr)
                    continue
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(found[-1]), flush=True)
    device = jax.devices()[0].device_kind
    arguments.out.write_text(json.dumps({"device": device, "steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

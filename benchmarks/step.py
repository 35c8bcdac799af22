"""A step on this device: time, rate, share of the rate of a square product measured in the same run, memory.

    python benchmarks/step.py                      # sizes for one H200
    python benchmarks/step.py --small              # sizes for a laptop

Operations are counted as ``6 b d k + 4 d k²``: the scores and two products of each view's rows with them; the overlaps
with the parents and their combination. Several steps with one batch on the device run in one program. Every measurement
runs in its own process, so that its peak memory is separate. Writes docs/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eigenstream as es
from eigenstream.core import players
from eigenstream.core.precision import NAMES, scope
from eigenstream.run.game_engine import DEVICE_BLOCK, DEVICE_NUMBERS
from eigenstream.solvers.game.move import LATE

RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: Dimension of both views together, players, rows of a batch.
LARGE = [(2_048, 1024, 2048), (116_736, 1024, 2048), (1_000_448, 1024, 2048)]
SMALL = [(2_048, 32, 256), (100_000, 32, 256)]
PAPER = "Paper, Adam"
GAME = "Game"
#: Rows behind the products.
MANY = 1e6


class Ceiling:
    """The rate of a square matrix product on this device, in TFLOP/s, measured at each call of `measure`."""

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


def paper(d: int, k: int, b: int, precision: str, count: int, ceiling: Ceiling | None = None) -> list[float]:
    """Seconds of one step of Algorithm 2; ``count`` steps run in one program, with the ceiling measured in between."""
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


def game(d: int, k: int, b: int, precision: str, count: int, ceiling: Ceiling) -> dict[str, Any]:
    """Seconds of ``b`` rows of the accelerated game: between moves, while its sketch learns from them, and of a move.

    Batches are joined to blocks, as the game's engine joins them.
    """
    solver, rows = es.solvers.Game(), max(b, min(DEVICE_BLOCK, DEVICE_NUMBERS // d))
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    views = tuple(jax.random.normal(jax.random.key(seed), (rows, d // 2), dtype) for seed in (2, 3))
    problem = es.problems.cca(center=False)

    def run(learns: bool, state: Any, views: Any) -> Any:
        def one(s: Any, _: None) -> Any:
            if hasattr(s.metric, "held"):
                s = s._replace(metric=s.metric._replace(held=jnp.full_like(s.metric.held, 0 if learns else 1e9)))
            return solver.gather(problem, s, views), None

        return jax.lax.scan(one, state, None, length=count)[0]

    with scope(precision):
        state = jax.jit(solver.init, static_argnums=2)(problem, views, k, jax.random.key(0))
        # A first move, so that the sketch learns as it does later.
        move = jax.jit(lambda state, _: solver.move(problem, state), donate_argnums=0)
        state = move(jax.jit(lambda s, v: solver.gather(problem, s, v), donate_argnums=0)(state, views), views)
        found = {}
        for learns in (False, True):
            compiled = jax.jit(partial(run, learns), donate_argnums=0).lower(state, views).compile()
            took, state = repeated(compiled, state, views, count, None if learns else ceiling)
            found["learning" if learns else "batch"] = [t * b / rows for t in took]
        moves, state = repeated(move, state, views, 1)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(players.norms(state.S)))
    rank = getattr(state.metric, "rank", 0) if hasattr(state.metric, "held") else 0
    return {**found, "move": moves, "rows learned": rank, "wait": LATE * MANY, "block": rows}


def repeated(
    compiled: Any, state: Any, views: Any, count: int, ceiling: Ceiling | None = None
) -> tuple[list[float], Any]:
    """Seconds of one of ``count`` steps, five times, after a first run that is not counted."""
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
    more: dict[str, Any] = {}
    if solver == PAPER:
        times = paper(d, k, b, precision, count, ceiling)
    else:
        more = game(d, k, b, precision, count, ceiling)
        times = more["batch"]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
    rates = [(6 * b * d * k + 4 * d * k**2) / t / 1e12 for t in times]
    # Each relative to the product just before it: the speed of a shared machine changes within seconds.
    shares = [rate / most for rate, most in zip(rates, ceiling.rates, strict=True)]
    found = {"d": d, "k": k, "b": b, "solver": solver, "precision": precision, "ms": 1e3 * statistics.median(times)}
    found |= {"TFLOP/s": statistics.median(rates), "ceiling TFLOP/s": statistics.median(ceiling.rates)}
    found |= {"share of the ceiling": statistics.median(shares), "peak GB": peak}
    if more:
        batch, learning, move = (1e3 * statistics.median(more[name]) for name in ("batch", "learning", "move"))
        share = (learning - batch) * more["rows learned"] / b + move
        found |= {"ms while the sketch learns": learning, "ms of a move": move, "rows between moves": more["wait"]}
        found |= {"rows of a block": more["block"], "rows that the sketch learns between moves": more["rows learned"]}
        found["ms with its share of moves"] = batch + share * b / more["wait"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    parser.add_argument("--precision", nargs="+", default=["tf32", "bf16"])
    parser.add_argument("--one", help="one measurement: solver, d, k, b, precision, side of the square product; JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*json.loads(arguments.one))))
        return
    names = ["float32"] if arguments.small else arguments.precision
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

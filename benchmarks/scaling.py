"""Time of a step of Algorithm 2 against d, k and b, one at a time, and against the number of devices.

    python benchmarks/scaling.py                   # sizes for one H200
    python benchmarks/scaling.py --small           # sizes for a laptop
    python benchmarks/scaling.py --devices         # 1 to 8 virtual devices of this machine's processor

CCA with Paper and Adam as in step.py. Virtual devices share the cores of the machine, so they show the overhead of
sharding and no speed-up. Writes docs/results/scaling.json, or scaling_devices.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def sizes(small: bool) -> list[tuple[int, int, int]]:
    d, k, b = (20_000, 32, 256) if small else (116_736, 1024, 2048)
    found = [(d, k, b)]
    found += [(d // 4, k, b), (d // 2, k, b), (2 * d, k, b), (4 * d, k, b)]
    found += [(d, k // 4, b), (d, k // 2, b), (d, 2 * k, b)]
    return [*found, (d, k, b // 4), (d, k, b // 2), (d, k, 2 * b)]


def on_devices(mesh: str | None, d: int, k: int, b: int) -> float:
    """Milliseconds of a step; the batch is on the devices."""
    import jax
    import numpy as np
    import optax

    import eigenstream as es
    from eigenstream.run.engine import Setup
    from eigenstream.run.placement import Placement, make_mesh
    from eigenstream.run.stepping_engine import SteppingEngine, _step

    rng = np.random.default_rng(0)
    views = tuple(rng.normal(size=(b, d // 2)).astype(np.float32) for _ in range(2))
    solver = es.solvers.Paper(optimizer=optax.adam, learning_rate=1e-3, independent=False)
    engine: Any = SteppingEngine(Setup(es.problems.cca(), solver, k, views, placement=Placement(make_mesh(mesh))))
    batch = engine._prepared(views, 0, b)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        engine.state, _ = engine.placement.run(_step, solver, engine.problem, engine.state, batch)
        jax.block_until_ready(engine.state)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def devices() -> dict[str, Any]:
    out = {}
    for mesh in (
        None,
        "data=1,feature=2",
        "data=1,feature=4",
        "data=1,feature=8",
        "data=8,feature=1",
        "data=2,feature=4",
    ):
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "NPROC": "16"}
        command = [sys.executable, __file__, "--mesh", mesh or "none"]
        done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=True)
        out[mesh or "one device"] = float(done.stdout.splitlines()[-1])
        print(mesh, out[mesh or "one device"], flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--devices", action="store_true")
    parser.add_argument("--mesh", help="measure one mesh, with 20,000 dimensions, 32 players and 256 rows")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.mesh:
        print(on_devices(None if arguments.mesh == "none" else arguments.mesh, 20_000, 32, 256))
        return
    if arguments.devices:
        (arguments.out or RESULTS / "scaling_devices.json").write_text(json.dumps(devices(), indent=1) + "\n")
        return
    import jax

    import step

    found = []
    for d, k, b in sizes(arguments.small):
        precision = "float32" if arguments.small else "tf32"
        took = statistics.median(step.paper(d, k, b, precision, 20))
        found.append(
            {"d": d, "k": k, "b": b, "ms": 1e3 * took, "TFLOP/s": (6 * b * d * k + 4 * d * k**2) / took / 1e12}
        )
        print(json.dumps(found[-1]), flush=True)
    out = {"device": jax.devices()[0].device_kind, "steps": found}
    (arguments.out or RESULTS / "scaling.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The traffic of a step between devices: every collective of the compiled program, with its bytes.

    python benchmarks/communication.py

Eight virtual CPU devices; CCA with Paper and Adam, k = 64, a batch of 256 rows. Writes docs/results/communication.json.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import optax

import eigenstream as es
from eigenstream.run.engine import Setup
from eigenstream.run.placement import Placement, make_mesh
from eigenstream.run.stepping_engine import SteppingEngine, _step

RESULTS = Path(__file__).parent.parent / "docs" / "results"
K, B = 64, 256
BYTES = {"f32": 4, "s32": 4, "pred": 1, "u32": 4, "bf16": 2}
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)")


def collectives(mesh: str, d: int) -> list[tuple[str, list[int]]]:
    """The collectives of the compiled step: name and bytes of each array sent, the largest first."""
    x = np.random.default_rng(0).normal(size=(B, d // 2)).astype(np.float32)
    solver = es.solvers.Paper(optimizer=optax.adam, learning_rate=1e-3, independent=False)
    engine = SteppingEngine(Setup(es.problems.cca(), solver, K, (x, x), placement=Placement(make_mesh(mesh))))
    text = _step.lower(solver, engine.problem, engine.state, engine._prepared((x, x), 0, len(x))).compile().as_text()
    found = []
    for line in text.splitlines():
        seen = COLLECTIVE.search(line)
        if seen is None or "-done" in line:
            continue
        shapes, name = seen.groups()
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        sizes = [BYTES[kind] * int(np.prod([int(n) for n in dims.split(",") if n])) for kind, dims in arrays]
        found.append((name, sizes))
    return sorted(found, key=lambda each: -sum(each[1]))


def main() -> None:
    out: dict[str, Any] = {"k": K, "b": B}
    for mesh in ("data=1,feature=8", "data=8,feature=1", "data=2,feature=4"):
        for d in (2_048, 8_192, 32_768):
            found = collectives(mesh, d)
            total = sum(sum(sizes) for _, sizes in found)
            out[f"{mesh}, d={d}"] = {"bytes": total, "collectives": found}
            print(mesh, d, total, found, flush=True)
    jax.clear_caches()
    (RESULTS / "communication.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A model of the time per step at 10⁸ dimensions on 8 to 1,024 GPUs: not a measurement.

    python benchmarks/model.py                     # after scaling.py on a GPU, and communication.py

Features are sharded over G GPUs. Compute: a line fitted to the times of scaling.json against d, evaluated at d / G.
Traffic: the bytes of the collectives in communication.json, which do not depend on d, scaled from its k and b to these
(scores by ``b k``, overlaps by ``k²``). An all-reduce around a ring takes ``2 (G - 1)/G`` times the bytes over the
bandwidth, and a latency for each of ``2 log₂ G`` hops. Bandwidths and latency are assumptions: 300 GB/s within 8 GPUs
(NVLink), 40 GB/s between more (a 400 Gb/s adapter each), 10 µs. Memory: the peak in TF32 of step.json, proportional to
d. Writes docs/results/scale_model.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent.parent / "docs" / "results"
D, K, B = 10**8, 1024, 2048
WITHIN, BETWEEN, LATENCY = 300e9, 40e9, 10e-6


def main() -> None:
    steps = json.loads((RESULTS / "scaling.json").read_text())["steps"]
    points = [(s["d"], s["ms"]) for s in steps if (s["k"], s["b"]) == (K, B)]
    slope, start = map(float, np.polyfit(*zip(*points, strict=True), 1))
    measured = json.loads((RESULTS / "communication.json").read_text())
    k, b = measured["k"], measured["b"]
    sent = measured["data=1,feature=8, d=32768"]["collectives"]
    # Overlaps grow as k², scores as b k, and all else as k.
    grows = {4 * k * k: (K / k) ** 2, 4 * k * b: K * B / (k * b)}
    size = sum(n * grows.get(n, K / k) for _, sizes in sent for n in sizes)
    peak = next(
        s["peak GB"] / s["d"]
        for s in json.loads((RESULTS / "step.json").read_text())["steps"]
        if s["d"] == 1_000_448 and s["precision"] == "tf32"
    )
    rows = []
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        compute = slope * D / gpus + start
        wire = 2 * (gpus - 1) / gpus * size / (WITHIN if gpus <= 8 else BETWEEN)
        send = 1e3 * (wire + len(sent) * 2 * math.log2(gpus) * LATENCY)
        each = peak * D / gpus
        rows.append({"GPUs": gpus, "compute ms": compute, "send ms": send, "step ms": compute + send, "GB each": each})
        print(rows[-1])
    out = {"d": D, "k": K, "b": B, "bytes sent": size, "ms per dimension": slope, "ms at 0": start, "rows": rows}
    (RESULTS / "scale_model.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()

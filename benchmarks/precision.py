"""The accuracy of TF32 and bf16 products: CCA of a planted problem after 2,000 steps.

    python benchmarks/precision.py

TCC: canonical correlations of the population within the subspaces found, summed, relative to the planted sum. Writes
docs/results/precision.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eigenstream as es
from eigenstream.core.precision import NAMES, scope

RESULTS = Path(__file__).parent.parent / "docs" / "results"


class Planted:
    """Views of ``d`` dimensions with correlations from .95 to .5 in random directions, and power-law variances."""

    def __init__(self, d: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.rho = np.linspace(0.95, 0.5, 8)
        deviations = np.arange(1, d + 1) ** -0.5
        turns = [np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2)]
        # Rows are e @ map; the first coordinates of e are correlated.
        self.maps = [turn * deviations @ np.linalg.qr(rng.normal(size=(d, d)))[0] for turn in turns]

    def rows(self, key: jax.Array, b: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        z, rho = jax.random.normal(keys[0], (b, 8)), jnp.asarray(self.rho, jnp.float32)
        out = []
        for k, m in zip(keys[1:], self.maps, strict=True):
            e = jax.random.normal(k, (b, len(m)))
            e = e.at[:, :8].set(jnp.sqrt(rho) * z + jnp.sqrt(1 - rho) * e[:, :8])
            out.append(jnp.matmul(e, jnp.asarray(m, jnp.float32), precision="highest"))
        return tuple(out)

    def tcc(self, V: Any) -> float:
        views = [m @ np.asarray(v, np.float64).T for m, v in zip(self.maps, V, strict=True)]
        Qx, Qy = (np.linalg.qr(v)[0] for v in views)
        cross = Qx[:8].T * self.rho @ Qy[:8]
        return float(np.linalg.svd(cross, compute_uv=False).sum() / self.rho.sum())


def reached(planted: Planted, solver: Any, precision: str, steps: int, b: int) -> float:
    problem = es.problems.cca(center=False)
    first = planted.rows(jax.random.key(0), b)

    def body(state: Any, key: jax.Array) -> tuple[Any, None]:
        return solver.step(problem, state, planted.rows(key, b))[0], None

    with scope(precision):
        state = solver.init(problem, first, 8, jax.random.key(1))
        run = jax.jit(lambda state, keys: jax.lax.scan(body, state, keys)[0])
        state = run(state, jax.random.split(jax.random.key(2), steps))
    _, V = solver.eigenpairs(problem, state)
    return planted.tcc(V)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--d", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS / "precision.json")
    arguments = parser.parse_args()
    planted = Planted(arguments.d)
    solvers = {
        "Paper, Adam": es.solvers.Paper(
            optimizer=optax.adam, learning_rate=optax.cosine_decay_schedule(2e-3, arguments.steps), independent=False
        ),
        "Game": es.solvers.Game(),
    }
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, **vars(arguments)}
    del found["out"]
    for name, solver in solvers.items():
        for precision in NAMES:
            found[f"{name}, {precision}"] = reached(planted, solver, precision, arguments.steps, 512)
            print(name, precision, found[f"{name}, {precision}"], flush=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

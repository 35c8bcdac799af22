"""What each part of the accelerated game contributes: the section ``ablation`` of acceleration.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import eigenstream as es
from eigenstream.problems.covariance import CCA
from eigenstream.solvers.game import filter, move, preconditioner
from planted import Latent, in_processes, solved

SEEDS = 3
#: Problem, components, rank and passes.
CASES = [
    ("mnist", 64, 128, 1),
    ("mnist", 64, 128, 3),
    ("collinear", 4, 64, 1),
    ("steep", 16, 128, 1),
    ("few", 8, 100, 1),
]


def forgetful(N: Any, fresh: Any, first: Any) -> Any:
    return jnp.eye(len(N))


def in_one_way(self: Any, problem: Any, exactly: bool, count: int) -> Any:
    found = FACTOR(self, problem, exactly, count)
    return found._replace(solves=found.solves[:1] * len(found.solves))


def without_noise(*arguments: Any) -> Any:
    found = CORRECT(*arguments)
    return found._replace(kappa=0 * found.kappa, own=0 * found.own)


def normal(self: Any, exactly: bool) -> Any:
    return OUTSIDE(self._replace(kurtosis=tuple(3 + 0 * q for q in self.kurtosis)), exactly)


FACTOR, OUTSIDE, CORRECT = preconditioner.Sketch.factor, preconditioner.Sketch.outside, move.correct

VARIANTS: dict[str, tuple[dict[str, Any], tuple[Any, str, Any] | None]] = {
    "all parts": ({}, None),
    "both views with the same coefficients": ({}, (CCA, "parts", lambda self, V: (V,))),
    "without tracked products": ({}, (filter, "gain", forgetful)),
    "no extra players": ({"extra": 0}, None),
    "20 extra players": ({"extra": 20}, None),
    "no noise in B": ({}, (move, "correct", without_noise)),
    "the noise of search directions as measured": ({}, (filter, "_of_rows", lambda S, B, K: move.inner(S, B, S, B, K))),
    "one search direction a player in passes": ({}, (preconditioner.Sketch, "factor", in_one_way)),
    "twice the level for few rows": ({}, (preconditioner, "FEW", 17)),
    "half of it": ({}, (preconditioner, "FEW", 34)),
    "columns that few rows touch as others": ({}, (preconditioner.Sketch, "outside", normal)),
    "the floor of the sketch's eigenvectors as it is": ({}, (preconditioner, "SHRUNK", 1.0)),
    "twice as high": ({}, (preconditioner, "SHRUNK", 8.0)),
    "the sketch's eigenvectors are not tried": ({}, (move, "_quotients", lambda state, start, count: jnp.zeros(count))),
    "moves on .3 of all rows": ({}, (move, "LATE", 0.3)),
    "moves on a tenth of all rows": ({}, (move, "LATE", 0.1)),
}


def captured(name: str, k: int, rank: int, epochs: int, seed: int, settings: dict[str, Any]) -> float:
    """0 where the variant finds no components."""
    try:
        return solved(name, k, seed, es.solvers.Game(**{"rank": rank, **settings}), max_epochs=epochs)[1]
    except ValueError:
        return 0.0


def variant(label: str) -> dict[str, Any]:
    settings, patch = VARIANTS[label]
    out: dict[str, Any] = {}
    with mock.patch.object(*patch) if patch else nullcontext():
        # Compiled programs contain the functions of the variant before.
        jax.clear_caches()
        for name, k, rank, epochs in CASES:
            found = [captured(name, k, rank, epochs, seed, settings) for seed in range(SEEDS)]
            out[f"{name}, k={k}, rank {rank}, passes: {epochs}"] = found
        latent, solver = Latent(3000, 12_000), es.solvers.Game(**{"rank": 768, **settings})
        wide = es.solve(es.problems.cca(), latent.stream(), latent.k, solver, memory_budget=1)
    return {**out, "3,000 + 3,000 columns, k=8, rank 768": latent.captured(wide.V)}


def ablation() -> dict[str, Any]:
    """The game without one part at a time, or with another constant."""
    return dict(zip(VARIANTS, in_processes(variant, list(VARIANTS)), strict=True))

"""What each part of the accelerated game contributes: the section ``ablation`` of acceleration.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import eigenstream as es
from eigenstream.core import players
from eigenstream.solvers.game import filter, move, preconditioner
from planted import Latent, solved

SEEDS = 3


def ablation() -> dict[str, Any]:
    """The game without one part at a time."""

    def no_penalties(V: Any, pairs: Any, BV: Any, norms: Any, shift: Any) -> Any:
        ((AV, _), _), *_ = pairs
        a, b = players.dot(V, AV), players.dot(V, BV)
        return players.subtract(players.scale(b, AV), players.scale(a, BV))

    def forgetful(N: Any, fresh: Any, first: Any) -> Any:
        return jnp.eye(len(N))

    variants: dict[str, tuple[dict[str, Any], tuple[Any, str, Any] | None]] = {
        "all parts": ({}, None),
        "without penalties": ({}, (move, "direction", no_penalties)),
        "without tracked products": ({}, (filter, "gain", forgetful)),
        "no extra players": ({"extra": 0}, None),
        "moments of few rows, and of columns that few rows touch, as they are": ({}, (preconditioner, "FEW", 1e9)),
        "the floor of the sketch's eigenvectors as it is": ({}, (preconditioner, "SHRUNK", 1.0)),
        "the sketch's eigenvectors are not tried": ({}, (move, "score", lambda state, rows: jnp.zeros(()))),
        "twice as many of them are tried": ({}, (move, "TRIED", 4)),
        "they take over when they score higher by any margin": ({}, (move, "MARGIN", 1.0)),
        "without doubt": ({}, (move, "DOUBT", 0.0)),
        "moves on a tenth of all rows": ({}, (move, "LATE", 0.1)),
        "the sketch learns from as many rows as its rank": ({}, (preconditioner, "SAMPLED", 1)),
    }
    latent = Latent(3000, 12_000)
    cases = [("mnist", 64, 128), ("cifar10", 32, 512), ("collinear", 4, 64), ("steep", 16, 128), ("few", 8, 100)]
    out: dict[str, Any] = {}
    for label, (settings, patch) in variants.items():
        with mock.patch.object(*patch) if patch else nullcontext():
            # Compiled programs contain the unpatched functions.
            jax.clear_caches()
            found = {
                f"{name}, k={k}, rank {rank}": [
                    solved(name, k, seed, solver=es.solvers.Game(**{"rank": rank, **settings}))[1]
                    for seed in range(1 if name == "cifar10" else SEEDS)
                ]
                for name, k, rank in cases
            }
            solver = es.solvers.Game(**{"rank": 768, **settings})
            wide = es.solve(es.problems.cca(), latent.stream(), latent.k, solver, memory_budget=1)
            out[label] = {**found, "3,000 + 3,000 columns, k=8, rank 768": latent.captured(wide.V)}
    jax.clear_caches()
    return out

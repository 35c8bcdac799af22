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
from planted import RANK, solved


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
        "sketch of rank 32": ({"rank": 32}, None),
        "sketch of rank 128": ({"rank": 128}, None),
        "no extra players": ({"extra": 0}, None),
        "columns that few rows touch count alike": ({}, (preconditioner, "CALM", 1e9)),
        "whole second moments as they are": ({}, (preconditioner, "SHRINK", 0.0)),
        "without doubt": ({}, (move, "DOUBT", 0.0)),
        "moves half as often": ({}, (move, "PACE", 1.0)),
        "moves twice as often": ({}, (move, "PACE", 16.0)),
        "waits that do not depend on the residuals": ({}, (move, "UNCLEAR", 1.0)),
    }
    out: dict[str, Any] = {}
    for label, (settings, patch) in variants.items():
        with mock.patch.object(*patch) if patch else nullcontext():
            # Compiled programs contain the unpatched functions.
            jax.clear_caches()
            out[label] = {
                f"{name}, k={k}": solved(name, k, solver=es.solvers.Game(**{"rank": RANK, **settings}))[1]
                for name, k in (("mnist", 32), ("synthetic", 4))
            }
    jax.clear_caches()
    return out

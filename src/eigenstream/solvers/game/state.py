"""What the game carries from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.solvers.game.verdict import HeldOut


class Gathered(NamedTuple):
    """Sums of products over the rows since the last move."""

    rows: jax.Array
    A: Tree
    B: Tree

    def emptied(self) -> Gathered:
        """Sums over no rows."""
        return players.zeros_in_place(self, self.rows)


class GameState(NamedTuple):
    """The state of `eigenstream.solvers.Game`. Checkpoints hold its leaves in this order."""

    #: Players, the directions they came from and the search directions: 3K in all, or K = d players alone.
    S: Tree
    #: Tracked products of the first 2K with ``A`` and ``B``, and the noise in them.
    MA: Tree
    MB: Tree
    N: jax.Array
    gathered: Gathered
    #: The preconditioner: `Diagonal`, or a `Sketch` for each diagonal block of ``B``.
    metric: Any
    #: The problem's running means.
    memory: Tree
    lam: jax.Array
    #: The largest eigenvalue so far, in magnitude.
    size: jax.Array
    #: ``κ``, the noise of one row in the products, and the noise of one row in each player's residual.
    kappa: jax.Array
    noise: jax.Array
    #: ``‖A v - λ B v‖`` in the norm of ``P⁻¹``, relative to ``size``, and its expected value from noise alone.
    preconditioned_residuals: jax.Array
    floors: jax.Array
    #: Rows behind the tracked products, rows since the sketches were updated, and rows to gather before the next move.
    rows_known: jax.Array
    rows_since_sketch: jax.Array
    rows_to_next_move: jax.Array
    #: Scores on rows before they were learned from; only a first pass adds to them.
    heldout: HeldOut
    first_pass: jax.Array
    #: By how much each of the last moves raised the sum of the leading eigenvalues, relative to it.
    gains: jax.Array
    #: Batches and moves so far.
    step: jax.Array
    moves: jax.Array
    #: Directions of the last span in which ``B`` was not zero to rounding.
    rank: jax.Array
    #: Moves rejected as not finite, and restarts after the distribution of the rows changed.
    refused: jax.Array
    restarts: jax.Array
    failed: jax.Array

    @property
    def long(self) -> tuple[str, ...]:
        """The fields whose arrays are as long as a player."""
        return ("S", "MA", "MB", "gathered", "metric", "memory")

    @property
    def k(self) -> int:
        """The number of components asked for."""
        return len(self.preconditioned_residuals)

    @property
    def plays_all(self) -> bool:
        """Whether K = d: the players span everything and track all of ``A`` and ``B``."""
        return len(self.lam) == len(self.N)

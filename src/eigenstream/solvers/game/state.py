"""What the game carries from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.solvers.game.verdict import HeldOut


class Gathered(NamedTuple):
    """Sums of products of ``S`` over the rows since the last move."""

    rows: jax.Array
    A: Tree
    B: Tree


class GameState(NamedTuple):
    """The state of `eigenstream.solvers.Game`. Checkpoints hold its leaves in this order.

    In a stream ``S`` is ``[V, W, E]``: K players, K search directions and a few eigenvectors of the sketch to score.
    In a pass over all rows it is ``[V, W, U]`` with the directions ``U`` that the players came from.
    """

    S: Tree
    #: Tracked products of the players with ``A`` and ``B``.
    MA: Tree
    MB: Tree
    #: The noise in them, for each part of the players.
    N: jax.Array
    gathered: Gathered
    #: The preconditioner: `Diagonal` or `Sketch`.
    metric: Any
    #: The problem's running means.
    memory: Tree
    lam: jax.Array
    #: The largest eigenvalue so far, in magnitude.
    size: jax.Array
    #: ``κ``, the noise of one row in the products, and the noise of one row in each player's residual.
    kappa: jax.Array
    noise: jax.Array
    #: The noise of one row in ``B v`` of the players themselves; 0 if ``B`` is known.
    own: jax.Array
    #: ``‖A v - λ B v‖`` in the norm of ``P⁻¹``, relative to ``size``, and its expected value from noise alone.
    preconditioned_residuals: jax.Array
    floors: jax.Array
    #: The mean eigenvalue of ``P⁻¹ B``: 1 if ``P`` is ``B``, less where ``P`` is larger.
    cover: jax.Array
    #: Rows behind the tracked products, and rows to gather before the next move.
    rows_known: jax.Array
    rows_to_next_move: jax.Array
    #: Scores on rows before they were learned from.
    heldout: HeldOut
    #: By how much each of the last moves raised the sum of the leading eigenvalues, relative to it.
    gains: jax.Array
    #: Batches and moves so far.
    step: jax.Array
    moves: jax.Array
    #: Directions of the last span in which ``B`` was not zero to rounding.
    rank: jax.Array
    #: Moves rejected as not finite.
    refused: jax.Array
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
    def exact(self) -> bool:
        """Whether each move has the products of all rows, which have no sampling noise."""
        return players.count(self.S) >= 3 * len(self.lam)

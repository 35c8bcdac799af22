"""The first rows of a stream, kept in memory: several moves on them before the stream goes on.

The game moves on most of the first rows, each move from products with all of these, while that helps on the others, the
validation rows. If the stream ends while all rows are still kept, the players move until the eigenproblem of these rows
is solved. Both are loops of `Game`'s own pure methods; ``apply`` runs one of them, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core.types import Tree
from eigenstream.solvers.game import GROWTH
from eigenstream.solvers.game.state import GameState
from eigenstream.solvers.game.verdict import SOLVED

#: ``apply("move", state, whole)`` is ``game.move(problem, state, whole)``, and so on.
Apply = Callable[..., Any]

#: Rows in a block of first rows, from which a sketch learns.
FIRST_BLOCK = 256
#: On a device with a memory limit this many times the state's memory is left free for a move.
MOVING = 5
#: The most moves in the opening, and on a stream that is kept whole.
OPENING_MOVES, WHOLE_MOVES = 12, 100
#: One in this many blocks validates the opening's moves.
VALIDATION = 6
#: Moves in a row that may be worse than the best one on the validation rows, which are few and noisy.
PATIENCE = 2


class Opening:
    """The first blocks of rows, and what was learned from them."""

    def __init__(self, share: float, least: float = 0.0):
        #: The memory for first rows: as a multiple of the state's, and at least so many bytes.
        self.share, self.least = share, least
        self.blocks: list[Tree] = []
        self._bytes = self._rows = self._sketched = 0
        #: Whether the players solve the eigenproblem of all blocks.
        self.solved = False

    def add(self, apply: Apply, state: GameState, block: Tree, rows: int) -> GameState:
        """Keep a block of rows and observe it."""
        state = apply("observe", state, block)
        self.blocks.append(block)
        self.solved = False
        self._bytes, self._rows = self._bytes + n_bytes(block), self._rows + rows
        return self._update_sketch(apply, state)

    def is_full(self, state: GameState) -> bool:
        of_state = n_bytes(state)
        return self._bytes > room(max(self.share * of_state, self.least), of_state, memory_limit(state))

    def _update_sketch(self, apply: Apply, state: GameState, least: int = FIRST_BLOCK) -> GameState:
        """Update the sketches once the rows have grown enough."""
        if self._rows - self._sketched >= max(least, (GROWTH - 1) * self._sketched):
            state = apply("update_sketch", state)
            self._sketched = self._rows
        return state

    def play(self, apply: Apply, state: GameState, patience: int = PATIENCE) -> tuple[GameState, list[Tree]]:
        """Move on the first rows while the players improve on the validation rows; return these, still to be learned.

        The running means, and so the class means of LDA, include the validation rows already.
        """
        # A single block leaves none for validation.
        cut = max(len(self.blocks) - max(len(self.blocks) // VALIDATION, 1), 1)
        played, validation = self.blocks[:cut], self.blocks[cut:]
        state = self._update_sketch(apply, state, 1)
        best: tuple[float, Any] = (-np.inf, None)
        worse = 0
        for _ in range(OPENING_MOVES):
            state = _move_on(apply, state, played)
            a, b = np.sum([apply("validate", state, x) for x in validation or played], axis=0)
            value = float((a / b).sum())
            worse = worse + 1 if value < best[0] else 0
            if worse == patience:
                break
            if not worse:
                best = value, jax.tree.map(jnp.copy, state._replace(metric=None, memory=None))
        if worse:
            state = best[1]._replace(metric=state.metric, memory=state.memory)
        if validation:
            # Gains on the same rows again do not predict gains on new rows.
            state = state._replace(gains=jnp.full_like(state.gains, jnp.nan))
        return state, validation

    def solve(self, apply: Apply, state: GameState) -> GameState:
        """Move with products of all rows until they are solved; once, as long as no rows are added."""
        if self.solved or not self.blocks:
            return state
        state = self._update_sketch(apply, state, 1)
        for _ in range(WHOLE_MOVES):
            state = _move_on(apply, state, self.blocks)
            if float(state.preconditioned_residuals.max()) < SOLVED:
                break
        self.solved = True
        return state


def _move_on(apply: Apply, state: GameState, blocks: list[Tree]) -> GameState:
    """Move once with products of these blocks alone."""
    for block in blocks:
        state = apply("multiply_exactly", state, block)
    return apply("move", state, True)


def room(wanted: float, state: float, limit: float) -> float:
    """Bytes for first rows of those wanted, beside a state of this many bytes on a device of ``limit`` bytes."""
    return min(wanted, limit - MOVING * state)


def memory_limit(state: GameState) -> float:
    """The bytes of the devices that share the players; infinite if they do not say."""
    first = jax.tree.leaves(state)[0]
    shard = first.addressable_shards[0]
    limit = (shard.device.memory_stats() or {}).get("bytes_limit", np.inf)
    return limit * first.nbytes / shard.data.nbytes


def n_bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

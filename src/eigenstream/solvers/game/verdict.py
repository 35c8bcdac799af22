"""How far the game is from its limit: held-out eigenvalues, the estimated shortfall, and the words for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: The game has converged when its estimated shortfall is below this.
ENOUGH = 0.01
#: The shortfall is TO_COME times the gain of the last moves plus LOST times the noise ``κ / rows``. Both were fitted to
#: planted problems with four kinds of spectra; see docs/results/acceleration.md.
TO_COME, LOST = 1.8, 0.03
#: The preconditioned residual at which a stream that is kept whole is solved, in float32.
SOLVED = 1e-4
#: The most groups of close eigenvalues that a message names.
NAMED = 4


class HeldOut(NamedTuple):
    """Sums of ``a = ⟨v, A v⟩``, ``b = ⟨v, B v⟩`` and their squares over batches before they were learned from."""

    batches: jax.Array
    a: jax.Array
    b: jax.Array
    aa: jax.Array
    ab: jax.Array
    bb: jax.Array

    @classmethod
    def empty(cls, k: int, dtype: Any) -> HeldOut:
        zero = jnp.zeros(k, dtype)
        return cls(zero[0], zero, zero, zero, zero, zero)

    def add(self, a: jax.Array, b: jax.Array) -> HeldOut:
        """Add one batch by its sums over rows, so that a large batch weighs more."""
        new = jnp.ones_like(self.batches), a, b, a * a, a * b, b * b
        return HeldOut(*(x + y for x, y in zip(self, new, strict=True)))

    def fade(self, factor: Any) -> HeldOut:
        """Weigh every batch by ``factor``, and its squares by the square of that."""
        first, second = self[:3], self[3:]
        return HeldOut(*(factor * x for x in first), *(factor**2 * x for x in second))

    def eigenvalues(self) -> tuple[np.ndarray, np.ndarray]:
        """Ratios of the sums, and their standard errors by the delta method."""
        n, a, b, aa, ab, bb = (np.asarray(x, np.float64) for x in self)
        if n < 2:
            return np.full_like(a, np.nan), np.full_like(a, np.nan)
        lam = a / b
        spread = np.maximum(aa - 2 * lam * ab + lam**2 * bb, 0)
        return lam, np.sqrt(spread * n / (n - 1)) / np.abs(b)


class Verdict(NamedTuple):
    """How far the leading eigenvalues are from their limit."""

    converged: bool
    #: The estimated shortfall of the sum of the leading eigenvalues, relative to it.
    shortfall: float
    words: str
    #: Eigenvalues on rows before they were learned from, and their standard errors.
    heldout: np.ndarray
    errors: np.ndarray


def verdict(state: Any, rows_read: int, solved: bool = False) -> Verdict:
    """Judge a state of `eigenstream.solvers.Game` after this many rows; ``solved``: all rows are kept in memory."""
    gains = np.asarray(state.gains, np.float64)
    gains = gains[np.isfinite(gains)]
    lam = np.asarray(state.lam, np.float64)[: state.k]
    heldout, errors = state.heldout.eigenvalues()
    known = float(state.rows_known)
    # With K = d there is nothing to gain by moving, and no row is lost.
    last = float(np.median(gains[-3:]) if len(gains) > 2 else gains.max(initial=0)) if len(gains) else 1.0
    to_come = 0.0 if state.plays_all else TO_COME * last
    if solved and state.MB is None and float(state.size) > 0:
        # Without noise an eigenvalue is no farther from its Ritz value than the residual in the norm of B⁻¹, which is
        # known where B is diagonal. A sketch in the place of B may make a residual too small.
        bound = np.asarray(state.preconditioned_residuals, np.float64).sum() * float(state.size)
        total = np.abs(lam).sum()
        if bound <= to_come * total:
            to_come = bound / total if total > 0 else 0.0
    lost = 0.0 if solved or state.plays_all else LOST * float(state.kappa) / known if known else 1.0
    shortfall = min(max(to_come, 0.0) + lost, 1.0)
    # Small gains on the same rows again may also mean a poor preconditioner: the residual tells.
    slow = solved and not state.plays_all and not float(np.max(state.preconditioned_residuals)) < SOLVED
    converged = shortfall < ENOUGH and not slow
    words = f"{'converged' if converged else 'not converged'}: "
    words += "all rows were kept and " * solved
    if slow:
        words += f"{int(state.moves)} moves left a residual above {SOLVED:g}; give a larger rank, or a ridge"
    else:
        words += f"the top-k sum is an estimated {shortfall:.2%} below its limit"
    if not converged and not slow:
        more = max(int(rows_read * (shortfall / ENOUGH - 1)), 1)
        words += " and still rising" if to_come > lost else ", for too few rows in so many dimensions"
        words += f"; about {_round(more):,} more rows are needed"
    if not state.plays_all:
        worst, floor = float(np.max(state.preconditioned_residuals)), float(np.max(state.floors))
        words += f" (preconditioned residual {worst:.2g}, noise floor {floor:.2g})"
    # In the order of the result, largest first: players may have changed places.
    order = np.argsort(-lam, kind="stable")
    found = clusters(lam[order], np.where(np.isfinite(errors), errors, 0)[order])
    if found:
        words += f"; eigenvalues {named(found)} differ by less than their errors, so only the span of each group is "
        words += "determined, not the vectors in it"
    if int(state.refused):
        words += f"; moves skipped because they were not finite: {int(state.refused)}"
    if int(state.restarts):
        words += f"; restarts because the rows changed: {int(state.restarts)}"
    return Verdict(converged, shortfall, words, heldout, errors)


def clusters(lam: np.ndarray, errors: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of every group of eigenvalues whose gaps are smaller than their errors."""
    close = np.abs(np.diff(lam)) < np.maximum(np.hypot(errors[:-1], errors[1:]), 1e-4 * np.abs(lam).max(initial=0))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], close.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def named(groups: list[tuple[int, int]]) -> str:
    """The first groups, counted from 1, and the number of further ones."""
    names = ", ".join(f"{a + 1} to {b + 1}" for a, b in groups[:NAMED])
    return names + (f" and {len(groups) - NAMED} more groups" if len(groups) > NAMED else "")


def _round(rows: int) -> int:
    """Round an estimate up to two digits."""
    unit = 10 ** max(len(str(rows)) - 2, 0)
    return -(-rows // unit) * unit

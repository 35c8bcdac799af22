"""What the accelerated game knows of its own answer: held-out eigenvalues, how far it still is, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: The shortfall under which an answer has converged.
ENOUGH = 0.01
#: What is still to come, in gains of one move, and the share of the noise ``κ / rows`` that is lost to it. Fitted to
#: planted problems of four kinds of spectra; see docs/results/acceleration.md.
TO_COME, LOST = 1.8, 0.03
#: Groups of eigenvalues closer than their errors, of which no more are named.
NAMED = 4


class HeldOut(NamedTuple):
    """Batches scored before they were learned from: sums of ``a = ⟨v, A v⟩``, ``b = ⟨v, B v⟩`` and their squares."""

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
        """With one more batch: its sums over rows, so that a large batch counts for more."""
        new = jnp.ones_like(self.batches), a, b, a * a, a * b, b * b
        return HeldOut(*(x + y for x, y in zip(self, new, strict=True)))

    def fade(self, factor: Any) -> HeldOut:
        """Every batch counts for ``factor`` of itself, and its square for the square of that."""
        first, second = self[:3], self[3:]
        return HeldOut(*(factor * x for x in first), *(factor**2 * x for x in second))

    def eigenvalues(self) -> tuple[np.ndarray, np.ndarray]:
        """Ratios of sums, and their standard errors by the delta method."""
        n, a, b, aa, ab, bb = (np.asarray(x, np.float64) for x in self)
        if n < 2:
            return np.full_like(a, np.nan), np.full_like(a, np.nan)
        lam = a / b
        spread = np.maximum(aa - 2 * lam * ab + lam**2 * bb, 0)
        return lam, np.sqrt(spread * n / (n - 1)) / np.abs(b)


class Verdict(NamedTuple):
    """How far the leading eigenvalues are from where they would end, and what follows."""

    converged: bool
    #: By how much their sum falls short, relative to it: an estimate.
    shortfall: float
    words: str
    #: Of rows not learned from yet, with standard errors.
    heldout: np.ndarray
    errors: np.ndarray


def verdict(state: Any, rows_read: int, solved: bool = False) -> Verdict:
    """What a state of `eigenstream.solvers.Game` knows of itself after so many rows, or on rows that it could keep."""
    gains = np.asarray(state.gains, np.float64)
    gains = gains[np.isfinite(gains)]
    lam = np.asarray(state.lam, np.float64)[: len(state.residuals)]
    heldout, errors = state.held.eigenvalues()
    known = float(state.known)
    # Players that span everything have nothing to gain and lose no row.
    last = float(np.median(gains[-3:]) if len(gains) > 2 else gains.max(initial=0)) if len(gains) else 1.0
    to_come = 0.0 if state.plays_all else TO_COME * last
    lost = 0.0 if solved or state.plays_all else LOST * float(state.kappa) / known if known else 1.0
    shortfall = min(max(to_come, 0.0) + lost, 1.0)
    converged = shortfall < ENOUGH
    worst, floor = float(np.max(state.residuals)), float(np.max(state.floors))
    words = "all rows were kept; " if solved else ""
    words += (
        f"the leading eigenvalues are within about {shortfall:.2g} of their final sum, relative to it; residuals reach "
        f"{worst:.2g}, and noise alone would make them {floor:.2g}"
    )
    if not converged:
        more = max(int(rows_read * (shortfall / ENOUGH - 1)), 1)
        why = "the players still gain at every move" if to_come > lost else "too few rows for so many dimensions"
        words += f"; not converged, for {why}: about {_round(more)} more rows like these would do"
    # As they are given, the largest first: players may have changed places.
    order = np.argsort(-lam, kind="stable")
    found = clusters(lam[order], np.where(np.isfinite(errors), errors, 0)[order])
    if found:
        words += f"; eigenvalues {named(found)} are no further from their neighbours than their errors: what they span "
        words += "together is determined, the vectors within are not"
    counts = [(state.refused, "moves were not finite and not taken"), (state.restarts, "times the rows changed")]
    words += "".join(f"; {int(count)} {what}" for count, what in counts if int(count))
    return Verdict(converged, shortfall, words, heldout, errors)


def clusters(lam: np.ndarray, errors: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of every run of eigenvalues whose gaps are within their errors."""
    close = np.abs(np.diff(lam)) < np.maximum(np.hypot(errors[:-1], errors[1:]), 1e-4 * np.abs(lam).max(initial=0))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], close.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def named(groups: list[tuple[int, int]]) -> str:
    """The first few groups, counted from 1, and how many more there are."""
    names = ", ".join(f"{a + 1} to {b + 1}" for a, b in groups[:NAMED])
    return names + (f" and {len(groups) - NAMED} more groups" if len(groups) > NAMED else "")


def _round(rows: int) -> int:
    """To two digits: it is an estimate."""
    unit = 10 ** max(len(str(rows)) - 2, 0)
    return -(-rows // unit) * unit

"""How far the game is from its limit: held-out eigenvalues, the estimated shortfall, and the words for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: The game has converged when its estimated shortfall is below this.
ENOUGH = 0.001
#: After a pass over all rows at least this share of its gain is still to come.
STILL = 0.1
#: The least share of B that P is taken to cover.
LITTLE = 0.01
#: A preconditioned residual of more than FAR plus NOISY noise floors is not that of an eigenvector.
FAR, NOISY = 0.1, 3.0
#: Weight that held-out scores from before a move keep after it.
KEPT = 0.5
#: The preconditioned residual at which a stream that is kept whole is solved, in float32.
SOLVED = 1e-4
#: The most groups of close eigenvalues that a message names.
NAMED = 4


class HeldOut(NamedTuple):
    """Sums of ``a = ⟨v, A v⟩``, ``b = ⟨v, B v⟩`` and their squares over batches before they were learned from."""

    #: The sum of the batches' weights, and of their squares.
    batches: jax.Array
    a: jax.Array
    b: jax.Array
    squares: jax.Array
    aa: jax.Array
    ab: jax.Array
    bb: jax.Array

    @classmethod
    def empty(cls, k: int, dtype: Any) -> HeldOut:
        zero = jnp.zeros(k, dtype)
        return cls(zero[0], zero, zero, zero[0], zero, zero, zero)

    def add(self, a: jax.Array, b: jax.Array) -> HeldOut:
        """Add one batch by its sums over rows, so that a large batch weighs more."""
        one = jnp.ones_like(self.batches)
        new = one, a, b, one, a * a, a * b, b * b
        return HeldOut(*(x + y for x, y in zip(self, new, strict=True)))

    def after_move(self) -> HeldOut:
        """Weigh every batch by KEPT, and its squares by the square of that: the players have changed."""
        first, second = self[:3], self[3:]
        return HeldOut(*(KEPT * x for x in first), *(KEPT**2 * x for x in second))

    def eigenvalues(self) -> tuple[np.ndarray, np.ndarray]:
        """Ratios of the sums, and their standard errors by the delta method."""
        weight, a, b, squares, aa, ab, bb = (np.asarray(x, np.float64) for x in self)
        # Batches of unequal weights are worth so many of equal ones.
        n = weight**2 / squares if squares else 0.0
        if n < 2 - 1e-6:
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


def verdict(state: Any, fits: bool = False) -> Verdict:
    """Judge a state of `eigenstream.solvers.Game`.

    ``fits``: its rows are read again until they are solved.
    """
    lam = np.asarray(state.lam, np.float64)[: state.k]
    size = float(state.size)
    gains = np.asarray(state.gains, np.float64)
    last, gains = float(gains[-1]), gains[np.isfinite(gains)]
    heldout, errors = state.heldout.eigenvalues()
    residuals, floors = (np.asarray(x, np.float64) for x in (state.preconditioned_residuals, state.floors))
    total = np.abs(lam).sum()
    # Kato and Temple: a residual r leaves an eigenvalue r² / gap too small. The gap is that to the last player's.
    gaps = np.maximum(lam - max(float(np.min(state.lam)), 0), np.finfo(np.float32).eps * size)
    missing = np.minimum((size * residuals) ** 2 / gaps, size * residuals).sum() / total if total else np.inf
    cover = np.clip(float(state.cover), LITTLE, 1)
    # Whether the last move was by the products of all rows.
    passed = state.exact and np.isfinite(last)
    # Where P is larger than B, residuals and gains show that much less of what is missing.
    if passed:
        # Residuals overstate where eigenvalues are close, and do not show an eigenvector that no player is near.
        last = max(last, 0)
        missing = max(min(missing / cover, last), STILL * last)
    else:
        missing = (missing + max(float(np.median(gains)), 0) / 2) / cover if len(gains) else np.inf
    solved = state.exact and float(residuals.max()) < SOLVED
    unknown = not total or not int(state.moves) or not np.isfinite(missing)
    shortfall = 0.0 if solved else 1.0 if unknown else float(missing / (1 + missing))
    far = bool((residuals > FAR + NOISY * floors).any())
    # Rows that fit are read until the residual is rounding: a larger one means a poor preconditioner.
    slow = fits and state.exact and not solved
    # In one pass players may stay on eigenvectors that are not the leading ones, which no residual shows.
    told = passed or not state.metric.sizes.rank
    converged = shortfall < ENOUGH and told and not far and not slow
    words = f"{'converged' if converged else 'not converged'}: "
    words += f"the top-k sum is an estimated {shortfall:.2%} below its limit"
    worst, floor = float(np.max(residuals)), float(np.max(floors))
    words += f" (preconditioned residual {worst:.2g}, noise floor {floor:.2g})"
    if slow:
        words += f"; {int(state.moves)} moves left a residual above {SOLVED:g}: give a larger rank, or a ridge"
    elif not converged:
        words += "; read the rows again, with max_epochs=None or a larger number, or give a larger memory_budget"
    # In the order of the result, largest first: players may have changed places.
    order = np.argsort(-lam, kind="stable")
    found = clusters(lam[order], np.where(np.isfinite(errors), errors, 0)[order])
    if found:
        words += f"; eigenvalues {named(found)} differ by less than their errors, so only the span of each group is "
        words += "determined, not the vectors in it"
    if int(state.refused):
        words += f"; moves skipped because they were not finite: {int(state.refused)}"
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

"""Independent component analysis by excess kurtosis."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eigenstream import rows, trees
from eigenstream.moments import Moments, blocks
from eigenstream.problems.base import Problem, Products, check_options, static

Tree = Any

#: Largest dimension whose third-moment tensor (16 MB at 128) a single centred pass keeps.
SINGLE_PASS_DIMENSION = 128


class Fourth(NamedTuple):
    """Rows ``|x| x``, of second moment ``E[|x|² x xᵀ]``, and rows for the two factors of ``tr(B) B`` and ``B²``."""

    weighted: list[Tree]
    first: Tree
    second: Tree


@static
@dataclass(frozen=True)
class ICA(Problem):
    """``A = E[|x|² x xᵀ] - tr(B) B - 2 B²``, ``B = E[x xᵀ]`` (Parra and Sajda, 2003)."""

    center: bool | str = True
    ridge: float = 0.0
    #: Two parts for the two factors within ``A`` and a third for ``B``.
    shares = (2, 1)

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)

    # A fourth moment about a batch's own mean is biased by more than a factor, so streams are centred by the running
    # mean whenever they are centred.
    def start(self, batch: Tree) -> Tree:
        return rows.start_mean(batch) if self.center else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        return rows.update_mean(memory, batch) if self.center else memory

    def rows(self, memory: Tree, *parts: Tree) -> Fourth:
        centred = [rows.centre_by_mean(x, memory) if self.center else x for x in parts]
        weighted = [rows.scale_rows(x, rows.squared_norms(x) ** 0.5) for x in centred]
        return Fourth(weighted, centred[0], centred[-1])

    def products(self, x: Fourth, V: Tree) -> Products:
        fourths = [rows.lift(w, rows.project(w, V)) for w in x.weighted]
        fourth = trees.scale(1 / len(fourths), functools.reduce(trees.add, fourths))
        CV = rows.lift(x.second, rows.project(x.second, V))
        CCV = rows.lift(x.first, rows.project(x.first, CV))
        gaussian = trees.add(trees.scale(rows.trace(x.first), CV), trees.scale(2.0, CCV))
        return Products(trees.subtract(fourth, gaussian), rows.ridged(x.second, V, CV, self.ridge))

    def fewest_rows(self, independent: bool) -> int:
        return sum(self.shares) if independent else 1

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        template = self.template(batch)
        d = trees.size(template)
        if not self.center:
            return FourthStatistics(template, np.zeros(d))
        if repeatable:
            return MeanFirst(template, Moments.empty(d))
        if d > SINGLE_PASS_DIMENSION:
            raise ValueError(
                f"centred ICA of {d} features in a single pass needs a tensor of {d}³ numbers (the limit is "
                f"{SINGLE_PASS_DIMENSION}): give batches that can be read twice, or centred rows and center=False"
            )
        return ThirdStatistics(template)


class FourthStatistics:
    """Sums of ``|x|² x xᵀ`` and ``x xᵀ`` about a known mean."""

    def __init__(self, template: Tree, mean: np.ndarray):
        d = len(mean)
        self.template, self.mean = template, mean
        self.n, self.second, self.fourth = 0, np.zeros((d, d)), np.zeros((d, d))

    def add(self, batches: list[Tree]) -> FourthStatistics:
        total = FourthStatistics(self.template, self.mean)
        total.n, total.second, total.fourth = self.n, self.second, self.fourth
        for x in dense_blocks(batches):
            x = x - self.mean.astype(x.dtype)
            weighted = x * np.sqrt((x * x).sum(1, keepdims=True))
            total.n += len(x)
            total.second = total.second + (x.T @ x).astype(np.float64)
            total.fourth = total.fourth + (weighted.T @ weighted).astype(np.float64)
        return total

    def again(self) -> None:
        """The mean is known: one pass is enough."""

    def operands(self) -> Fourth:
        fourth, second = (rows.covariance_view(m / self.n, self.template) for m in (self.fourth, self.second))
        return Fourth([fourth], second, second)


class MeanFirst:
    """The first of two passes, for the mean alone."""

    def __init__(self, template: Tree, moments: Moments):
        self.template, self.count, self.mean = template, moments.n, moments.means[0]

    def add(self, batches: list[Tree]) -> MeanFirst:
        total = MeanFirst(self.template, Moments.empty(len(self.mean)))
        sums = sum(np.asarray(rows.dense_or_csr(b).sum(0, dtype=np.float64)).ravel() for b in batches)
        total.count = self.count + sum(rows.n_rows(b) for b in batches)
        total.mean = self.mean + (sums - (total.count - self.count) * self.mean) / total.count
        return total

    def again(self) -> FourthStatistics:
        return FourthStatistics(self.template, self.mean)


class ThirdStatistics:
    """Raw moments up to the fourth about a pilot point, from which the centred fourth follows in one pass."""

    def __init__(self, template: Tree):
        self.template = template
        d = trees.size(template)
        self.n, self.pilot = 0, None
        self.first, self.second, self.fourth = np.zeros(d), np.zeros((d, d)), np.zeros((d, d))
        self.third = np.zeros((d, d, d))

    def add(self, batches: list[Tree]) -> ThirdStatistics:
        total = ThirdStatistics(self.template)
        total.__dict__.update(self.__dict__)
        for x in dense_blocks(batches):
            if total.pilot is None:
                total.pilot = x.mean(0, dtype=np.float64)
            z = x - total.pilot
            d = z.shape[1]
            weighted = z * np.sqrt((z * z).sum(1, keepdims=True))
            total.n += len(z)
            total.first = total.first + z.sum(0)
            total.second = total.second + z.T @ z
            total.fourth = total.fourth + weighted.T @ weighted
            for piece in np.array_split(z, -(-len(z) // 256)):
                pairs = (piece[:, :, None] * piece[:, None, :]).reshape(len(piece), -1)
                total.third = total.third + (pairs.T @ piece).reshape(d, d, d)
        return total

    def again(self) -> None:
        """The third moments stand in for a second pass."""

    def operands(self) -> Fourth:
        """Expand ``E[|z-m|² (z-m)(z-m)ᵀ]`` in moments of ``z``, the rows less the pilot, whose mean is ``m``."""
        m, S, Q, T = (s / self.n for s in (self.first, self.second, self.fourth, self.third))
        t, Sm, mm = np.einsum("iij->j", T), S @ m, np.outer(m, m)
        inner = Q - np.outer(t, m) - np.outer(m, t) + np.trace(S) * mm
        inner += -2 * (T @ m) + 2 * np.outer(Sm, m) + 2 * np.outer(m, Sm) - 2 * (m @ m) * mm
        inner += (m @ m) * (S - mm)
        fourth, second = (rows.covariance_view(M, self.template) for M in (inner, S - mm))
        return Fourth([fourth], second, second)


def dense_blocks(batches: list[Tree]) -> Any:
    for block, _ in blocks([rows.dense_or_csr(b) for b in batches]):
        yield block if isinstance(block, np.ndarray) else block.toarray()

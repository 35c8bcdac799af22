"""Independent component analysis by excess kurtosis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Summary, blocks
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.checks import check_options, static

#: Largest dimension whose third-moment tensor (16 MB at 128) a single centred pass keeps.
SINGLE_PASS_DIMENSION = 128
#: Largest dimension whose third moments are quicker to sum than the rows are to read twice.
CHEAP_DIMENSION = 16


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
        return views.start_mean(batch) if self.center else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        return views.update_mean(memory, batch) if self.center else memory

    def rows(self, memory: Tree, *parts: Tree) -> Fourth:
        centred = [views.centre_by_mean(x, memory) if self.center else x for x in parts]
        weighted = [views.scale_rows(x, views.squared_norms(x) ** 0.5) for x in centred]
        return Fourth(weighted, centred[0], centred[-1])

    def for_game(self, averaged: bool = False) -> ICA:
        return self

    def metric_rows(self, memory: Tree, batch: Tree) -> tuple[Tree, ...]:
        return (views.centre_by_mean(batch, memory) if self.center else batch,)

    def products(self, x: Fourth, V: Tree) -> Products:
        fourths = [views.lift(w, views.project(w, V)) for w in x.weighted]
        fourth = players.scale(1 / len(fourths), reduce(players.add, fourths))
        CV = views.lift(x.second, views.project(x.second, V))
        CCV = views.lift(x.first, views.project(x.first, CV))
        gaussian = players.add(players.scale(views.trace(x.first), CV), players.scale(2.0, CCV))
        return Products(players.subtract(fourth, gaussian), views.ridged(x.second, V, CV, self.ridge))

    def fewest_rows(self, independent: bool) -> int:
        return sum(self.shares) if independent else 1

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        template = self.template(batch)
        d = players.size(template)
        if not self.center:
            return FourthStatistics.about(np.zeros(d), template)
        # Third moments cost n d³ but leave nothing fixed, so that more rows can always be added.
        if repeatable and d > CHEAP_DIMENSION:
            return MeanFirst(template, np.zeros(d), 0)
        if d > SINGLE_PASS_DIMENSION:
            raise ValueError(
                f"centred ICA of {d} features in a single pass needs a tensor of {d}³ numbers (the limit is "
                f"{SINGLE_PASS_DIMENSION}): give batches that can be read twice, or centred rows and center=False"
            )
        return ThirdStatistics.empty(template)


@partial(jax.tree_util.register_dataclass, data_fields=["mean", "n", "second", "fourth"], meta_fields=["template"])
@dataclass(frozen=True)
class FourthStatistics:
    """Sums of ``|x|² x xᵀ`` and ``x xᵀ`` about a known mean."""

    template: Tree
    mean: np.ndarray
    n: int
    second: np.ndarray
    fourth: np.ndarray

    @classmethod
    def about(cls, mean: np.ndarray, template: Tree) -> FourthStatistics:
        d = len(mean)
        return cls(template, mean, 0, np.zeros((d, d)), np.zeros((d, d)))

    def add(self, batch: Tree) -> FourthStatistics:
        n, second, fourth = self.n, self.second, self.fourth
        for x in dense_blocks(batch):
            x = x - self.mean
            weighted = x * np.sqrt((x * x).sum(1, keepdims=True))
            n += len(x)
            second = second + x.T @ x
            fourth = fourth + weighted.T @ weighted
        return replace(self, n=n, second=second, fourth=fourth)

    def again(self) -> None:
        """The mean is known: one pass is enough."""

    def operands(self) -> Fourth:
        fourth, second = (views.covariance_view(m / self.n, self.template) for m in (self.fourth, self.second))
        return Fourth([fourth], second, second)

    def summary(self) -> Summary:
        return Summary.of_one_group(self.n, self.mean, np.trace(self.second), self.template)


@partial(jax.tree_util.register_dataclass, data_fields=["mean", "n"], meta_fields=["template"])
@dataclass(frozen=True)
class MeanFirst:
    """The first of two passes, for the mean alone."""

    template: Tree
    mean: np.ndarray
    n: int

    def add(self, batch: Tree) -> MeanFirst:
        sums = np.asarray(host_batches.dense_or_csr(batch).sum(0, dtype=np.float64)).ravel()
        count = views.n_rows(batch)
        return replace(self, n=self.n + count, mean=self.mean + (sums - count * self.mean) / (self.n + count))

    def again(self) -> FourthStatistics:
        return FourthStatistics.about(self.mean, self.template)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["n", "pilot", "first", "second", "third", "fourth"],
    meta_fields=["template"],
)
@dataclass(frozen=True)
class ThirdStatistics:
    """Raw moments up to the fourth about a pilot point, from which the centred fourth follows in one pass."""

    template: Tree
    n: int
    pilot: np.ndarray
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray
    fourth: np.ndarray

    @classmethod
    def empty(cls, template: Tree) -> ThirdStatistics:
        d = players.size(template)
        return cls(template, 0, np.zeros(d), np.zeros(d), np.zeros((d, d)), np.zeros((d, d, d)), np.zeros((d, d)))

    def add(self, batch: Tree) -> ThirdStatistics:
        n, pilot, first, second, third, fourth = self.n, self.pilot, self.first, self.second, self.third, self.fourth
        for x in dense_blocks(batch):
            pilot = pilot if n else x.mean(0, dtype=np.float64)
            z = x - pilot
            d = z.shape[1]
            weighted = z * np.sqrt((z * z).sum(1, keepdims=True))
            n, first, second, fourth = n + len(z), first + z.sum(0), second + z.T @ z, fourth + weighted.T @ weighted
            for piece in np.array_split(z, -(-len(z) // 256)):
                pairs = (piece[:, :, None] * piece[:, None, :]).reshape(len(piece), -1)
                third = third + (pairs.T @ piece).reshape(d, d, d)
        return ThirdStatistics(self.template, n, pilot, first, second, third, fourth)

    def again(self) -> None:
        """The third moments stand in for a second pass."""

    def summary(self) -> Summary:
        m = self.first / self.n
        scatter = np.trace(self.second) - self.n * (m @ m)
        return Summary.of_one_group(self.n, self.pilot + m, scatter, self.template)

    def operands(self) -> Fourth:
        """Expand ``E[|z-m|² (z-m)(z-m)ᵀ]`` in moments of ``z``, the rows less the pilot, whose mean is ``m``."""
        m, S, Q, T = (s / self.n for s in (self.first, self.second, self.fourth, self.third))
        t, Sm, mm = np.einsum("iij->j", T), S @ m, np.outer(m, m)
        inner = Q - np.outer(t, m) - np.outer(m, t) + np.trace(S) * mm
        inner += -2 * (T @ m) + 2 * np.outer(Sm, m) + 2 * np.outer(m, Sm) - 2 * (m @ m) * mm
        inner += (m @ m) * (S - mm)
        fourth, second = (views.covariance_view(M, self.template) for M in (inner, S - mm))
        return Fourth([fourth], second, second)


def dense_blocks(batch: Tree) -> Any:
    for (block,), _ in blocks([host_batches.dense_or_csr(batch)]):
        yield block if isinstance(block, np.ndarray) else block.toarray()

"""PCA, CCA of any number of views, and PLS: problems of second moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.types import Tree
from eigenstream.problems.base import Factors, Problem, Products
from eigenstream.problems.checks import check_options, check_views, static


@static
@dataclass(frozen=True)
class PCA(Problem):
    """``A = E[x xᵀ]``, ``B = I``."""

    center: bool | str = True
    ridge: float = 0.0
    positive = True
    orthonormal = True
    fills = True

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)

    def products(self, x: Tree, V: Tree) -> Products:
        scores = views.project(x, V)
        BV = players.ridged(V, V, self.ridge, 1.0)
        return Products(views.lift(x, scores), BV, _factors([x], [scores], [scores / 2]))

    def statistics(self, batch: Tree, repeatable: bool) -> ViewStatistics:
        return ViewStatistics.empty(self, batch)


@static
@dataclass(frozen=True)
class CCA(Problem):
    """``A``: the covariances between different views; ``B``: those within each view."""

    views: int | None = None
    center: bool | str = True
    ridge: float = 0.0
    fills = True

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)

    @property
    def positive(self) -> bool:  # type: ignore[override]
        # With two views the eigenvalues are ±ρ, so the leading min(dx, dy) are not negative.
        return self.views == 2

    def accept(self, batch: Tree) -> Tree:
        return accept_views(batch, self.views)

    def products(self, x: Tree, V: Tree) -> Products:
        scores = [views.project(xi, vi) for xi, vi in zip(x, V, strict=True)]
        total = sum(scores[1:], start=scores[0])
        AV, BV = zip(*(views.lift_both(xi, total - s, s) for xi, s in zip(x, scores, strict=True)), strict=True)
        # Each pair of views once: a view's scores with those of all views after it.
        after = [sum(scores[i + 2 :], start=scores[i + 1]) for i in range(len(scores) - 1)]
        return Products(
            AV,
            tuple(views.ridged(xi, vi, Bv, self.ridge) for xi, vi, Bv in zip(x, V, BV, strict=True)),
            _factors(x[:-1], scores[:-1], after),
            None if self.ridge else _factors(x, scores, [s / 2 for s in scores]),
        )

    def blocks(self, V: Tree) -> tuple[Tree, ...]:
        return tuple(V)

    def joined(self, parts: tuple[Tree, ...]) -> Tree:
        return tuple(parts)

    def metric_rows(self, memory: Tree, batch: Tree) -> tuple[Tree, ...]:
        return tuple(self.rows(memory, batch))

    def most_components(self, sizes: list[int]) -> int:
        return most_of_views(sizes)

    def statistics(self, batch: Tree, repeatable: bool) -> ViewStatistics:
        return ViewStatistics.empty(self, batch)


@static
@dataclass(frozen=True)
class PLS(Problem):
    """``A = [[0, Cxy], [Cyx, 0]]``, ``B = I``."""

    center: bool | str = True
    ridge: float = 0.0
    positive = True
    orthonormal = True
    fills = True

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)

    def accept(self, batch: Tree) -> Tree:
        return accept_views(batch, 2)

    def products(self, x: Tree, V: Tree) -> Products:
        both = CCA.products(CCA(2), x, V)
        return replace(both, BV=players.ridged(V, V, self.ridge, 1.0), in_B=None)

    def most_components(self, sizes: list[int]) -> int:
        return most_of_views(sizes)

    def statistics(self, batch: Tree, repeatable: bool) -> ViewStatistics:
        return ViewStatistics.empty(self, batch)


def _factors(x: Sequence[Tree], scores: list[Any], lifted: list[Any]) -> Factors | None:
    parts = [views.inner(*each) for each in zip(x, scores, lifted, strict=True)]
    return None if None in parts else tuple(parts)  # type: ignore[arg-type]


def accept_views(batch: Tree, views: int | None) -> Tree:
    if not isinstance(batch, tuple | list) or len(batch) < 2 or (views and len(batch) != views):
        seen = f"{len(batch)} views" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ValueError(f"batch is {seen}: give a tuple of {views or 'two or more'} views with the same rows")
    return check_views(tuple(batch))


def most_of_views(sizes: list[int]) -> int:
    """Two views have min(dx, dy) eigenvalues that are not negative; with more views all eigenvalues count."""
    return min(sizes) if len(sizes) == 2 else sum(sizes)


@partial(jax.tree_util.register_dataclass, data_fields=["moments"], meta_fields=["problem", "template"])
@dataclass(frozen=True)
class ViewStatistics:
    """The second moments of all views side by side."""

    problem: Problem
    template: Tree
    moments: Moments

    @classmethod
    def empty(cls, problem: Problem, batch: Tree) -> ViewStatistics:
        template = problem.template(batch)
        return cls(problem, template, Moments.empty(players.size(template)))

    def add(self, batch: Tree) -> ViewStatistics:
        # With B = I nothing is divided by a variance, so products in the rows' own precision suffice.
        wide = not self.problem.orthonormal
        return replace(self, moments=self.moments.add(host_batches.dense_parts(batch), wide=wide))

    def faded(self, factor: float) -> ViewStatistics:
        return replace(self, moments=self.moments.faded(factor))

    def again(self) -> None:
        """One pass is enough."""

    def covariance(self) -> np.ndarray:
        return self.moments.covariance() if self.problem.center else self.moments.second_moment()

    def operands(self) -> Tree:
        return views.covariance_view(self.covariance(), self.template)

    def summary(self) -> Summary:
        return Summary.of_moments(self.moments, self.template)

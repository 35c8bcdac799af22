"""PCA, CCA of any number of views, and PLS: problems of second moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eigenstream import rows, trees
from eigenstream.problems.base import Factors, Problem, Products, check_options, check_views, static

Tree = Any


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
        scores = rows.project(x, V)
        return Products(rows.lift(x, scores), trees.scale(1 + self.ridge, V), _factors([x], [scores], [scores / 2]))


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
        # Of two views the eigenvalues are ±ρ, so the leading min(dx, dy) are not negative.
        return self.views == 2

    def accept(self, batch: Tree) -> Tree:
        return accept_views(batch, self.views)

    def products(self, x: Tree, V: Tree) -> Products:
        scores = [rows.project(xi, vi) for xi, vi in zip(x, V, strict=True)]
        total = sum(scores[1:], start=scores[0])
        AV, BV = zip(*(rows.lift_both(xi, total - s, s) for xi, s in zip(x, scores, strict=True)), strict=True)
        # Every pair of views once: a view's scores, and those of all views after it.
        after = [sum(scores[i + 2 :], start=scores[i + 1]) for i in range(len(scores) - 1)]
        return Products(
            AV,
            tuple(rows.ridged(xi, vi, Bv, self.ridge) for xi, vi, Bv in zip(x, V, BV, strict=True)),
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
        return replace(both, BV=trees.scale(1 + self.ridge, V), in_B=None)

    def most_components(self, sizes: list[int]) -> int:
        return most_of_views(sizes)


def _factors(views: Sequence[Tree], scores: list[Any], lifted: list[Any]) -> Factors | None:
    parts = [rows.inner(*each) for each in zip(views, scores, lifted, strict=True)]
    return None if None in parts else tuple(parts)  # type: ignore[arg-type]


def accept_views(batch: Tree, views: int | None) -> Tree:
    if not isinstance(batch, tuple | list) or len(batch) < 2 or (views and len(batch) != views):
        seen = f"{len(batch)} views" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ValueError(f"batch is {seen}: give a tuple of {views or 'two or more'} views with the same rows")
    return check_views(tuple(batch))


def most_of_views(sizes: list[int]) -> int:
    """Past the smaller of two views the eigenvalues are 0 and the negatives; of more views all count."""
    return min(sizes) if len(sizes) == 2 else sum(sizes)

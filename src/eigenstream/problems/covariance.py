"""PCA, CCA of two or more views, and PLS: problems of second moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Factors, Problem, Products
from eigenstream.problems.checks import check_views


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class PCA(Problem):
    """Principal components: ``A = E[x xᵀ]``, ``B = I``. A batch is ``X``.

    Parameters
    ----------
    center : {True, False, "running"}
        True: centre each batch by its own mean and divide by ``b - 1``, which is unbiased. ``"running"``: centre by
        the running mean, as the paper does. False: the rows are centred already.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> es.solve(es.problems.pca(), [X], k=1).eigenvalues.round(1).tolist()
    [8.8]
    """

    center: bool | str = True
    ridge: float = 0.0
    positive = True
    orthonormal = True
    fills = True

    def products(self, x: Tree, V: Tree) -> Products:
        scores = views.project(x, V)
        BV = players.ridged(V, V, self.ridge, 1.0)
        return Products(views.lift(x, scores), BV, _factors([x], [scores], [scores / 2]))


@jax.tree_util.register_static
@dataclass(frozen=True)
class CCA(Problem):
    """``A``: the covariances between different views; ``B``: the covariances within each view."""

    views: int | None = None
    center: bool | str = True
    ridge: float = 0.0
    fills = True

    @property
    def positive(self) -> bool:  # type: ignore[override]
        # With two views the eigenvalues are ±ρ, so min(dx, dy) of them are not negative.
        return self.views == 2

    def accept(self, batch: Tree) -> Tree:
        return accept_views(batch, self.views)

    def products(self, x: Tree, V: Tree) -> Products:
        scores = [views.project(xi, vi) for xi, vi in zip(x, V, strict=True)]
        total = sum(scores[1:], start=scores[0])
        AV, BV = zip(*(views.lift_both(xi, total - s, s) for xi, s in zip(x, scores, strict=True)), strict=True)
        # Count each pair of views once: multiply a view's scores by the summed scores of all later views.
        after = [sum(scores[i + 2 :], start=scores[i + 1]) for i in range(len(scores) - 1)]
        return Products(
            AV,
            tuple(views.ridged(xi, vi, Bv, self.ridge) for xi, vi, Bv in zip(x, V, BV, strict=True)),
            _factors(x[:-1], scores[:-1], after),
            None if self.ridge else _factors(x, scores, [s / 2 for s in scores]),
        )

    def between(self, x: Tree) -> Callable[[], Any] | None:
        return partial(views.cross_moment, *x) if len(x) == 2 else None

    def blocks(self, V: Tree) -> tuple[Tree, ...]:
        return tuple(V)

    def joined(self, parts: tuple[Tree, ...]) -> Tree:
        return parts

    def parts(self, V: Tree) -> tuple[Tree, ...]:
        return tuple(V) if len(V) == 2 else (V,)

    def most_components(self, sizes: list[int]) -> int:
        return most_of_views(sizes)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class PLS(Problem):
    """Partial least squares: ``A = [[0, Cxy], [Cyx, 0]]``, ``B = I``. A batch is ``(X, Y)``.

    Parameters
    ----------
    center, ridge
        As for `pca`.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 2)) * [2.0, 1.0]
    >>> es.solve(es.problems.pls(), [(X, X)], k=1).eigenvalues.round(1).tolist()
    [4.2]
    """

    center: bool | str = True
    ridge: float = 0.0
    positive = True
    orthonormal = True
    fills = True

    def accept(self, batch: Tree) -> Tree:
        return accept_views(batch, 2)

    def products(self, x: Tree, V: Tree) -> Products:
        both = CCA.products(CCA(2), x, V)
        return replace(both, BV=players.ridged(V, V, self.ridge, 1.0), in_B=None)

    def between(self, x: Tree) -> Callable[[], Any] | None:
        return partial(views.cross_moment, *x)

    def parts(self, V: Tree) -> tuple[Tree, ...]:
        return tuple(V)

    def most_components(self, sizes: list[int]) -> int:
        return most_of_views(sizes)


def _factors(x: Sequence[Tree], scores: list[Any], lifted: list[Any]) -> Factors | None:
    parts = [views.inner(*each) for each in zip(x, scores, lifted, strict=True)]
    return None if None in parts else tuple(parts)  # type: ignore[arg-type]


def accept_views(batch: Tree, views: int | None) -> Tree:
    if not isinstance(batch, tuple | list) or len(batch) < 2 or (views and len(batch) != views):
        seen = f"{len(batch)} views" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ValueError(f"batch is {seen}: give a tuple of {views or 'two or more'} views with the same rows")
    return check_views(tuple(batch))


def most_of_views(sizes: list[int]) -> int:
    """For two views, the number of eigenvalues that are not negative; for more views, of all eigenvalues."""
    return min(sizes) if len(sizes) == 2 else sum(sizes)

"""Linear discriminant analysis with running class means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.checks import check_views
from eigenstream.problems.statistics import MomentStatistics


class Classes(NamedTuple):
    """The number of rows of each class and the class means."""

    counts: jax.Array
    means: Tree


class Scatters(NamedTuple):
    """Deviations of rows from their class means, and scaled deviations of class means from the grand mean."""

    within: Tree
    between: Tree


@jax.tree_util.register_static
@dataclass(frozen=True)
class LDA(Problem):
    """Linear discriminants. A batch is ``(X, labels)``, labels whole numbers below ``n_classes``.

    ``A``: the covariance between class means, weighted by frequency; ``B``: the covariance within classes.

    Parameters
    ----------
    n_classes : int
        The number of classes; there are at most ``n_classes - 1`` discriminants.
    ridge : float
        Added to the within-class covariance, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> y = np.arange(1000) % 2
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) + 6 * y[:, None] * [1, 0, 0]
    >>> es.solve(es.problems.lda(2), [(X, y)], k=1).eigenvalues.round(0).tolist()
    [9.0]
    """

    n_classes: int
    _: KW_ONLY
    ridge: float = 0.0
    positive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.n_classes, int | np.integer) and self.n_classes >= 2):
            raise ValueError(f"n_classes={self.n_classes!r}: give the number of classes, two or more")

    def accept(self, batch: Tree) -> Tree:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                "a batch of LDA is a pair (X, labels): give an iterable of pairs, [(X, labels)] for a single one"
            )
        x, labels = check_views(batch[0]), np.asarray(batch[1])
        if labels.shape != (views.n_rows(x),):
            raise ValueError(f"labels have shape {labels.shape} for {views.n_rows(x)} rows: give one label a row")
        if labels.dtype.kind not in "biuf" or not np.isin(labels, np.arange(self.n_classes)).all():
            raise ValueError(
                f"labels must be whole numbers from 0 to n_classes - 1 = {self.n_classes - 1}: number the classes, "
                "for instance with np.unique(labels, return_inverse=True)"
            )
        return x, labels.astype(np.int32)

    @property
    def groups(self) -> int:
        return self.n_classes

    def blank(self, template: Tree) -> Tree:
        return super().blank(template), np.zeros(1, np.int32)

    def split(self, batch: Tree) -> tuple[Tree, Any]:
        return batch

    def join(self, rows: Tree, labels: Any) -> Tree:
        return rows, labels

    def pilot(self, batch: Tree) -> Tree | None:
        return host_batches.pilot(batch[0])

    def start(self, batch: Tree) -> Classes:
        return Classes(jnp.zeros(self.n_classes), players.blank(self.n_classes, self.template(batch)))

    def observe(self, memory: Classes, batch: Tree) -> Classes:
        x, labels = batch
        member = jax.nn.one_hot(labels, self.n_classes, dtype=memory.counts.dtype)
        arrived = member.sum(0)
        counts = memory.counts + arrived

        def one(leaf: Any, m: Any) -> Any:
            sums = views.column_sums(leaf, member.astype(m.dtype))
            column = (-1,) + (1,) * (m.ndim - 1)
            change = (sums - arrived.reshape(column) * m) / jnp.maximum(counts, 1).reshape(column)
            return m + change.astype(m.dtype)

        return Classes(counts, views.map_leaves(one, x, memory.means))

    def rows(self, memory: Classes, *parts: Tree) -> Scatters:
        ((x, labels),) = parts
        member = jax.nn.one_hot(labels, self.n_classes, dtype=views.template(views.leaves(x)[0]).dtype)
        within = views.less(x, member, memory.means)
        return Scatters(within, between_rows(memory.counts, memory.means))

    def products(self, x: Scatters, V: Tree) -> Products:
        AV = views.lift(x.between, views.project(x.between, V))
        BV = views.lift(x.within, views.project(x.within, V))
        return Products(AV, views.ridged(x.within, V, BV, self.ridge))

    def metric_rows(self, memory: Classes, batch: Tree) -> tuple[Tree, ...]:
        return (self.rows(memory, batch).within,)

    def most_components(self, sizes: list[int]) -> int:
        return min(self.n_classes - 1, sum(sizes))

    def from_moments(self, statistics: MomentStatistics) -> Scatters:
        template, moments = statistics.template, statistics.moments
        within = views.covariance_view(partial(moments.panel, divisor=moments.n), template)
        return Scatters(within, between_rows(moments.counts, players.from_matrix(moments.means.T, template)))

    def metric(self, x: Scatters) -> list[Callable[[], Any]]:
        return [partial(views.second_moment, x.within, self.ridge)]


def between_rows(counts: Any, means: Tree) -> Tree:
    """Class means minus the grand mean, scaled so that their second moment is the between-class covariance."""
    share = counts / counts.sum()

    def one(m: Any) -> Any:
        flat = m.reshape(m.shape[0], -1)
        deviations = (share * len(share))[:, None] ** 0.5 * (flat - share @ flat)
        return deviations.astype(m.dtype).reshape(m.shape)

    return jax.tree.map(one, means)

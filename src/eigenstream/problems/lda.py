"""Linear discriminant analysis, with class statistics learned from the stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.checks import check_options, check_views, static


class Classes(NamedTuple):
    """Rows seen of each class, and their means."""

    counts: jax.Array
    means: Tree


class Scatters(NamedTuple):
    """Deviations of rows from their class means, and of class means from the grand mean."""

    within: Tree
    between: Tree


@static
@dataclass(frozen=True)
class LDA(Problem):
    """``A``: the covariance between class means, weighted by frequency; ``B``: the covariance within classes."""

    n_classes: int
    ridge: float = 0.0
    center = False
    positive = True

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)
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
        known = labels.dtype.kind in "biuf" and np.isin(labels, np.arange(self.n_classes)).all()
        if not known:
            raise ValueError(
                f"labels must be whole numbers from 0 to n_classes - 1 = {self.n_classes - 1}: number the classes, "
                "for instance with np.unique(labels, return_inverse=True)"
            )
        return x, labels.astype(np.int32)

    def pilot(self, batch: Tree) -> Tree | None:
        return host_batches.pilot(batch[0])

    def less_pilot(self, batch: Tree, point: Tree) -> Tree:
        return host_batches.less_pilot(batch[0], point), batch[1]

    def features(self, batch: Tree) -> Tree:
        return batch[0]

    def with_features(self, batch: Tree, x: Tree) -> Tree:
        return x, batch[1]

    def template(self, batch: Tree) -> Tree:
        return views.template(batch[0])

    def start(self, batch: Tree) -> Classes:
        means = jax.tree.map(lambda s: jnp.zeros((self.n_classes, *s.shape), s.dtype), self.template(batch))
        return Classes(jnp.zeros(self.n_classes), means)

    def _membership(self, labels: Any, dtype: Any) -> jax.Array:
        return jax.nn.one_hot(labels, self.n_classes, dtype=dtype)

    def observe(self, memory: Classes, batch: Tree) -> Classes:
        x, labels = batch
        member = self._membership(labels, memory.counts.dtype)
        arrived = member.sum(0)
        counts = memory.counts + arrived

        def one(leaf: Any, m: Any) -> Any:
            sums = views.column_sums(leaf, member.astype(m.dtype))
            column = (-1,) + (1,) * (m.ndim - 1)
            change = (sums - arrived.reshape(column) * m) / jnp.maximum(counts, 1).reshape(column)
            return m + change.astype(m.dtype)

        return Classes(counts, views.map_leaves(one, x, memory.means))

    def start_summary(self, template: Tree) -> Summary:
        return Summary.empty(template, self.n_classes)

    def summarise(self, summary: Summary, batch: Tree) -> Summary:
        return summary.add(*batch)

    def rows(self, memory: Classes, *parts: Tree) -> Scatters:
        ((x, labels),) = parts
        member = self._membership(labels, views.template(views.leaves(x)[0]).dtype)
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

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        d = players.size(self.template(batch))
        return ClassStatistics(self.template(batch), Moments.empty(d, self.n_classes))


def between_rows(counts: Any, means: Tree) -> Tree:
    """Class means less the grand mean, scaled so that the mean of their outer products is the between covariance."""
    share = counts / counts.sum()

    def one(m: Any) -> Any:
        flat = m.reshape(m.shape[0], -1)
        deviations = (share * len(share))[:, None] ** 0.5 * (flat - share @ flat)
        return deviations.astype(m.dtype).reshape(m.shape)

    return jax.tree.map(one, means)


@partial(jax.tree_util.register_dataclass, data_fields=["moments"], meta_fields=["template"])
@dataclass(frozen=True)
class ClassStatistics:
    """Counts, means and the pooled scatter of the classes."""

    template: Tree
    moments: Moments

    def add(self, batch: Tree) -> ClassStatistics:
        x, labels = batch
        return replace(self, moments=self.moments.add(host_batches.dense_or_csr(x), labels))

    def faded(self, factor: float) -> ClassStatistics:
        return replace(self, moments=self.moments.faded(factor))

    def again(self) -> None:
        """One pass is enough."""

    def operands(self) -> Scatters:
        within = views.covariance_view(self.moments.scatter / self.moments.n, self.template)
        means = players.from_matrix(self.moments.means.T, self.template)
        return Scatters(within, between_rows(self.moments.counts, means))

    def summary(self) -> Summary:
        return Summary.of_moments(self.moments, self.template)

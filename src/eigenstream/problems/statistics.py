"""Sums over rows, in float64 on the host, that determine the exact ``A`` and ``B`` of a problem."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np

from eigenstream.core import host_batches, players
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.types import Tree


@dataclass(frozen=True)
class Statistics:
    """Base of the sums: `add` returns them with one more batch, `operands` the argument of `Problem.products`."""

    problem: Any = field(metadata={"static": True})
    template: Tree = field(metadata={"static": True})

    def again(self) -> Statistics | None:
        """Empty statistics for a second pass; None if one pass is enough."""
        return None

    def summary(self) -> Summary | None:
        """Counts and means of the rows, if they have means."""
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MomentStatistics(Statistics):
    """Means and covariance of all views side by side, about class means if rows have labels."""

    moments: Moments

    @classmethod
    def empty(cls, problem: Any, batch: Tree) -> Self:
        template = problem.template(batch)
        return cls(problem, template, Moments.empty(players.size(template), problem.groups))

    def add(self, batch: Tree) -> Self:
        rows, labels = self.problem.split(batch)
        # With B = I nothing is divided by a variance, so products in the rows' own precision suffice.
        wide = not self.problem.orthonormal
        return replace(self, moments=self.moments.add(host_batches.dense_parts(rows), labels, wide))

    def faded(self, factor: float) -> Self:
        """The same sums with every row weighted by ``factor``."""
        return replace(self, moments=self.moments.faded(factor))

    def covariance(self) -> np.ndarray:
        return self.moments.covariance() if self.problem.center else self.moments.second_moment()

    def operands(self) -> Tree:
        return self.problem.from_moments(self)

    def summary(self) -> Summary:
        return Summary.of_moments(self.moments, self.template)

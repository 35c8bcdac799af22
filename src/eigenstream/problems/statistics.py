"""Sums over rows, in float64 on the host, that determine the exact ``A`` and ``B`` of a problem."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax

from eigenstream.core import host_batches, players, views
from eigenstream.core.device_moments import DeviceMoments
from eigenstream.core.moments import Moments, Summary
from eigenstream.core.types import Tree
from eigenstream.problems.checks import view_sizes


@dataclass(frozen=True)
class Statistics:
    """Base of the sums: `add` returns them with one more batch, `operands` the argument of `Problem.products`.

    Sums of one pass also have `merged`, which returns the sums of the rows of both; empty sums change nothing.
    """

    problem: Any = field(metadata={"static": True})
    template: Tree = field(metadata={"static": True})

    def again(self) -> Statistics | None:
        """Empty statistics for a second pass; None if one pass is enough."""
        return None

    def summary(self) -> Summary | None:
        """Counts and means of the rows, if they have means."""
        return None

    def on_host(self) -> Self:
        """The same sums in host memory."""
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MomentStatistics(Statistics):
    """Means and covariance of all views side by side, about class means if rows have labels."""

    #: `Moments` on the host, or `eigenstream.core.device_moments.DeviceMoments`.
    moments: Any

    @classmethod
    def empty(cls, problem: Any, batch: Tree) -> Self:
        template = problem.template(batch)
        return cls(problem, template, Moments.empty(players.size(template), problem.groups))

    def add(self, batch: Tree, **how: Any) -> Self:
        """The sums with one more batch; ``how``: see `eigenstream.core.device_moments.DeviceMoments.add`."""
        rows, labels = self.problem.split(batch)
        parts = (host_batches.dense_parts if isinstance(self.moments, Moments) else host_batches.matrices)(rows)
        return replace(self, moments=self.moments.add(parts, labels, batch, **how))

    def on_device(self, mesh: Any) -> Self:
        """The same sums on a mesh of devices, or on JAX's default device."""
        return replace(self, moments=DeviceMoments.of(self.moments, mesh, view_sizes(self.template)))

    def on_host(self) -> Self:
        return replace(self, moments=self.moments.on_host())

    def merged(self, other: Self) -> Self:
        return replace(self, moments=self.moments.merged(other.moments))

    def faded(self, factor: float) -> Self:
        """The same sums with every row weighted by ``factor``."""
        return replace(self, moments=self.moments.faded(factor))

    def covariance_view(self) -> Tree:
        """The unbiased covariance about the group means, or if rows are not centred the second moment."""
        divisor = self.moments.n - len(self.moments.counts) if self.problem.center else self.moments.n
        panel = partial(self.moments.panel, divisor=divisor, about_zero=not self.problem.center)
        return views.covariance_view(panel, self.template)

    def operands(self) -> Tree:
        return self.problem.from_moments(self)

    def summary(self) -> Summary:
        return Summary.of(self.moments, self.template)

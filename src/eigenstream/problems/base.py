"""The contract of a problem: estimates of ``A V`` and ``B V`` from a batch, and statistics for an exact solution."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Moments
from eigenstream.core.precision import matmul
from eigenstream.core.types import Tree
from eigenstream.problems.checks import check_options, check_views
from eigenstream.problems.statistics import MomentStatistics

#: Pairs ``s, t`` with ``V·MVᵀ = Σ (s·tᵀ + t·sᵀ)``: sums over rows, which cost less than sums over features.
Factors = tuple[tuple[jax.Array, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Products:
    """``A V`` and ``B V``, each shaped like ``V``, and optional factors of their inner products with ``V``."""

    AV: Tree
    BV: Tree
    in_A: Factors | None = None
    in_B: Factors | None = None

    def __iter__(self) -> Iterator[Tree]:
        return iter((self.AV, self.BV))

    def VAV(self, V: Tree) -> jax.Array:
        """All ``⟨v_i, A v_j⟩``."""
        return _gram(self.in_A, V, self.AV)

    def VBV(self, V: Tree) -> jax.Array:
        return _gram(self.in_B, V, self.BV)

    def vBv(self, V: Tree) -> jax.Array:
        """``⟨v_i, B v_i⟩``."""
        if self.in_B is None:
            return players.dot(V, self.BV)
        return 2 * sum(s * t for s, t in self.in_B).sum(1)  # type: ignore[union-attr]

    def with_sign(self, sign: int) -> Products:
        if sign == 1:
            return self
        in_A = self.in_A and tuple((s, sign * t) for s, t in self.in_A)
        return Products(players.scale(sign, self.AV), self.BV, in_A, self.in_B)


def _gram(factors: Factors | None, V: Tree, MV: Tree) -> jax.Array:
    if factors is None:
        return players.gram(V, MV)
    G = sum(matmul(s, t.T) for s, t in factors)
    return G + G.T


@dataclass(frozen=True)
class Problem:
    """Base of all problems. The defaults serve problems whose batch is a pytree of views to be centred.

    A problem is pure. Host code calls `accept` on each batch of the stream. A solver stores the running means
    (``memory``) in its state, updates them by `observe` and gets ``A V`` and ``B V`` from `estimate`.
    """

    _: KW_ONLY
    #: 1, or -1 to solve for ``-A``, whose largest eigenvalues are the smallest of ``A``.
    sign: int = field(default=1, repr=False, metadata={"static": True})

    #: How rows are centred, and the multiple of the mean eigenvalue of ``B`` that is added to its diagonal.
    center = cast("bool | str", False)
    ridge = 0.0
    #: The leading eigenvalues of ``A`` are known to be positive, as the paper's penalties assume.
    positive = False
    #: ``B`` is the identity.
    orthonormal = False
    #: The products are exact: there is no sampling noise.
    noiseless = False
    #: Batches are rows of features: they have a mean, and ``n`` of them have at most ``n`` components.
    has_rows = True
    #: Batches may be padded with zero rows (`eigenstream.core.views.Filled`).
    fills = False
    #: Parts of a batch, sharing no row, that an unbiased ``A`` takes, and that ``B`` takes.
    shares: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        check_options(self.center, self.ridge)

    @property
    def groups(self) -> int:
        """The number of different labels; 1 if rows have none."""
        return 1

    @property
    def uses_running_mean(self) -> bool:
        return self.center == "running"

    @property
    def promises_positive(self) -> bool:
        """Whether the leading eigenvalues of ``sign A`` are known to be positive."""
        return self.sign > 0 and self.positive

    def with_sign(self, sign: int) -> Self:
        """The same problem for ``sign A``."""
        if sign == self.sign:
            return self
        try:
            return replace(self, sign=sign)
        except TypeError as error:
            raise ValueError(
                f"{type(self).__name__} has no sign for the smallest: make it a frozen dataclass"
            ) from error

    def accept(self, batch: Tree) -> Tree:
        """Check a batch on the host and convert it to its canonical form."""
        return check_views(batch)

    def split(self, batch: Tree) -> tuple[Tree, Any]:
        """The rows of a batch, and their labels or None."""
        return batch, None

    def join(self, rows: Tree, labels: Any) -> Tree:
        """The inverse of `split`."""
        return rows

    def pilot(self, batch: Tree) -> Tree | None:
        """A point near the mean to subtract from every row, which saves float32 digits; None if it is near 0."""
        return host_batches.pilot(self.split(batch)[0]) if self.center else None

    def less_pilot(self, batch: Tree, point: Tree) -> Tree:
        rows, labels = self.split(batch)
        return self.join(host_batches.less_pilot(rows, point), labels)

    def template(self, batch: Tree) -> Tree:
        """Shape and dtype of one player."""
        return views.template(self.split(batch)[0])

    def blank(self, template: Tree) -> Tree:
        """A batch of one row of zeros with this template, to begin a run whose sums are known."""
        return jax.tree.map(lambda s: np.zeros((1, *s.shape), s.dtype), template)

    def start(self, batch: Tree) -> Tree:
        """The running means before the first batch."""
        return views.start_mean(batch) if self.uses_running_mean else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        """Update the running means with a batch."""
        return views.update_mean(memory, batch) if self.uses_running_mean else memory

    def no_rows(self, template: Tree) -> Moments | None:
        """Counts, means and total scatter of no rows; None if rows have no mean."""
        return Moments.empty(players.size(template), self.groups, trace_alone=True) if self.has_rows else None

    def centred(self, memory: Tree, rows: Tree) -> Tree:
        if self.uses_running_mean:
            return views.centre_by_mean(rows, memory)
        return views.map_leaves(views.Centred, rows) if self.center else rows

    def rows(self, memory: Tree, *parts: Tree) -> Tree:
        """The rows that `products` takes; several parts if factors within ``A`` must be independent."""
        return self.centred(memory, *parts)

    def products(self, x: Tree, V: Tree) -> Products:
        """``A V`` and ``B V`` from `rows`, or from statistics in place of rows."""
        raise NotImplementedError

    # The accelerated game uses these methods.

    def for_game(self) -> Problem:
        """The same problem centred by the running mean: centring each batch costs one degree of freedom per batch."""
        return replace(self, center="running") if self.center is True else self  # type: ignore[call-arg]

    def blocks(self, V: Tree) -> tuple[Tree, ...]:
        """A tree cut into one part for each diagonal block of ``B``."""
        return (V,)

    def joined(self, parts: tuple[Tree, ...]) -> Tree:
        """The inverse of `blocks`."""
        return parts[0]

    def parts(self, V: Tree) -> tuple[Tree, ...]:
        """A tree cut into parts with products of their own; of two, ``A`` maps each to the other."""
        return (V,)

    def whole(self, parts: tuple[Tree, ...]) -> Tree:
        """The inverse of `parts`."""
        return parts if len(parts) > 1 else parts[0]

    def metric_rows(self, memory: Tree, batch: Tree) -> tuple[Tree, ...]:
        """For each diagonal block of ``B``, rows with that second moment."""
        return self.blocks(self.centred(memory, batch))

    @property
    def diagonal_only(self) -> bool:
        """Whether ``B`` is diagonal."""
        return self.orthonormal

    def diagonal(self, memory: Tree, batch: Tree) -> Tree:
        """The diagonal of ``B``, shaped like a player, if ``B`` is diagonal or given."""
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), self.template(batch))
        return players.ridged(ones, ones, self.ridge, 1.0)

    def estimate(self, memory: Tree, batch: Tree, V: Tree, independent: bool) -> list[tuple[Products, Products]]:
        """Pairs (p, q): use ``p.AV`` for ``A`` and ``q.BV`` for ``B``, and average the directions.

        With ``independent``, p and q share no row. The parts of the batch are rotated, so that each is used for both.
        """

        def products(*parts: Tree) -> Products:
            return self.products(self.rows(memory, *parts), V)

        if not independent:
            whole = products(batch)
            return [(whole, whole)]
        parts_of_A, m = self.shares[0], sum(self.shares)
        stack = views.stacked(batch, m) if parts_of_A == 1 else None
        if stack is not None:
            # One batched product reads the rows in place; slices would copy them.
            both = jax.vmap(products)(stack)
            for_A = for_B = [jax.tree.map(operator.itemgetter(r), both) for r in range(m)]
        else:
            parts = views.split(batch, (1,) * m)
            for_A = for_B = [products(part) for part in parts]
            if parts_of_A > 1:
                for_A = [products(*(parts[(r + i) % m] for i in range(parts_of_A))) for r in range(m)]
        return [(for_A[r], for_B[(r + parts_of_A) % m]) for r in range(m)]

    def signed_estimate(self, *arguments: Any) -> list[tuple[Products, Products]]:
        """`estimate` with ``sign A`` in the place of ``A``: what solvers use."""
        return [(p.with_sign(self.sign), q.with_sign(self.sign)) for p, q in self.estimate(*arguments)]

    def fewest_rows(self, independent: bool) -> int:
        """The smallest batch that `estimate` can use."""
        least = 2 if self.center and not self.uses_running_mean else 1
        return least * sum(self.shares) if independent else least

    def most_components(self, sizes: list[int]) -> int:
        """The number of components of views of these dimensions or ranks."""
        return sum(sizes)

    def statistics_bytes(self, d: int, shards: int = 1) -> float:
        """Memory for the sums of an exact solution, on each of the devices that share them.

        Sums and solution take about twice this: three d×d arrays.
        """
        return 12 * d * d / shards

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        """Empty statistics for an exact solution; ``repeatable``: the rows can be read twice."""
        return MomentStatistics.empty(self, batch)

    def from_moments(self, statistics: MomentStatistics) -> Tree:
        """The argument of `products` in place of rows, still to be read by `eigenstream.core.views.read`."""
        return statistics.covariance_view()

    def metric(self, x: Tree) -> list[Callable[[], Any]] | None:
        """Functions that give ``B``'s diagonal blocks, from statistics; None if ``B`` is the identity and a ridge."""
        return None if self.orthonormal else [partial(views.second_moment, v, self.ridge) for v in self.blocks(x)]

    def between(self, x: Tree) -> Callable[[], Any] | None:
        """A function that gives ``C`` if ``A = [[0, C], [Cᵀ, 0]]``, from statistics in place of rows; else None."""
        return None

"""The contract of a problem: ``A V`` and ``B V`` of one batch, and the sums that an exact solution needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import Summary
from eigenstream.core.precision import matmul
from eigenstream.core.types import Tree
from eigenstream.problems.checks import check_views

#: Factors ``s, t`` with ``V·MVᵀ = Σ s·tᵀ + t·sᵀ``: a sum over rows in place of one over features.
Factors = tuple[tuple[jax.Array, jax.Array], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["AV", "BV", "in_A", "in_B"], meta_fields=[])
@dataclass(frozen=True)
class Products:
    """``A V`` and ``B V``, each shaped like ``V``, and factors of their inner products with ``V`` if known."""

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
        """The products of ``sign A`` and ``B``."""
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
    """Base of all problems; as it stands, one whose batch is a pytree of views and which centres them.

    A problem is pure. Host code calls `accept` on what the stream yields. A solver keeps the problem's ``memory`` in
    its state, updates it by `observe` and asks `estimate` for ``A V`` and ``B V``.
    """

    _: KW_ONLY
    #: 1, or -1 to solve for ``-A``, whose largest eigenvalues are the smallest of ``A``.
    sign: int = field(default=1, repr=False, metadata={"static": True})

    #: How rows are centred, and the multiple of the mean eigenvalue of ``B`` that is added to it.
    center = cast("bool | str", False)
    ridge = 0.0
    #: The leading eigenvalues of ``A`` are known to be positive, as the paper's penalties assume.
    positive = False
    #: ``B`` is the identity.
    orthonormal = False
    #: The products are exact: there is no sampling noise.
    noiseless = False
    #: ``n`` rows have at most ``n`` components.
    rank_of_rows = True
    #: Batches may be padded with rows of zeros, which `eigenstream.core.views.Filled` counts.
    fills = False
    #: How many independent parts of a batch ``A`` and ``B`` need.
    shares: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def promises_positive(self) -> bool:
        """Whether the leading eigenvalues of ``sign A`` are known to be positive."""
        return self.sign > 0 and self.positive

    def with_sign(self, sign: int) -> Self:
        """The same problem with ``sign A`` in the place of ``A``."""
        return replace(self, sign=sign)

    def accept(self, batch: Tree) -> Tree:
        """Check a batch on the host and bring it to its canonical form; raise a `ValueError` that names the cure."""
        return check_views(batch)

    def pilot(self, batch: Tree) -> Tree | None:
        """A point near the rows' mean to subtract from every row before float32 rounds them; None if it is near 0."""
        return host_batches.pilot(batch) if self.center else None

    def less_pilot(self, batch: Tree, point: Tree) -> Tree:
        return host_batches.less_pilot(batch, point)

    def features(self, batch: Tree) -> Tree:
        """The rows of a batch, without labels."""
        return batch

    def with_features(self, batch: Tree, x: Tree) -> Tree:
        """The batch with ``x`` in the place of its rows."""
        return x

    def template(self, batch: Tree) -> Tree:
        """Shape and dtype of one player."""
        return views.template(batch)

    def start(self, batch: Tree) -> Tree:
        """The running means before the first batch."""
        return views.start_mean(batch) if self.center == "running" else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        """Update the running means with a batch."""
        return views.update_mean(memory, batch) if self.center == "running" else memory

    def start_summary(self, template: Tree) -> Summary | None:
        """An empty summary of rows; None if rows have no mean."""
        return Summary.empty(template)

    def summarise(self, summary: Summary, batch: Tree) -> Summary:
        """Add a host batch to a summary."""
        return summary.add(batch)

    def rows(self, memory: Tree, *parts: Tree) -> Tree:
        """The centred rows that `products` takes; several parts if factors within ``A`` must be independent."""
        (batch,) = parts
        if self.center == "running":
            return views.centre_by_mean(batch, memory)
        return views.centre_by_batch(batch) if self.center else batch

    def products(self, x: Tree, V: Tree) -> Products:
        """``A V`` and ``B V`` from rows, or from their covariance."""
        raise NotImplementedError

    # What the accelerated game asks beside the products.

    def for_game(self, averaged: bool = False) -> Problem:
        """The same problem centred by the running mean: a batch's own mean would cost one row in each batch.

        ``averaged``: the products are a plain mean over all rows, so estimates must be unbiased from the first on.
        """
        return replace(self, center="running") if self.center is True else self  # type: ignore[call-arg]

    def blocks(self, V: Tree) -> tuple[Tree, ...]:
        """The parts of a player, one for each diagonal block of ``B``."""
        return (V,)

    def joined(self, parts: tuple[Tree, ...]) -> Tree:
        """The inverse of `blocks`."""
        return parts[0]

    def metric_rows(self, memory: Tree, batch: Tree) -> tuple[Tree, ...]:
        """For each block of ``B`` the rows whose second moment it is."""
        return (self.rows(memory, batch),)

    @property
    def diagonal_only(self) -> bool:
        """Whether ``B`` is diagonal."""
        return self.orthonormal

    def diagonal(self, memory: Tree, batch: Tree) -> Tree:
        """The diagonal of ``B``, shaped like a player, if ``B`` is diagonal or given."""
        return jax.tree.map(lambda s: jnp.full(s.shape, 1 + self.ridge, s.dtype), self.template(batch))

    def estimate(self, memory: Tree, batch: Tree, V: Tree, independent: bool) -> list[tuple[Products, Products]]:
        """Pairs (p, q): use ``p.AV`` for ``sign A`` and ``q.BV`` for ``B``, and average the directions.

        With ``independent``, p and q share no row. The parts of the batch take turns, so every row serves both.
        """

        def products(*parts: Tree) -> Products:
            return self.products(self.rows(memory, *parts), V).with_sign(self.sign)

        if not independent:
            whole = products(batch)
            return [(whole, whole)]
        for_a, m = self.shares[0], sum(self.shares)
        stack = views.stacked(batch, m)
        if for_a == 1 and stack is not None:
            # One batched product reads the rows in place; slices would be copies.
            both = jax.vmap(products)(stack)
            single = [jax.tree.map(lambda leaf, r=r: leaf[r], both) for r in range(m)]
        else:
            parts = views.split(batch, (1,) * m)
            single = [products(part) for part in parts]

        def first(r: int) -> Products:
            return single[r] if for_a == 1 else products(*(parts[(r + i) % m] for i in range(for_a)))

        return [(first(r), single[(r + for_a) % m]) for r in range(m)]

    def fewest_rows(self, independent: bool) -> int:
        """The smallest batch that `estimate` can use."""
        least = 2 if self.center is True else 1
        return least * sum(self.shares) if independent else least

    def most_components(self, sizes: list[int]) -> int:
        """The number of components of views of these dimensions or ranks."""
        return sum(sizes)

    def statistics_bytes(self, d: int) -> int:
        """The peak memory of an exact solution: about fifteen d×d arrays, as measured."""
        return 15 * 8 * d * d

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        """An empty accumulator of the sums behind the exact ``A`` and ``B``; ``repeatable``: rows can be read twice."""
        raise NotImplementedError

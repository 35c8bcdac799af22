"""The preconditioner ``P ≈ B`` of the game: a `Diagonal`, or a `Sketch` of all rows so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from eigenstream.core import players, views
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem

#: To each column's variance ``(d q / FEW T)²`` of itself is added, with the kurtosis ``q`` of the column: T rows say
#: little about small eigenvalues, and less about a column that few of them touch.
FEW = 24
#: ``Δ`` counts this many times in the sketch's own eigenvectors: they fit the rows behind it, and not others.
SHRUNK = 4.0
#: In passes over all rows a second solution has ``Δ`` times this: the part outside the sketch alone.
OUTSIDE = 0.01
#: Eigenvectors of the sketch that are scored.
SCORED = 8
#: Eigenvalues of a Gram matrix below this share of the largest are rounding.
CUTOFF = 1e-5
#: The rounding of covariances, relative to their largest eigenvalue.
JITTER = 5e-7
#: The least variance of a standardised direction: float32 resolves no less.
LEAST = 1e-5

#: What a sketch has gathered since the last move.
SINCE = ("Y", "inner", "leverages", "held", "seen")


class Factored(NamedTuple):
    """A preconditioner that is ready for use."""

    #: ``G ↦ P⁻¹ G``; more of them if one level outside does not suit all.
    solves: tuple[Callable[[Tree], Tree], ...]
    #: ``κ = E[h²] / E[h]``, summed over the blocks: a row changes ``B v`` by ``h`` in the norm of ``P⁻¹``.
    kappa: Any
    #: ``E[h] / d``, the mean eigenvalue of ``P⁻¹ B``.
    cover: Any
    #: What is carried on.
    metric: Any
    #: The leading eigenvectors ``E`` of the sketch's own problem, ``P E`` and their eigenvalues, or None.
    sketched: tuple[Tree, Tree, jax.Array] | None = None


class Sizes(NamedTuple):
    """Numbers of vectors."""

    #: Rows that a decomposition needs.
    rank: int
    #: Solutions for each player in a pass over all rows.
    ways: int
    #: Eigenvectors of its own that are scored in a stream.
    scored: int


class Diagonal(NamedTuple):
    """``P`` is ``B`` itself, a diagonal matrix: graphs, the identity."""

    #: Shaped like one player.
    values: Tree
    rows: jax.Array
    #: 1 if the diagonal is estimated from rows, 0 if it is given.
    estimated: jax.Array

    @property
    def sizes(self) -> Sizes:
        """It needs no rows for a decomposition."""
        return Sizes(rank=0, ways=1, scored=0)

    def times(self, V: Tree) -> Tree:
        """``B V`` by the current estimate of ``B``."""
        return jax.tree.map(lambda v, p: v * p, V, self.values)

    def observe(self, values: Tree, count: Any, horizon: float) -> Diagonal:
        """Update the running mean of the diagonal, over at most ``horizon`` rows, by ``count`` new rows."""
        total = jnp.minimum(self.rows, horizon) + count
        return self._replace(values=_towards(self.values, values, count / total), rows=total)

    def factor(self, problem: Problem, exactly: bool, count: int) -> Factored:
        # The mean of half a row is added to every coordinate: no row may have touched some of them yet.
        d = players.size(self.values)
        mean = sum(p.sum() for p in jax.tree.leaves(self.values)) / d
        unseen = self.estimated * mean * d / (2 * jnp.maximum(self.rows, 1))
        return Factored((lambda G: jax.tree.map(lambda g, p: g / (p + unseen), G, self.values),), 0.0, 1.0, self)


class Sketch(NamedTuple):
    """``P = Zᵀ Z + Δ`` in each block of ``B``, with a diagonal ``Δ`` in units of the columns' variances.

    ``Zᵀ Z`` approximates the leading part of ``Σ``, the second moments of all columns, by block power iteration: with
    ``Ω = Δ⁻¹ Zᵀ`` the rows between two moves give ``Y = Σ Ω``, and ``Σ ≈ Y (Ωᵀ Y)⁻¹ Yᵀ`` (Nyström) the next ``Z``.
    """

    #: r rows; a tuple of one tree for each block.
    Z: tuple[Tree, ...]
    #: Sums over the rows since the last move of ``Yᵀ`` and ``Ωᵀ Σ Ω``; the first rows stand here as they are.
    Y: tuple[Tree, ...]
    inner: jax.Array
    #: ``Δ`` of the last move, and Cholesky factors of ``Z Δ⁻¹ Zᵀ + I`` for each block.
    delta: tuple[Tree, ...]
    factors: tuple[jax.Array, ...]
    #: Rows in ``Y``, rows in ``Z``, and rows whose leverages were added up since the last move.
    held: jax.Array
    weight: jax.Array
    seen: jax.Array
    #: Sums of the leverages ``h`` of these rows in each block, and of their squares.
    leverages: tuple[jax.Array, jax.Array]
    #: Rows of the stream, mean squares of the columns, and means of fourth powers relative to squared mean squares.
    rows: jax.Array
    squares: tuple[Tree, ...]
    kurtosis: tuple[Tree, ...]
    #: The variance of a standardised direction outside the sketch: of the last one inside, and the mean.
    floor: jax.Array
    rest: jax.Array
    #: The problem's ridge, relative to the mean eigenvalue of ``B``.
    ridge: jax.Array

    @classmethod
    def empty(cls, blocks: tuple[Tree, ...], rank: int, ridge: float) -> Sketch:
        dtype, r = jax.tree.leaves(blocks)[0].dtype, max(1, min(rank, players.size(blocks) // 2))
        zero = jnp.zeros((), dtype)
        Z, Y = players.blank(r, blocks), players.blank(r, blocks)
        delta, squares, kurtosis = (jax.tree.map(lambda z: jnp.zeros(z.shape[1:], dtype), Z) for _ in range(3))
        factors = tuple(jnp.eye(r, dtype=dtype) for _ in blocks)
        sums = jnp.zeros(len(blocks), dtype), jnp.zeros(len(blocks), dtype)
        inner, since = jnp.zeros((r, r), dtype), (zero, zero, zero, sums)
        return cls(Z, Y, inner, delta, factors, *since, zero, squares, kurtosis, zero + 1, zero + 1, zero + ridge)

    @property
    def sizes(self) -> Sizes:
        """With one block of ``B`` it has no eigenvectors of its own."""
        return Sizes(rank=len(self.inner), ways=2, scored=SCORED if len(self.Z) > 1 else 0)

    @property
    def rank(self) -> int:
        """r, the rank of the sketch."""
        return len(self.inner)

    def deviations(self) -> tuple[Tree, ...]:
        """Standard deviations of the columns; 1 for columns that were 0 in all rows."""
        return jax.tree.map(lambda s: jnp.sqrt(jnp.where(s > 0, s, 1)), self.squares)

    def observe(self, blocks: tuple[Tree, ...], horizon: float) -> Sketch:
        """Learn the columns' variances from rows; between two moves learn the sketch from as many as its rank.

        Later rows would take longer than the products with the players, and tell it no more.
        """
        n, x = views.n_rows(blocks), views.dense(blocks)
        total = jnp.minimum(self.rows, horizon) + n
        share = n / total
        squares = _towards(self.squares, jax.tree.map(lambda leaf: (leaf**2).mean(0), x), share)
        safe = jax.tree.map(lambda s: jnp.where(s > 0, s, 1), squares)
        # Relative to the variances: fourth powers themselves overflow.
        before = jax.tree.map(lambda q, old, s: q * (old / s) ** 2, self.kurtosis, self.squares, safe)
        kurtosis = _towards(before, jax.tree.map(lambda leaf, s: ((leaf**2 / s) ** 2).mean(0), x, safe), share)
        weight = jnp.minimum(self.weight, horizon)
        known = self._replace(rows=total, squares=squares, kurtosis=kurtosis, weight=weight)
        # Arrays that do not change are left out, or they would be copied.
        before = {name: getattr(self, name) for name in SINCE}
        after = jax.lax.cond(self.held < self.rank, lambda s: known._replace(**s)._learned(x, n), lambda s: s, before)
        return known._replace(**after)

    def _learned(self, x: tuple[Tree, ...], n: int) -> dict[str, Any]:
        r, lengths = self.rank, self._lengths()
        # A column that had no value at the last move has no place in Z.
        delta = jax.tree.map(lambda now, last: jnp.where(last > 0, last, now), self.outside(False), self.delta)
        scores, h = jnp.zeros((n, r), self.floor.dtype), []
        for leaf, z, d, L in zip(x, self.Z, delta, self.factors, strict=True):
            own = players.gram(leaf, jax.tree.map(jnp.divide, z, d))
            inside = jax.scipy.linalg.solve_triangular(L, own.T, lower=True)
            norms = players.dot(leaf, jax.tree.map(jnp.divide, leaf, d))
            h.append(jnp.maximum(norms - (inside**2).sum(0), 0))
            scores = scores + own
        # The first rows stand as they are, until all places are taken.
        used = (lengths > 0).sum()
        slots = jax.nn.one_hot(used + self.held.astype(jnp.int32) + jnp.arange(n), r, dtype=scores.dtype)
        S = jnp.where(lengths > 0, scores / jnp.where(lengths > 0, lengths, 1), slots)
        Y = jax.tree.map(lambda y, leaf: y + jnp.tensordot(S, leaf, (0, 0)), self.Y, x)
        held = jnp.where(used > 0, self.held + n, jnp.minimum(self.held + n, r))
        # With the row itself among all rows (Sherman and Morrison).
        h = [1 / (1 / each + 1 / self.rows) for each in h]
        sums, squares = (jnp.stack([(each**p).sum() for each in h]) for p in (1, 2))
        leverages = self.leverages[0] + sums, self.leverages[1] + squares
        return {"Y": Y, "inner": self.inner + S.T @ S, "leverages": leverages, "held": held, "seen": self.seen + n}

    def _overlap(self) -> jax.Array:
        """``Z Δ⁻¹ Zᵀ``, over all blocks."""
        return sum(L @ L.T for L in self.factors) - len(self.factors) * jnp.eye(self.rank, dtype=self.floor.dtype)

    def _lengths(self) -> jax.Array:
        """Norms of the columns of ``Ω``, which are scaled to 1; 0 for places that are not taken."""
        return jnp.sqrt(jnp.maximum(sum((L**2).sum(1) for L in self.factors) - len(self.factors), 0))

    def _columns(self) -> jax.Array:
        """The number of columns that had a value."""
        return jnp.maximum(sum((s > 0).sum() for s in jax.tree.leaves(self.squares)), 1)

    def outside(self, exactly: bool) -> tuple[Tree, ...]:
        """``Δ``."""

        def of(squares: Tree, kurtosis: Tree) -> Tree:
            d = players.size(squares)
            ridge = self.ridge * sum(s.sum() for s in jax.tree.leaves(squares)) / d

            def each(s: jax.Array, q: jax.Array) -> jax.Array:
                few = (d * q / (FEW * jnp.maximum(self.rows, 1))) ** 2
                delta = s * (self.rest if exactly else self.floor + few) + ridge
                return jnp.where(delta > 0, delta, 1)

            return jax.tree.map(each, squares, kurtosis)

        return tuple(of(s, q) for s, q in zip(self.squares, self.kurtosis, strict=True))

    def factor(self, problem: Problem, exactly: bool, count: int) -> Factored:
        """``P`` of all rows so far; ``exactly``: for products without sampling noise; ``count``: eigenvectors."""
        eye = jnp.eye(self.rank, dtype=self.floor.dtype)
        known = self if exactly else self._refreshed()
        delta = known.outside(exactly)
        with jax.default_matmul_precision("highest"):
            scaled = jax.tree.map(lambda z, v: z / jnp.sqrt(v), known.Z, delta)
            grams = [players.gram(z, z) for z in scaled]

        def factors(times: float) -> list[jax.Array]:
            return [jnp.linalg.cholesky((g + g.T) / 2 / times + eye) for g in grams]

        def solver(factors: list[jax.Array], times: float = 1.0) -> Callable[[Tree], Tree]:
            def solve(G: Tree) -> Tree:
                out = []
                for g, s, z, L in zip(problem.blocks(G), delta, known.Z, factors, strict=True):
                    g = jax.tree.map(lambda a, s: a / (times * s), g, s)
                    along = jax.scipy.linalg.cho_solve((L, True), players.gram(z, g)).T
                    lifted = players.combine(along, z)
                    out.append(jax.tree.map(lambda a, b, s: a - b / (times * s), g, lifted, s))
                return problem.joined(tuple(out))

            return solve

        own = factors(1.0)
        sums, squares = self.leverages
        kappa = (squares / jnp.maximum(sums, jnp.finfo(sums.dtype).tiny)).sum()
        cover = sums.sum() / jnp.maximum(self.seen, 1) / self._columns()
        if exactly:
            return Factored((solver(own), solver(factors(OUTSIDE), OUTSIDE)), kappa, cover, self)
        sketched = None
        if len(grams) > 1:
            shrunk = factors(SHRUNK)
            lam, coordinates = _eigenvectors(shrunk, count, problem.sign)
            PE = problem.joined(tuple(players.combine(c.T, z) for c, z in zip(coordinates, known.Z, strict=True)))
            sketched = solver(shrunk, SHRUNK)(PE), PE, lam
        return Factored(
            (solver(own),), kappa, cover, known._replace(delta=known._seen(delta), factors=tuple(own)), sketched
        )

    def _seen(self, delta: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """``Δ``, 0 for columns without values."""
        return jax.tree.map(lambda d, s: jnp.where(s > 0, d, 0), delta, self.squares)

    def emptied(self) -> Sketch:
        """Without what was gathered since the last move."""
        return self._replace(**players.zeros_in_place({name: getattr(self, name) for name in SINCE}, self.rows))

    def _refreshed(self) -> Sketch:
        """The sketch of all rows so far, in orthogonal rows, the longest first."""
        r, total = self.rank, self.weight + self.held
        share, n = self.weight / jnp.maximum(total, 1), jnp.maximum(total, 1)
        with jax.default_matmul_precision("highest"):
            lengths = self._lengths()[:, None]
            overlap = jnp.where(lengths > 0, self._overlap() / jnp.where(lengths > 0, lengths, 1), 0)
            inner = share * overlap @ overlap.T + self.inner / n
            size = jnp.sqrt(jnp.where(jnp.diag(inner) > 0, jnp.diag(inner), 1))
            unit = inner / size / size[:, None]
            L = jnp.linalg.cholesky((unit + unit.T) / 2 + CUTOFF * jnp.eye(r, dtype=unit.dtype))
            T = jax.scipy.linalg.solve_triangular(L, jnp.diag(1 / size), lower=True)
            Z = players.add(players.combine(T @ (share * overlap), self.Z), players.combine(T / n, self.Y))
            G = players.gram(*2 * (jax.tree.map(jnp.divide, Z, self.deviations()),))
        energies, U = (x[..., ::-1] for x in jnp.linalg.eigh((G + G.T) / 2))
        Z = players.combine(U.T, Z)
        # The directions of a few rows fit those rows, and not others: half of their number is a fair place.
        last = jnp.minimum(total / 2, (energies > CUTOFF * energies[0]).sum() - 1).astype(jnp.int32)
        rest = (self._columns() - energies.cumsum()[last]) / jnp.maximum(self._columns() - last - 1, 1)
        floor, rest = (jnp.clip(x, LEAST, 1) for x in (energies[last], rest))
        return self.emptied()._replace(Z=Z, weight=total, floor=floor, rest=rest)


def _eigenvectors(factors: list[jax.Array], count: int, sign: int) -> tuple[jax.Array, list[jax.Array]]:
    """The leading eigenvalues of ``sign A`` in the sketch, and for each block ``c`` with ``P v = Zᵀ c``.

    ``A`` has the blocks ``Z_iᵀ Z_j`` of different views. ``factors`` are those of ``Z Δ⁻¹ Zᵀ + I``.
    """
    r, dtype = len(factors[0]), factors[0].dtype
    eye = jnp.eye(r, dtype=dtype)
    # ⟨v, P v⟩ = ⟨c, H c⟩ with H = Z P⁻¹ Zᵀ.
    inverses = [jax.scipy.linalg.solve_triangular(L, eye, lower=True) for L in factors]
    # Rounding may make H indefinite.
    roots = [
        jnp.linalg.cholesky((1 + rounding(L @ L.T)) * eye - X.T @ X) for X, L in zip(inverses, factors, strict=True)
    ]
    if len(roots) == 2:
        # Two views need an eigenproblem of half the size.
        C = sign * roots[0].T @ roots[1]
        squares, first = _leading(jnp.linalg.eigh(C @ C.T), count)
        lam = jnp.sqrt(jnp.maximum(squares, 0))
        Y = jnp.concatenate([first, C.T @ first / jnp.where(lam > 0, lam, 1)]) / jnp.sqrt(2)
    else:
        M = jnp.block([[jnp.zeros_like(eye) if a is b else sign * a.T @ b for b in roots] for a in roots])
        lam, Y = _leading(jnp.linalg.eigh((M + M.T) / 2), count)
    parts = jnp.split(Y, len(roots))
    return lam, [jax.scipy.linalg.solve_triangular(a.T, y, lower=False) for a, y in zip(roots, parts, strict=True)]


def rounding(C: jax.Array) -> jax.Array:
    """A bound on the rounding of a covariance, by its largest row sum."""
    return JITTER * jnp.abs(C).sum(1).max()


def _leading(pairs: tuple[jax.Array, jax.Array], count: int) -> list[jax.Array]:
    """The ``count`` largest eigenvalues and their vectors, zeros where there are fewer."""
    missing = max(count - len(pairs[0]), 0)
    return [jnp.pad(x[..., ::-1][..., :count], [(0, 0)] * (x.ndim - 1) + [(0, missing)]) for x in pairs]


def _towards(old: Tree, new: Tree, weight: Any) -> Tree:
    return jax.tree.map(lambda p, q: p + weight * (q - p), old, new)

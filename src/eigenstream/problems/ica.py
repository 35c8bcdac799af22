"""Independent component analysis by excess kurtosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import NotFinite, Summary, blocks
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.statistics import Statistics

#: The largest dimension for one centred pass, which stores a d³ tensor (16 MB at 128).
SINGLE_PASS_DIMENSION = 128
#: The largest dimension for which summing third moments is faster than reading the rows twice.
CHEAP_DIMENSION = 16


class Fourth(NamedTuple):
    """Rows ``|x| x``, whose second moment is ``E[|x|² x xᵀ]``, and rows for both factors of ``tr(B) B`` and ``B²``."""

    weighted: list[Tree]
    first: Tree
    second: Tree


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ICA(Problem):
    """Independent components by excess kurtosis (Parra and Sajda, 2003). A batch is ``X``.

    ``A = E[|x|² x xᵀ] - tr(B) B - 2 B²``, ``B = E[x xᵀ]``.

    Parameters
    ----------
    center : {True, False, "running"}
        True or ``"running"``: a stream is centred by its running mean (a fourth moment about a batch's own mean is
        biased), an exact solution by the mean of all rows. False: the rows are centred already.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> S = np.random.default_rng(0).uniform(-1, 1, size=(4000, 2)) * [3.0, 1.0]
    >>> es.solve(es.problems.ica(), [S], k=1, which="smallest").eigenvalues.round(0).tolist()
    [-4.0]
    """

    center: bool | str = True
    ridge: float = 0.0
    #: ``A`` contains products of two expectations, each from its own part of the batch; ``B`` takes a third part.
    shares = (2, 1)

    @property
    def uses_running_mean(self) -> bool:
        # A fourth moment about a batch's own mean is biased, and no single factor corrects it.
        return bool(self.center)

    def rows(self, memory: Tree, *parts: Tree) -> Fourth:
        centred = [self.centred(memory, x) for x in parts]
        weighted = [views.scale_rows(x, views.squared_norms(x) ** 0.5) for x in centred]
        return Fourth(weighted, centred[0], centred[-1])

    def products(self, x: Fourth, V: Tree) -> Products:
        fourths = [views.lift(w, views.project(w, V)) for w in x.weighted]
        fourth = players.scale(1 / len(fourths), reduce(players.add, fourths))
        CV = views.lift(x.second, views.project(x.second, V))
        CCV = views.lift(x.first, views.project(x.first, CV))
        gaussian = players.add(players.scale(views.trace(x.first), CV), players.scale(2.0, CCV))
        return Products(players.subtract(fourth, gaussian), views.ridged(x.second, V, CV, self.ridge))

    def metric(self, x: Fourth) -> list[Callable[[], Any]]:
        return [partial(views.second_moment, x.second, self.ridge)]

    def statistics_bytes(self, d: int, shards: int = 1) -> float:
        # Fourth moments are summed on the host.
        return super().statistics_bytes(d)

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        template = self.template(batch)
        d = players.size(template)
        if not self.center:
            return FourthStatistics.about(self, template, np.zeros(d))
        # Third moments cost n d³, but more rows can be added at any time.
        if repeatable and d > CHEAP_DIMENSION:
            return MeanFirst(self, template, np.zeros(d), 0)
        if d > SINGLE_PASS_DIMENSION:
            raise ValueError(
                f"centred ICA of {d} features in a single pass needs a tensor of {d}³ numbers (the limit is "
                f"{SINGLE_PASS_DIMENSION}): give batches that can be read twice, or centred rows and center=False"
            )
        zeros = [np.zeros((d,) * power) for power in (1, 1, 2, 3, 2)]
        return ThirdStatistics(self, template, 0, *zeros)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FourthStatistics(Statistics):
    """Sums of ``|x|² x xᵀ`` and ``x xᵀ`` about a known mean."""

    mean: np.ndarray
    n: int
    second: np.ndarray
    fourth: np.ndarray

    @classmethod
    def about(cls, problem: ICA, template: Tree, mean: np.ndarray) -> FourthStatistics:
        d = len(mean)
        return cls(problem, template, mean, 0, np.zeros((d, d)), np.zeros((d, d)))

    def add(self, batch: Tree) -> FourthStatistics:
        n, second, fourth = self.n, self.second, self.fourth
        for x in dense_blocks(batch):
            x = x - self.mean
            weighted = x * np.sqrt((x * x).sum(1, keepdims=True))
            n += len(x)
            second = second + x.T @ x
            fourth = fourth + weighted.T @ weighted
        _check_sums(batch, fourth.diagonal())
        return replace(self, n=n, second=second, fourth=fourth)

    def merged(self, other: FourthStatistics) -> FourthStatistics:
        if not np.array_equal(self.mean, other.mean):
            raise ValueError("fourth moments about different means cannot be added: sum each in one pass")
        n, second, fourth = self.n + other.n, self.second + other.second, self.fourth + other.fourth
        return replace(self, n=n, second=second, fourth=fourth)

    def operands(self) -> Fourth:
        fourth, second = (_view(m / self.n, self.template) for m in (self.fourth, self.second))
        return Fourth([fourth], second, second)

    def summary(self) -> Summary:
        return _summary(self.n, self.mean, np.trace(self.second), self.template)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanFirst(Statistics):
    """The mean, from the first of two passes."""

    mean: np.ndarray
    n: int

    def add(self, batch: Tree) -> MeanFirst:
        sums = np.asarray(host_batches.dense_or_csr(batch).sum(0, dtype=np.float64)).ravel()
        count = views.n_rows(batch)
        _check_sums(batch, sums)
        return replace(self, n=self.n + count, mean=self.mean + (sums - count * self.mean) / (self.n + count))

    def again(self) -> FourthStatistics:
        return FourthStatistics.about(self.problem, self.template, self.mean)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ThirdStatistics(Statistics):
    """Raw moments up to the fourth about a pilot, which determine the centred fourth moment in one pass."""

    n: int
    pilot: np.ndarray
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray
    fourth: np.ndarray

    def add(self, batch: Tree) -> ThirdStatistics:
        n, pilot, first, second, third, fourth = self.n, self.pilot, self.first, self.second, self.third, self.fourth
        for x in dense_blocks(batch):
            pilot = pilot if n else x.mean(0, dtype=np.float64)
            z = x - pilot
            d = z.shape[1]
            weighted = z * np.sqrt((z * z).sum(1, keepdims=True))
            n, first, second, fourth = n + len(z), first + z.sum(0), second + z.T @ z, fourth + weighted.T @ weighted
            for piece in np.array_split(z, -(-len(z) // 256)):
                pairs = (piece[:, :, None] * piece[:, None, :]).reshape(len(piece), -1)
                third = third + (pairs.T @ piece).reshape(d, d, d)
        _check_sums(batch, fourth.diagonal())
        return replace(self, n=n, pilot=pilot, first=first, second=second, third=third, fourth=fourth)

    def merged(self, other: ThirdStatistics) -> ThirdStatistics:
        """The sums of both about the pilot of the one with more rows, which is nearer to their common mean."""
        few, many = (self, other) if self.n < other.n else (other, self)
        few = few._about(many.pilot) if few.n else few
        sums = {name: getattr(many, name) + getattr(few, name) for name in ("n", "first", "second", "third", "fourth")}
        return replace(many, **sums)

    def _about(self, pilot: np.ndarray) -> ThirdStatistics:
        """The same sums about another pilot: expand the powers of ``z + s``, where ``s`` is the shift."""
        n, f, S, T, s = self.n, self.first, self.second, self.third, self.pilot - pilot
        fs, ss, Ss = np.outer(f, s), np.outer(s, s), S @ s
        second = S + fs + fs.T + n * ss
        # Terms with s in one place, in two and in all three.
        third = T + (S[:, :, None] * s + S[:, None, :] * s[:, None] + S * s[:, None, None])
        third += fs[:, :, None] * s + fs.T[:, :, None] * s + ss[:, :, None] * f + n * ss[:, :, None] * s
        ts, Ss_s = np.outer(np.einsum("iij->j", T), s), np.outer(Ss, s)
        fourth = self.fourth + ts + ts.T + np.trace(S) * ss
        fourth += 2 * (T @ s + Ss_s + Ss_s.T + (f @ s) * ss) + (s @ s) * second
        return replace(self, pilot=pilot, first=f + n * s, second=second, third=third, fourth=fourth)

    def summary(self) -> Summary:
        m = self.first / self.n
        scatter = np.trace(self.second) - self.n * (m @ m)
        return _summary(self.n, self.pilot + m, scatter, self.template)

    def operands(self) -> Fourth:
        """Expand ``E[|z-m|² (z-m)(z-m)ᵀ]`` in moments of ``z``, the rows minus the pilot, and their mean ``m``."""
        m, S, Q, T = (s / self.n for s in (self.first, self.second, self.fourth, self.third))
        t, Sm, mm = np.einsum("iij->j", T), S @ m, np.outer(m, m)
        inner = Q - np.outer(t, m) - np.outer(m, t) + np.trace(S) * mm
        inner += -2 * (T @ m) + 2 * np.outer(Sm, m) + 2 * np.outer(m, Sm) - 2 * (m @ m) * mm
        inner += (m @ m) * (S - mm)
        fourth, second = (_view(M, self.template) for M in (inner, S - mm))
        return Fourth([fourth], second, second)


def dense_blocks(batch: Tree) -> Any:
    for (block,), _ in blocks([host_batches.dense_or_csr(batch)]):
        yield block if isinstance(block, np.ndarray) else block.toarray()


def _view(C: np.ndarray, template: Tree) -> Tree:
    def rows(a: int, b: int, columns: tuple[int, int] = (0, len(C))) -> np.ndarray:
        return C[a:b, slice(*columns)]

    return views.covariance_view(rows, template)


def _summary(n: int, mean: np.ndarray, scatter: Any, template: Tree) -> Summary:
    return Summary(np.array([n], np.float64), players.from_matrix(mean[:, None], template), np.asarray(scatter))


def _check_sums(batch: Tree, sums: np.ndarray) -> None:
    if not np.isfinite(sums).all():
        raise NotFinite(batch)

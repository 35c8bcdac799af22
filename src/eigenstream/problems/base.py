"""What a problem is: the products ``A V`` and ``B V`` of one batch, and the sums an exact solution needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from eigenstream import host, rows, trees
from eigenstream.moments import Moments
from eigenstream.precision import matmul
from eigenstream.summary import Summary

Tree = Any


#: Factors ``s, t`` with ``V·MVᵀ = Σ s·tᵀ + t·sᵀ``, a sum over rows where ``⟨v, M v⟩`` itself is one over features.
Factors = tuple[tuple[jax.Array, jax.Array], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["AV", "BV", "in_A", "in_B"], meta_fields=[])
@dataclass(frozen=True)
class Products:
    """The pair of ``A V`` and ``B V``, each shaped like ``V``, and what is known of their inner products with ``V``."""

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
            return trees.dot(V, self.BV)
        return 2 * sum(s * t for s, t in self.in_B).sum(1)  # type: ignore[union-attr]


def _gram(factors: Factors | None, V: Tree, MV: Tree) -> jax.Array:
    if factors is None:
        return trees.gram(V, MV)
    G = sum(matmul(s, t.T) for s, t in factors)
    return G + G.T


class Problem:
    """Base of all problems; as it stands, one whose batch is a pytree of views and which centres them.

    A problem is pure. Host code calls `accept` on what the stream yields; a solver keeps the problem's ``memory`` in
    its state, lets `observe` learn from each batch, and asks `estimate` for ``A V`` and ``B V``.
    """

    center: bool | str
    ridge: float

    #: The leading eigenvalues are known to be positive, which the game's penalties assume.
    positive: bool = False
    #: ``B`` is the identity.
    orthonormal: bool = False
    #: The products are exact, with no sampling in them.
    noiseless: bool = False
    #: ``n`` rows hold at most ``n`` components.
    rank_of_rows: bool = True
    #: Rows of zeros that a batch is filled up with can be told from others.
    fills: bool = False
    #: Into how many independent parts a batch is cut for ``A`` and for ``B``.
    shares: tuple[int, int] = (1, 1)

    def accept(self, batch: Tree) -> Tree:
        """Check a batch on the host and give it its canonical form, or raise a `ValueError` that says what to do."""
        return check_views(batch)

    def pilot(self, batch: Tree) -> Tree | None:
        """A point to subtract from every row where that changes nothing but rounding, if it would."""
        return host.pilot(batch) if self.center else None

    def less_pilot(self, batch: Tree, point: Tree) -> Tree:
        return host.less_pilot(batch, point)

    def features(self, batch: Tree) -> Tree:
        """The rows of a batch, without what comes beside them."""
        return batch

    def with_features(self, batch: Tree, x: Tree) -> Tree:
        """The batch with other rows in their place."""
        return x

    def template(self, batch: Tree) -> Tree:
        """Shape and dtype of one player."""
        return rows.template(batch)

    def start(self, batch: Tree) -> Tree:
        """What the problem remembers of the stream, before the first batch."""
        return rows.start_mean(batch) if self.center == "running" else ()

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        """Learn from a batch: here the running mean, where that is how rows are centred."""
        return rows.update_mean(memory, batch) if self.center == "running" else memory

    def start_summary(self, template: Tree) -> Summary | None:
        """Of no rows yet; None where rows have no mean."""
        return Summary.empty(template)

    def summarise(self, summary: Summary, batch: Tree) -> Summary:
        """A summary with the rows of one more host batch."""
        return summary.add(batch)

    def rows(self, memory: Tree, *parts: Tree) -> Tree:
        """The centred rows that `products` takes; several parts where factors within ``A`` must be independent."""
        (batch,) = parts
        if self.center == "running":
            return rows.centre_by_mean(batch, memory)
        return rows.centre_by_batch(batch) if self.center else batch

    def products(self, x: Tree, V: Tree) -> Products:
        """``A V`` and ``B V`` from rows, or from a covariance in their place."""
        raise NotImplementedError

    # What the accelerated game asks beside the products.

    def by_running_mean(self, averaged: bool = False) -> Problem:
        """The same problem, centred by the running mean where it was by each batch's own: no row's part is lost.

        ``averaged`` says that products are averaged over all rows alike, and that later ones need not be better.
        """
        return replace(self, center="running") if self.center is True else self  # type: ignore[type-var]

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
        """Whether ``B`` is no more than its diagonal."""
        return self.orthonormal

    def diagonal(self, memory: Tree, batch: Tree) -> Tree:
        """The diagonal of ``B``, shaped like a player, where it is all of it or given."""
        return jax.tree.map(lambda s: jnp.full(s.shape, 1 + self.ridge, s.dtype), self.template(batch))

    def estimate(self, memory: Tree, batch: Tree, V: Tree, independent: bool) -> list[tuple[Products, Products]]:
        """Pairs of products to take ``A`` from the first and ``B`` from the second of, and average over.

        The same batch for both makes one pair. Otherwise the batch is cut, ``A`` and ``B`` come from parts that share
        no row, and the parts take turns: every row serves both, and no pair is biased.
        """
        if not independent:
            whole = self.products(self.rows(memory, batch), V)
            return [(whole, whole)]
        for_a, m = self.shares[0], sum(self.shares)

        def products(*parts: Tree) -> Products:
            return self.products(self.rows(memory, *parts), V)

        stack = rows.stacked(batch, m)
        if for_a == 1 and stack is not None:
            # One batched product reads the rows in place, where slices of them would be copies.
            both = jax.vmap(products)(stack)
            single = [jax.tree.map(lambda leaf, r=r: leaf[r], both) for r in range(m)]
        else:
            parts = rows.split(batch, (1,) * m)
            single = [products(part) for part in parts]

        def first(r: int) -> Products:
            return single[r] if for_a == 1 else products(*(parts[(r + i) % m] for i in range(for_a)))

        return [(first(r), single[(r + for_a) % m]) for r in range(m)]

    def fewest_rows(self, independent: bool) -> int:
        """The smallest batch that `estimate` can use."""
        least = 2 if self.center is True else 1
        return least * sum(self.shares) if independent else least

    def most_components(self, sizes: list[int]) -> int:
        """How many components there are in views of these dimensions or ranks."""
        return sum(sizes)

    def statistics_bytes(self, d: int) -> int:
        """The most memory that an exact solution takes: measured, about fifteen d×d arrays at its peak."""
        return 15 * 8 * d * d

    def statistics(self, batch: Tree, repeatable: bool) -> Any:
        """An empty accumulator of the sums behind the exact ``A`` and ``B``."""
        template = self.template(batch)
        return ViewStatistics(self, template, Moments.empty(trees.size(template)))


@partial(jax.tree_util.register_dataclass, data_fields=["moments"], meta_fields=["problem", "template"])
@dataclass(frozen=True)
class ViewStatistics:
    """The second moments of all views together."""

    problem: Problem
    template: Tree
    moments: Moments

    def add(self, batch: Tree) -> ViewStatistics:
        # Nothing is divided by a variance where B is given.
        return replace(self, moments=self.moments.add(host.dense_parts(batch), wide=not self.problem.orthonormal))

    def faded(self, factor: float) -> ViewStatistics:
        return replace(self, moments=self.moments.faded(factor))

    def again(self) -> None:
        """One pass is enough."""

    def covariance(self) -> np.ndarray:
        return self.moments.covariance() if self.problem.center else self.moments.second_moment()

    def operands(self) -> Tree:
        return rows.covariance_view(self.covariance(), self.template)

    def summary(self) -> Summary:
        return Summary.of_moments(self.moments, self.template)


class Negated(Problem):
    """The same problem with ``-A``: its largest eigenvalues are the other's smallest."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.center, self.ridge = problem.center, problem.ridge
        self.shares = problem.shares
        self.orthonormal, self.fills = problem.orthonormal, problem.fills
        self.noiseless = problem.noiseless
        self.rank_of_rows = problem.rank_of_rows

    def accept(self, batch: Tree) -> Tree:
        return self.problem.accept(batch)

    def pilot(self, batch: Tree) -> Tree | None:
        return self.problem.pilot(batch)

    def less_pilot(self, batch: Tree, point: Tree) -> Tree:
        return self.problem.less_pilot(batch, point)

    def features(self, batch: Tree) -> Tree:
        return self.problem.features(batch)

    def with_features(self, batch: Tree, x: Tree) -> Tree:
        return self.problem.with_features(batch, x)

    def template(self, batch: Tree) -> Tree:
        return self.problem.template(batch)

    def start(self, batch: Tree) -> Tree:
        return self.problem.start(batch)

    def start_summary(self, template: Tree) -> Summary | None:
        return self.problem.start_summary(template)

    def summarise(self, summary: Summary, batch: Tree) -> Summary:
        return self.problem.summarise(summary, batch)

    def observe(self, memory: Tree, batch: Tree) -> Tree:
        return self.problem.observe(memory, batch)

    def estimate(self, memory: Tree, batch: Tree, V: Tree, independent: bool) -> list[tuple[Products, Products]]:
        def negated(p: Products) -> Products:
            return Products(trees.scale(-1, p.AV), p.BV, p.in_A and tuple((s, -t) for s, t in p.in_A), p.in_B)

        return [(negated(p), negated(q)) for p, q in self.problem.estimate(memory, batch, V, independent)]

    def by_running_mean(self, averaged: bool = False) -> Problem:
        return Negated(self.problem.by_running_mean(averaged))

    def blocks(self, V: Tree) -> tuple[Tree, ...]:
        return self.problem.blocks(V)

    def joined(self, parts: tuple[Tree, ...]) -> Tree:
        return self.problem.joined(parts)

    def metric_rows(self, memory: Tree, batch: Tree) -> tuple[Tree, ...]:
        return self.problem.metric_rows(memory, batch)

    @property
    def diagonal_only(self) -> bool:
        return self.problem.diagonal_only

    def diagonal(self, memory: Tree, batch: Tree) -> Tree:
        return self.problem.diagonal(memory, batch)

    def fewest_rows(self, independent: bool) -> int:
        return self.problem.fewest_rows(independent)

    def most_components(self, sizes: list[int]) -> int:
        return self.problem.most_components(sizes)


jax.tree_util.register_pytree_node(Negated, lambda p: ((p.problem,), None), lambda _, children: Negated(*children))


def view_sizes(template: Tree) -> list[int]:
    """The dimension of every view: of the parts of a tuple, or of the whole."""
    return [trees.size(view) for view in template] if isinstance(template, tuple) else [trees.size(template)]


def static(cls: type) -> type:
    """Register a problem without arrays as a pytree that is all structure."""
    return jax.tree_util.register_static(cls)


def check_options(center: Any, ridge: float) -> None:
    if center not in (True, False, "running"):
        raise ValueError(f"center={center!r}: give True (each batch's mean), False (rows are centred) or 'running'")
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge={ridge!r}: give a number of at least 0, relative to the mean eigenvalue of B")


def check_rows(x: Any, name: str) -> Any:
    """One leaf of rows as a float array or a float CSR matrix, checked."""
    if isinstance(x, jsparse.BCOO):
        x = scipy.sparse.coo_matrix((x.data, np.asarray(x.indices).T), shape=x.shape)
    if scipy.sparse.issparse(x):
        x = x.tocsr()
    elif not isinstance(x, jax.Array | np.ndarray):
        x = _from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)
    if x.dtype.kind not in "biufV" or x.dtype.names is not None:
        raise ValueError(f"{name} has dtype {x.dtype}: give real numbers (split complex ones into two columns)")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}: give rows by features, at least two dimensions (x[:, None])")
    return x.astype(_float_for(x.dtype)) if _float_for(x.dtype) != x.dtype else x


def _from_dlpack(x: Any) -> Any:
    """Another library's tensor where it lies: as a NumPy array on the host, as a JAX array on a device."""
    x = x.detach() if hasattr(x, "detach") else x
    on_host = int(x.__dlpack_device__()[0]) == 1
    try:
        return np.from_dlpack(x) if on_host else jnp.from_dlpack(x)
    except (BufferError, RuntimeError):
        # Types that NumPy has no name for, bfloat16 among them.
        return jnp.from_dlpack(x)


def _float_for(dtype: Any) -> Any:
    """The float type that holds a real type's values: float32 or float64."""
    if dtype.kind in "biu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    # JAX's own small floats, bfloat16 among them, are of kind "V" to NumPy.
    return np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)


def check_finite(batch: Tree) -> None:
    """Refuse host rows with NaN or infinity. A device array is not read back: the step that meets one fails."""
    for path, x in _leaves_with_path(batch):
        values = x.data if scipy.sparse.issparse(x) else x
        # The sum is finite if all are, and costs less than asking each.
        if isinstance(values, np.ndarray) and not np.isfinite(values.sum()) and not np.isfinite(values).all():
            name = f"batch{jax.tree_util.keystr(path)}"
            where = "" if scipy.sparse.issparse(x) else f", first in its row {np.argwhere(~np.isfinite(x))[0][0]}"
            raise ValueError(f"{name} holds NaN or infinity{where}: drop or impute those rows before they are streamed")


def _leaves_with_path(batch: Tree) -> list[Any]:
    def is_leaf(x: Any) -> bool:
        return not isinstance(x, list | tuple | dict)

    return jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_leaf)[0]


def check_views(batch: Tree) -> Tree:
    """Every leaf checked, and all of the same number of rows."""
    paths = _leaves_with_path(batch)
    if not paths:
        raise ValueError("the batch holds no array: give rows by features")
    named = [(f"batch{jax.tree_util.keystr(path)}", x) for path, x in paths]
    checked = [check_rows(x, name) for name, x in named]
    lengths = {name: rows.n_rows(x) for (name, _), x in zip(named, checked, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the views have unequal numbers of rows, {lengths}: row r of each must be the same sample")
    if not next(iter(lengths.values())):
        raise ValueError("the batch has no rows: leave empty batches out of the stream")
    structure = jax.tree.structure(batch, is_leaf=lambda x: not isinstance(x, list | tuple | dict))
    return jax.tree.unflatten(structure, checked)

"""Networks compared by their activations, as a whole or layer by layer: PyTorch modules and JAX functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import views
from eigenstream.core.types import Tree
from eigenstream.problems import cca, pca
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import view_sizes
from eigenstream.run.loop import Run
from eigenstream.run.result import Result
from eigenstream.solvers.choice import chosen

__all__ = ["Comparison", "activations", "compare"]

Layers = Sequence[str] | tuple[Sequence[str], Sequence[str]] | None


@dataclass(frozen=True)
class Comparison:
    """How alike two sets of activations are."""

    #: (k,) canonical correlations, the largest first.
    correlations: np.ndarray
    #: Their mean weighted by how much of the first network's activations each accounts for (Morcos, Raghu and Bengio,
    #: 2018): ``Σ α_i ρ_i / Σ α_i`` with ``α_i = Σ_j |cov(h_i, x_j)|`` over its units ``j``.
    pwcca: float
    #: The mean correlation between the two networks' leading principal subspaces (Raghu et al., 2017); NaN if left out.
    svcca: float
    #: Principal components of either network in that, and the least share of variance they hold.
    svcca_components: tuple[int, int]
    svcca_variance: float
    #: The canonical directions, a tree like the activations, and how they were come by.
    result: Result = field(repr=False)

    @property
    def mean_cca(self) -> float:
        """The mean of the correlations."""
        return float(self.correlations.mean())


def compare(
    model_a: Any,
    model_b: Any,
    loader: Iterable[Any],
    layers: Layers = None,
    n_components: int | None = None,
    *,
    per_layer: bool = False,
    variance: float | None = 0.99,
    ridge: float = 0.0,
    solver: Any = "auto",
    max_epochs: int = 1,
    memory_budget: float = 4e9,
    precision: str | None = None,
    mesh: Any = None,
    random_state: int = 0,
) -> Any:
    """Canonical correlations between the activations of two networks on the same inputs.

    Parameters
    ----------
    model_a, model_b : torch.nn.Module or function
        A module is run without gradients, in evaluation mode, and its activations are taken by forward hooks; with a
        streaming solver those of a GPU never leave it. A function of a batch of inputs returns an array ``(b, ...)``, a
        dictionary of them, layer by layer, or a tuple, whose layers are ``"output 1"`` and so on. Every number of a
        layer is a unit, at every position of an image.
    loader : iterable
        Batches of inputs, or tuples whose first entry is one, as a PyTorch ``DataLoader`` gives them. Read twice for
        the summaries, so it has to start anew each time; shuffled, if ``solver`` is a streaming one.
    layers : sequence of str, or two of them, optional
        Names as in ``model.named_modules()``, or keys of the function's dictionary; two sequences where the networks
        name them differently. Left out: all leaf modules that take part, all keys. What a module gives when it is
        called again is ``"name#2"`` and so on; what a function returns in a tuple is ``"output 1"`` and so on.
    n_components : int, optional
        How many correlations, at most; all there are, if left out, for which exact sums have to fit
        ``memory_budget``. A streaming solver finds as many principal components for SVCCA, too: ``svcca_variance``
        says how much they hold.
    per_layer : bool
        False: all layers together are one representation. True: the first layer of one network against the first of
        the other, and so on, in the same passes.
    variance : float or None
        The share of variance that SVCCA keeps; None leaves it out, and saves two thirds of the work.
    ridge : float
        Added to each network's covariance, relative to its mean eigenvalue.
    solver, max_epochs, memory_budget, precision, mesh, random_state
        As in `eigenstream.solve`.

    Returns
    -------
    Comparison, or with ``per_layer`` a dictionary of them
        By the layers' names; where the two networks' differ, ``"name of one ~ name of the other"``.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> rng = np.random.default_rng(0)
    >>> inputs, W = rng.normal(size=(20, 100, 8)), rng.normal(size=(8, 5))
    >>> network = lambda x: {"hidden": np.tanh(x @ W), "out": np.maximum(x @ W, 0)}
    >>> turned = lambda x: {name: 3 * h[:, ::-1] + 1 for name, h in network(x).items()}
    >>> es.neural.compare(network, turned, inputs).correlations.round(6).min()
    np.float64(1.0)
    """
    if n_components is not None and not (isinstance(n_components, int | np.integer) and n_components >= 1):
        raise ValueError(f"n_components={n_components!r}: give a whole number of at least 1, or None for all there are")
    if not (isinstance(max_epochs, int | np.integer) and max_epochs >= 1):
        raise ValueError(f"max_epochs={max_epochs!r}: give a whole number of at least 1")
    if variance is not None and not 0 < variance <= 1:
        raise ValueError(f"variance={variance!r}: give a share between 0 and 1, or None")
    if isinstance(loader, Iterator):
        raise ValueError("loader can be read once only: give a list, a DataLoader or another iterable that starts anew")
    names_a, names_b = layers if _is_pair(layers) else (layers, layers)  # type: ignore[misc]
    pairs = _Pairs(model_a, model_b, loader, names_a, names_b, per_layer)
    options = {"memory_budget": memory_budget, "precision": precision, "mesh": mesh, "random_state": random_state}
    learning = {
        name: _Learning.of(name, batch, n_components, solver, ridge, variance is not None, options)
        for name, batch in pairs.first().items()
    }
    going = [run for one in learning.values() for run in one.fed()]
    for epoch in range(max_epochs):
        for batch in pairs:
            for feed in going:
                feed.take(batch)
        going = [feed for feed in going if feed.run.engine.next_pass(epoch, max_epochs)]
        if not going:
            break
    summing = {name: _Summing.of(one, n_components, variance) for name, one in learning.items()}
    for batch in pairs:
        for name, summary in summing.items():
            summary.take(batch[name])
    found = {name: summary.comparison() for name, summary in summing.items()}
    return found if per_layer else found[WHOLE]


#: The name of all layers together.
WHOLE = "network"


class _Pairs:
    """Batches of both networks' activations: a dictionary of pairs of views, one for every comparison."""

    def __init__(self, model_a: Any, model_b: Any, loader: Any, names_a: Any, names_b: Any, per_layer: bool):
        self.models, self.names, self.loader, self.per_layer = (model_a, model_b), (names_a, names_b), loader, per_layer

    def first(self) -> dict[str, tuple[Tree, Tree]]:
        for batch in self:
            flat = [x.shape for x in jax.tree.leaves(batch) if np.ndim(x) < 2]
            if flat:
                raise ValueError(
                    f"activations of a batch have the shape {tuple(flat[0])}, and no units beside it: give batches of "
                    "inputs, as es.streams.batches(x) does of one array x, and models that return (b, ...)"
                )
            return batch
        raise ValueError("loader is empty: give at least one batch of inputs")

    def __iter__(self) -> Iterator[dict[str, tuple[Tree, Tree]]]:
        with ExitStack() as stack:
            run_a, run_b = (
                stack.enter_context(activations(*pair)) for pair in zip(self.models, self.names, strict=True)
            )
            for batch in self.loader:
                inputs = batch[0] if isinstance(batch, tuple | list) else batch
                yield self._paired(run_a(inputs), run_b(inputs))

    def _paired(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Tree, Tree]]:
        if not self.per_layer:
            return {WHOLE: (a, b)}
        if len(a) != len(b):
            raise ValueError(
                f"per_layer: one network has {len(a)} layers and the other {len(b)}; give layers=(names, names), as "
                "many of one as of the other"
            )
        return {
            (one if one == other else f"{one} ~ {other}"): (a[one], b[other]) for one, other in zip(a, b, strict=True)
        }


@contextmanager
def activations(model: Any, layers: Sequence[str] | None = None) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """A function from inputs to a network's activations, a dictionary of arrays by layer.

    Parameters
    ----------
    model : torch.nn.Module or function
        See `compare`.
    layers : sequence of str, optional
        Which, in which order; all leaf modules or all keys, if left out.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> with es.neural.activations(lambda x: {"in": x, "out": 2 * x}, ["out"]) as run:
    ...     run(np.ones((1, 2)))
    {'out': array([[2., 2.]])}
    """
    if hasattr(model, "register_forward_hook"):
        with _hooked(model, layers) as run:
            yield run
    elif callable(model):
        yield lambda inputs: _picked(model(_for_jax(inputs)), layers)
    else:
        raise ValueError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function of inputs")


def _picked(out: Any, layers: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(out, tuple | list):
        out = {f"output {i}": x for i, x in enumerate(out, start=1)}
    out = dict(out) if isinstance(out, Mapping) else {"output": out}
    missing = [name for name in layers or () if name not in out]
    if missing:
        raise ValueError(f"layers: there is no {', '.join(missing)}; there are {', '.join(out)}")
    return {name: out[name] for name in layers or out}


def _for_jax(inputs: Any) -> Any:
    return jnp.from_dlpack(inputs.detach()) if hasattr(inputs, "detach") else inputs


@contextmanager
def _hooked(model: Any, layers: Sequence[str] | None) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """A module whose layers are listened to; as it was, afterwards."""
    import torch

    modules = dict(model.named_modules(remove_duplicate=False))
    # A module without parts is a layer; a lone one has no name.
    names = list(layers) if layers is not None else [n for n, m in modules.items() if not list(m.children())]
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"layers: there is no {', '.join(missing)}; there are {', '.join(filter(None, modules))}")
    heard: dict[str, list[Any]] = {}

    def listen(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple | list) else output
            if not isinstance(output, torch.Tensor):
                raise ValueError(f"layers: {name} gives a {type(output).__name__}: name the layers that give tensors")
            # A copy: a later layer may work in place.
            heard.setdefault(name, []).append(output.detach().clone())

        return modules[name].register_forward_hook(hook)

    tensors = (*model.parameters(), *model.buffers())
    device = tensors[0].device if tensors else torch.device("cpu")

    def run(inputs: Any) -> dict[str, Any]:
        heard.clear()
        if not isinstance(inputs, torch.Tensor):
            if not hasattr(inputs, "__dlpack__"):
                raise ValueError(f"loader gives a {type(inputs).__name__}: give tensors or arrays, or tuples of them")
            inputs = torch.from_dlpack(inputs)
        with torch.no_grad():
            model(inputs.to(device))
        silent = [name for name in names if name not in heard]
        if silent and layers is not None:
            raise ValueError(f"layers: {', '.join(silent)} took no part in a forward pass; leave them out")
        return {
            (name or "output") + (f"#{again}" if again > 1 else ""): output
            for name in names
            for again, output in enumerate(heard.get(name, ()), start=1)
        }

    modes = {module: module.training for module in modules.values()}
    hooks = [listen(name) for name in names]
    model.eval()
    try:
        yield run
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def _is_pair(layers: Any) -> bool:
    return isinstance(layers, tuple | list) and len(layers) == 2 and not any(isinstance(x, str) for x in layers)


class _Fed(NamedTuple):
    """A run, and which of the activations it learns from: both networks', or one's."""

    run: Run
    name: str
    view: int | None

    def take(self, batch: dict[str, tuple[Tree, Tree]]) -> None:
        both = batch[self.name]
        self.run.take(both if self.view is None else both[self.view])


class _Learning(NamedTuple):
    """The first pass: canonical directions of the pair, and principal ones of each."""

    name: str
    cca: Run
    pca: tuple[Run, ...]

    @classmethod
    def of(
        cls, name: str, batch: Any, k: int | None, solver: Any, ridge: float, svd: bool, options: dict[str, Any]
    ) -> _Learning:
        def run(problem: Problem, batch: Any) -> Run:
            first = problem.accept(batch)
            sizes = view_sizes(problem.template(first))
            picked, reason = chosen(solver, problem, sizes, k, "largest", options["memory_budget"], None)
            if k is None and not picked.whole_spectrum:
                raise ValueError(f"n_components is needed for {type(picked).__name__} ({reason}): give how many")
            # Units that are dead or copies of others leave fewer components than were asked for.
            most = None if picked.whole_spectrum or k is None else min(k, problem.most_components(sizes))
            made = Run(problem, most, picked, for_estimator=True, **options)
            made.begin(first, repeatable=True)
            return made

        principal = tuple(run(pca(), view) for view in batch) if svd else ()
        return cls(name, run(cca(ridge=ridge), batch), principal)

    def fed(self) -> list[_Fed]:
        return [_Fed(self.cca, self.name, None), *(_Fed(run, self.name, i) for i, run in enumerate(self.pca))]


class _Summing:
    """The second pass: what the directions account for, and how the principal subspaces correlate."""

    def __init__(self, result: Result, k: int, frames: tuple[Tree, Tree] | None, held: float):
        self.result, self.k, self.held = result, k, held
        assert result.summary is not None
        # On the device once: they are as long as a network is wide, and every batch needs them.
        self.frames, self.mean = jax.tree.map(jnp.asarray, (frames, result.summary.means[0]))
        self.W = jax.tree.map(lambda v: jnp.asarray(v[:k]), result.eigenvectors[0])
        self.sums = jax.tree.map(jnp.zeros_like, self.W), jnp.zeros(k)
        self.principal = Run(cca(), None, "exact")
        sizes = [0, 0] if frames is None else [len(jax.tree.leaves(P)[0]) for P in frames]
        self.sizes = (sizes[0], sizes[1])

    @classmethod
    def of(cls, learned: _Learning, n_components: int | None, variance: float | None) -> _Summing:
        result = learned.cca.result()
        k = min(len(result.eigenvalues), n_components or len(result.eigenvalues))
        if variance is None:
            return cls(result, k, None, float("nan"))
        frames, held = [], []
        for run in learned.pca:
            found = run.result()
            assert found.summary is not None
            share = np.cumsum(found.eigenvalues) / (found.summary.scatter / (found.n_samples_seen - 1))
            # As many as hold this much, to rounding; all there are, where fewer were asked for than that takes.
            count = min(int(np.searchsorted(share, variance - 1e-6)) + 1, len(share))
            frames.append(jax.tree.map(lambda v, count=count: v[:count], found.eigenvectors))
            held.append(float(share[count - 1]))
        return cls(result, k, (frames[0], frames[1]), min(held))

    def take(self, batch: tuple[Tree, Tree]) -> None:
        batch = cca().accept(batch)
        self.sums = _added(self.sums, batch[0], self.mean, self.W)
        if self.frames is not None:
            self.principal.take(tuple(np.asarray(_scores(x, P)).T for x, P in zip(batch, self.frames, strict=True)))

    def comparison(self) -> Comparison:
        rho = np.clip(self.result.eigenvalues[: self.k], 0, 1)
        total, squares = self.sums
        sums = np.sum([np.asarray(jnp.abs(t).reshape(len(t), -1).sum(1)) for t in jax.tree.leaves(total)], axis=0)
        weights = sums / np.sqrt(np.maximum(np.asarray(squares), np.finfo(np.float32).tiny))
        svcca = float("nan")
        if self.frames is not None:
            svcca = float(np.clip(self.principal.result().eigenvalues, 0, 1).mean())
        return Comparison(rho, float(weights @ rho / weights.sum()), svcca, self.sizes, self.held, self.result)


@partial(jax.jit, donate_argnums=0)
def _added(sums: tuple[Tree, jax.Array], x: Tree, mean: Tree, W: Tree) -> tuple[Tree, jax.Array]:
    """``Σ h_i x_j`` and ``Σ h_i²`` with more rows, directions' scores ``h`` and units ``x`` both about their means."""
    x = jax.tree.map(lambda leaf, m: leaf - m, x, mean)
    h = views.project(x, W)
    total = jax.tree.map(lambda t, leaf: t + views.n_rows(x) * leaf, sums[0], views.lift(x, h))
    return total, sums[1] + (h**2).sum(1)


@jax.jit
def _scores(x: Tree, P: Tree) -> jax.Array:
    return views.project(x, P)

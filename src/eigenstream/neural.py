"""Compare networks by their activations, as a whole or layer by layer: PyTorch modules and JAX functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core import views
from eigenstream.core.settings import check_count
from eigenstream.core.types import Tree
from eigenstream.problems import cca, pca
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import view_sizes
from eigenstream.run.loop import Run
from eigenstream.run.placement import Placement, make_mesh
from eigenstream.run.result import Result
from eigenstream.solvers.choice import chosen

__all__ = ["Comparison", "activations", "compare"]

Layers = Sequence[str] | tuple[Sequence[str], Sequence[str]] | None
Activations = Callable[[Any], dict[str, Any]]
#: The activations of two networks on one batch, or those of two layers to be compared.
Pair = tuple[Tree, Tree]
#: The name of all layers together.
WHOLE = "network"


@dataclass(frozen=True)
class Comparison:
    """Measures of similarity of two sets of activations."""

    #: (k,) canonical correlations, descending.
    correlations: np.ndarray
    #: Their mean weighted by the first network's activations (Morcos, Raghu and Bengio, 2018):
    #: ``Σ α_i ρ_i / Σ α_i`` with ``α_i = Σ_j |cov(h_i, x_j)|`` over its units ``j``.
    pwcca: float
    #: Mean correlation between the leading principal subspaces of both networks (Raghu et al., 2017), or NaN.
    svcca: float
    #: Principal components of either network in SVCCA, and the smaller of the shares of variance they explain.
    svcca_components: tuple[int, int]
    svcca_variance: float
    #: The result of the canonical correlation analysis; its eigenvectors are a tree like the activations.
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
    memory_budget: float | None = None,
    precision: str | None = None,
    mesh: Any = None,
    random_state: int = 0,
) -> Any:
    """Canonical correlations between the activations of two networks on the same inputs.

    Parameters
    ----------
    model_a, model_b : torch.nn.Module or function
        A module is run without gradients, in evaluation mode; forward hooks read its activations. With a streaming
        solver activations on a GPU stay there. A function of a batch of inputs returns an array ``(b, ...)``, a
        dictionary of them by layer, or a tuple, whose layers are ``"output 1"`` and so on. Each number is a unit.
    loader : iterable
        Batches of inputs, or tuples that start with one, for instance a PyTorch ``DataLoader``. It is read at least
        twice, so it has to start anew each time. A streaming solver needs it shuffled.
    layers : sequence of str, or two of them, optional
        Names in ``model.named_modules()`` or keys of the function's dictionary, for both networks or for each. Default:
        all leaf modules that run, or all keys. The second call of a module is the layer ``"name#2"``, and so on.
    n_components : int, optional
        Maximum number of correlations, and of principal components that a streaming solver finds for SVCCA. None: all,
        for which exact sums have to fit ``memory_budget``.
    per_layer : bool
        False: compare all layers together. True: compare the first layers, the second layers, and so on.
    variance : float or None
        The share of variance that SVCCA keeps. None: no SVCCA, for a third of the work.
    ridge : float
        Added to each network's covariance, relative to its mean eigenvalue.
    solver, max_epochs, memory_budget, precision, mesh, random_state
        As in `eigenstream.solve`.

    Returns
    -------
    Comparison, or with ``per_layer`` a dictionary of them
        The keys are the names of layers, or ``"name of one ~ name of the other"`` if they differ.

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
    check_count("n_components", n_components, none="for all")
    check_count("max_epochs", max_epochs)
    if variance is not None and not 0 < variance <= 1:
        raise ValueError(f"variance={variance!r}: give a share between 0 and 1, or None")
    if isinstance(loader, Iterator):
        raise ValueError("loader can be read once only: give a list, a DataLoader or another iterable that starts anew")
    two = isinstance(layers, tuple | list) and len(layers) == 2 and not any(isinstance(x, str) for x in layers)
    batches = partial(_batches, (model_a, model_b), layers if two else (layers, layers), loader, per_layer)
    options = {"memory_budget": memory_budget, "precision": precision, "mesh": mesh, "random_state": random_state}
    start = partial(_start, k=n_components, solver=solver, options=options)
    # For every comparison the runs of CCA on the pair and of PCA on either network.
    runs = {
        name: [start(cca(ridge=ridge), pair), *(start(pca(), view) for view in pair if variance is not None)]
        for name, pair in _first(batches()).items()
    }
    going = [(run, name, i) for name, several in runs.items() for i, run in enumerate(several)]
    for epoch in range(max_epochs):
        for batch in batches():
            for run, name, i in going:
                run.take((batch[name], *batch[name])[i])
        going = [entry for entry in going if entry[0].engine.next_pass(epoch, max_epochs)]
        if not going:
            break
    summaries = {name: _Summary(*several, k=n_components, variance=variance) for name, several in runs.items()}
    for batch in batches():
        for name, summary in summaries.items():
            summary.take(batch[name])
    found = {name: summary.comparison() for name, summary in summaries.items()}
    return found if per_layer else found[WHOLE]


def _batches(models: Any, names: Any, loader: Iterable[Any], per_layer: bool) -> Iterator[dict[str, Pair]]:
    """The activations of both networks on every batch, by the name of the comparison."""
    with ExitStack() as stack:
        run_a, run_b = (stack.enter_context(activations(*pair)) for pair in zip(models, names, strict=True))
        for batch in loader:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            a, b = run_a(inputs), run_b(inputs)
            yield _by_layer(a, b) if per_layer else {WHOLE: (a, b)}


def _by_layer(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Pair]:
    if len(a) != len(b):
        raise ValueError(f"per_layer: {len(a)} layers against {len(b)}; give layers=(names, names), as many of each")
    names = zip(a, b, strict=True)
    return {(one if one == other else f"{one} ~ {other}"): (a[one], b[other]) for one, other in names}


def _first(batches: Iterator[dict[str, Pair]]) -> dict[str, Pair]:
    for batch in batches:
        for x in jax.tree.leaves(batch):
            if np.ndim(x) < 2:
                raise ValueError(
                    f"activations of a batch have the shape {tuple(x.shape)}, and no units beside it: give batches of "
                    "inputs, as es.streams.batches(x) does of one array x, and models that return (b, ...)"
                )
        return batch
    raise ValueError("loader is empty: give at least one batch of inputs")


def _start(problem: Problem, batch: Tree, k: int | None, solver: Any, options: dict[str, Any]) -> Run:
    first = problem.accept(batch)
    sizes = view_sizes(problem.template(first))
    shards = Placement(make_mesh(options["mesh"])).feature_shards(first)
    picked, reason = chosen(solver, problem, sizes, k, "largest", options["memory_budget"], None, shards)
    if k is None and not picked.whole_spectrum:
        raise ValueError(f"n_components is needed for {type(picked).__name__} ({reason}): give how many")
    # Dead or duplicate units reduce the rank, so fewer than k components may exist.
    most = None if picked.whole_spectrum or k is None else min(k, problem.most_components(sizes))
    run = Run(problem, most, picked, for_estimator=True, **options)
    run.begin(first, repeatable=True)
    return run


def activations(model: Any, layers: Sequence[str] | None = None) -> AbstractContextManager[Activations]:
    """A function from inputs to the activations of a network, a dictionary of arrays by layer.

    Parameters
    ----------
    model : torch.nn.Module or function
        See `compare`.
    layers : sequence of str, optional
        Names of layers, in this order. Default: all leaf modules, or all keys.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> with es.neural.activations(lambda x: {"in": x, "out": 2 * x}, ["out"]) as run:
    ...     run(np.ones((1, 2)))
    {'out': array([[2., 2.]])}
    """
    if hasattr(model, "register_forward_hook"):
        return _hooked(model, layers)
    if callable(model):
        return nullcontext(partial(_call, model, layers))
    raise ValueError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function of inputs")


def _call(model: Callable[[Any], Any], layers: Sequence[str] | None, inputs: Any) -> dict[str, Any]:
    out = model(jnp.from_dlpack(inputs.detach()) if hasattr(inputs, "detach") else inputs)
    if isinstance(out, tuple | list):
        out = {f"output {i}": x for i, x in enumerate(out, start=1)}
    out = dict(out) if isinstance(out, Mapping) else {"output": out}
    names = list(layers or out)
    _check_names(names, out)
    return {name: out[name] for name in names}


def _check_names(names: list[str], known: Iterable[str]) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"layers: there is no {', '.join(missing)}; there are {', '.join(filter(None, known))}")


@contextmanager
def _hooked(model: Any, layers: Sequence[str] | None) -> Iterator[Activations]:
    """Run a module with forward hooks, in evaluation mode; restore it afterwards."""
    import torch

    modules = dict(model.named_modules(remove_duplicate=False))
    # Leaf modules are layers. The name of a model that is a leaf itself is empty.
    names = list(layers) if layers is not None else [n for n, m in modules.items() if not list(m.children())]
    _check_names(names, modules)
    device = next((x.device for x in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    outputs: dict[str, list[Any]] = {}

    def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"layers: {name} gives a {type(output).__name__}: name the layers that give tensors")
        # A copy, because a later layer may overwrite it.
        outputs.setdefault(name, []).append(output.detach().clone())

    def run(inputs: Any) -> dict[str, Any]:
        outputs.clear()
        if not isinstance(inputs, torch.Tensor):
            if not hasattr(inputs, "__dlpack__"):
                raise ValueError(f"loader gives a {type(inputs).__name__}: give tensors or arrays, or tuples of them")
            inputs = torch.from_dlpack(inputs)
        with torch.no_grad():
            model(inputs.to(device))
        unused = [name for name in names if name not in outputs]
        if unused and layers is not None:
            raise ValueError(f"layers: {', '.join(unused)} took no part in a forward pass; leave them out")
        return {
            (name or "output") + (f"#{again}" if again > 1 else ""): output
            for name in names
            for again, output in enumerate(outputs.get(name, ()), start=1)
        }

    with ExitStack() as stack:
        for module in modules.values():
            stack.callback(setattr, module, "training", module.training)
        for name in names:
            stack.enter_context(modules[name].register_forward_hook(partial(keep, name)))
        model.eval()
        yield run


class _Summary:
    """The last pass: sums for PWCCA, and CCA of the principal subspaces for SVCCA."""

    def __init__(self, of_pair: Run, *principal: Run, k: int | None, variance: float | None):
        self.result = of_pair.result()
        self.correlations = np.clip(self.result.eigenvalues[:k], 0, 1)
        assert self.result.summary is not None
        # Kept on the device, because every batch needs them.
        self.mean = jax.tree.map(jnp.asarray, self.result.summary.means[0])
        self.W = jax.tree.map(lambda v: jnp.asarray(v[:k]), self.result.eigenvectors[0])
        self.sums = jax.tree.map(jnp.zeros_like, self.W), jnp.zeros(len(self.correlations))
        self.subspaces = [_leading(run.result(), variance) for run in principal]
        self.svcca = Run(cca(), None, "exact")

    def take(self, pair: Pair) -> None:
        pair = cca().accept(pair)
        self.sums = _added(self.sums, pair[0], self.mean, self.W)
        if self.subspaces:
            parts = zip(pair, self.subspaces, strict=True)
            self.svcca.take(tuple(np.asarray(_scores(x, P)).T for x, (P, _, _) in parts))

    def comparison(self) -> Comparison:
        rho, (total, squares) = self.correlations, self.sums
        sums = np.sum([np.asarray(jnp.abs(t).reshape(len(t), -1).sum(1)) for t in jax.tree.leaves(total)], axis=0)
        weights = sums / np.sqrt(np.maximum(np.asarray(squares), np.finfo(np.float32).tiny))
        pwcca = float(weights @ rho / weights.sum())
        if not self.subspaces:
            return Comparison(rho, pwcca, np.nan, (0, 0), np.nan, self.result)
        svcca = float(np.clip(self.svcca.result().eigenvalues, 0, 1).mean())
        (_, count_a, share_a), (_, count_b, share_b) = self.subspaces
        return Comparison(rho, pwcca, svcca, (count_a, count_b), min(share_a, share_b), self.result)


def _leading(result: Result, variance: Any) -> tuple[Tree, int, float]:
    """The principal components that explain this share of variance (all, if they do not), their number and share."""
    assert result.summary is not None
    share = np.cumsum(result.eigenvalues) / (result.summary.scatter / (result.n_samples_seen - 1))
    # The tolerance is for rounding errors.
    count = min(int(np.searchsorted(share, variance - 1e-6)) + 1, len(share))
    return jax.tree.map(lambda v: jnp.asarray(v[:count]), result.eigenvectors), count, float(share[count - 1])


@partial(jax.jit, donate_argnums=0)
def _added(sums: tuple[Tree, jax.Array], x: Tree, mean: Tree, W: Tree) -> tuple[Tree, jax.Array]:
    """Add rows to ``Σ h_i x_j`` and ``Σ h_i²``, with units ``x`` and scores ``h`` less their means."""
    x = jax.tree.map(lambda leaf, m: leaf - m, x, mean)
    h = views.project(x, W)
    total = jax.tree.map(lambda t, leaf: t + views.n_rows(x) * leaf, sums[0], views.lift(x, h))
    return total, sums[1] + (h**2).sum(1)


_scores = jax.jit(views.project)

"""Merge models of parts of the rows: their sums are added, and solved once."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import reduce
from typing import Any

import jax
import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.run.checkpoint import plain
from eigenstream.run.exact_engine import ExactEngine
from eigenstream.run.loop import Run
from eigenstream.run.result import Status
from eigenstream.solvers.exact import Exact, ExactState

#: Settings that change the problem; the others are taken from the first model.
SAME = ("center", "ridge", "which", "priors", "half_life")
#: Counters of a run that are added.
COUNTS = ("n", "steps", "batches")


def merge(models: Iterable[Any]) -> Any:
    """The model of all rows that several models were fitted to, each to its part of them.

    The exact solver's models hold sums over rows. The sums are added, in float64, and solved when a result is first
    read; the result is that of one fit to all rows.

    Parameters
    ----------
    models : iterable of estimators
        Of one class, fitted with the exact solver by `fit`, `fit_stream` or `partial_fit`, or loaded with their sums
        (``save(folder, statistics=True)``). They do not change.

    Returns
    -------
    estimator
        With the settings of the first model. It can be merged again, and `partial_fit` adds rows.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(1000, 3)) * [3.0, 2.0, 1.0]
    >>> parts = [es.PCA(n_components=2).fit(X[:300]), es.PCA().partial_fit(X[300:])]
    >>> whole = es.PCA(n_components=2).fit(X)
    >>> bool(np.allclose(es.merge(parts).components_, whole.components_))
    True
    """
    return merge_named((f"models[{i}]", model) for i, model in enumerate(models))


def merge_named(models: Iterable[tuple[str, Any]]) -> Any:
    """`merge` of models with names for its errors. Models that are made one by one are freed one by one."""
    first: Any = None
    for name, model in models:
        state = _mergeable(model, name).flushed().state
        counts = np.array([getattr(model._run, count) for count in COUNTS])
        if first is None:
            first, first_name, total, summed = model, name, state, counts
            continue
        _check_alike(first, model, first_name, name)
        total, summed = joined([total, state]), summed + counts
    if first is None:
        raise ValueError("models is empty: give at least one fitted model")
    if total is first._run.engine.state:
        # Sums are added to in place, and merged ones have their own memory already.
        total = copy.deepcopy(total)
    merged = clone(first)
    vars(merged).update(first._input())
    problem = first._run.problem
    run = begun(merged, problem, first._run.solver, problem.blank(total.template))
    give_sums(run, total)
    vars(run).update(zip(COUNTS, summed.tolist(), strict=True))
    merged._run, merged._stale = run, True
    return merged


def joined(states: list[ExactState]) -> ExactState:
    """The sums of the rows of all."""

    def both(a: ExactState, b: ExactState) -> ExactState:
        return a._replace(statistics=a.statistics.merged(b.statistics), epsilon=max(a.epsilon, b.epsilon))

    return reduce(both, states)


def begun(estimator: Any, problem: Problem, solver: Exact, batch: Tree) -> Run:
    """A run of this estimator, without rows, for batches like this one."""
    run = estimator._new_run(problem)
    run.solver = solver
    run.begin(batch)
    return run


def give_sums(run: Run, state: ExactState) -> None:
    """Replace the sums of a run by these."""
    run.engine.state = run.engine.state._replace(statistics=state.statistics, epsilon=state.epsilon)


def engine_with_sums(model: Any, name: str) -> ExactEngine:
    """The engine whose sums more rows can be added to; an error with the cure if the model has none."""
    check_is_fitted(model)
    run = vars(model).get("_run")
    solver = model.solver_ if run is None else run.solver
    if not isinstance(solver, Exact):
        kind = type(solver).__name__
        raise ValueError(f'{name} was fitted by the streaming solver {kind}, which keeps no sums: give solver="exact"')
    if "affinity_matrix_" in vars(model):
        raise ValueError(f"{name} was fitted to a matrix of weights, which has no parts: give edges to fit_stream")
    if run is None:
        raise ValueError(
            f"{name} was loaded, without its sums: save it with statistics=True, or eigenstream fit --keep-statistics"
        )
    if not run.engine.takes_more_rows:
        raise ValueError(
            f"{name} read its rows twice, and its sums are about their own mean: fit in one pass, by partial_fit or "
            "fit_stream of an iterator, or centre the rows and give center=False"
        )
    return run.engine


def _mergeable(model: Any, name: str) -> ExactEngine:
    engine = engine_with_sums(model, name)
    if engine.solver.half_life is not None:
        raise ValueError(
            f"{name} has half_life={engine.solver.half_life:g}, and sums that fade depend on the order of all rows: "
            "fit with half_life=None"
        )
    if model._run.stop is not None and model._run.stop.status is Status.INTERRUPTED:
        raise ValueError(f"{name} was interrupted before the end of its rows: resume it first")
    return engine


def _check_alike(first: Any, model: Any, first_name: str, name: str) -> None:
    """Refuse models of different problems."""
    if type(model) is not type(first):
        kinds = f"{name} is of the class {type(model).__name__}, and {first_name} of {type(first).__name__}"
        raise ValueError(f"{kinds}: fit all parts with one class")
    ours, theirs = _facts(first), _facts(model)
    for key, value in ours.items():
        if key in theirs and theirs[key] != value:
            raise ValueError(f"{key} of {name} is {theirs[key]!r}, and of {first_name} {value!r}: fit all parts alike")


def _facts(model: Any) -> dict[str, Any]:
    """What models of one problem have in common."""
    settings = {key: value for key, value in model.get_params().items() if key in SAME}
    learned = {key: value for key, value in vars(model).items() if key in ("classes_", "feature_names_in_")}
    template = model._run.template
    size = "columns" if model._run.problem.has_rows else "n_nodes"
    return plain({**settings, **learned, size: jax.tree.map(lambda leaf: list(leaf.shape), template)})

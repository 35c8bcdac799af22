"""Fit Dask collections: partitions are summed where they lie, the sums are merged in a tree and solved once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eigenstream.core.types import Tree
from eigenstream.estimators.merging import begun, give_sums, joined
from eigenstream.problems.base import Problem
from eigenstream.solvers.choice import chosen
from eigenstream.solvers.exact import Exact, ExactState

#: Sums that one task of the tree merges.
FAN_IN = 8


def is_dask(*collections: Any) -> bool:
    return any(hasattr(x, "__dask_graph__") for x in collections)


def fit(estimator: Any, *views: Any, labels: Any = None, number: Callable[[Any], np.ndarray] | None = None) -> Any:
    """Fit the estimator to views, and to labels that ``number`` numbers, with the same rows.

    No row comes to the client.
    """
    import dask

    first, *others = (_array(x) for x in views)
    matrices = [first, *(x[:, None] if x.ndim == 1 else x for x in others)]
    for x in matrices:
        if x.ndim != 2:
            raise ValueError(f"a collection has shape {x.shape}: give rows by features, two dimensions")
    problem = estimator._problem()
    solver = _exact_solver(estimator, problem, sum(x.shape[1] for x in matrices))
    # One row of zeros with their shapes and types: mistakes in the settings show before anything is computed.
    blank = [np.zeros((1, x.shape[1]), x.dtype) for x in matrices] + [np.zeros(1, int)] * (labels is not None)
    run = begun(estimator, problem, solver, _accepted(problem, blank))
    arrays = _aligned(matrices if labels is None else [*matrices, _array(labels)])
    partitions = zip(*(x.to_delayed().ravel() for x in arrays), strict=True)
    sums = [dask.delayed(_sums)(problem, solver, number, *blocks) for blocks in partitions]
    count = len(sums)
    while len(sums) > 1:
        sums = [dask.delayed(_merged)(sums[i : i + FAN_IN]) for i in range(0, len(sums), FAN_IN)]
    (state,) = dask.compute(*sums)
    if state is None:
        raise ValueError("X has no rows: give at least one")
    give_sums(run, state)
    run.n, run.steps, run.batches = int(state.statistics.summary().counts.sum()), count, count
    estimator._run = run
    names = getattr(views[0], "columns", ())
    if len(names) and all(isinstance(name, str) for name in names):
        estimator.feature_names_in_ = np.asarray(names, dtype=object)
    estimator._learn(run.result(), [])
    return estimator


def distinct(labels: Any) -> np.ndarray:
    """The distinct labels of all partitions."""
    import dask

    parts = dask.compute(*(dask.delayed(np.unique)(block) for block in _array(labels).to_delayed().ravel()))
    return np.unique(np.concatenate(parts))


def _exact_solver(estimator: Any, problem: Problem, d: int) -> Exact:
    given = estimator.solver
    solver = Exact() if isinstance(given, str) and given in ("auto", "exact") else given
    if not isinstance(solver, Exact):
        raise ValueError(
            f'solver={given!r} learns from rows in order, and a Dask collection has none: give solver="exact", or '
            "batches to fit_stream"
        )
    if estimator.half_life is not None or solver.half_life is not None:
        raise ValueError("half_life: the sums of a Dask collection do not fade; give half_life=None, or fit_stream")
    picked, reason = chosen(given, problem, [d], None, estimator.which, estimator.memory_budget, None)
    if not isinstance(picked, Exact):
        raise ValueError(f"{reason}: give a larger memory_budget, or stream the rows through fit_stream")
    return picked


def _array(x: Any) -> Any:
    """A Dask array with all columns in one chunk."""
    if hasattr(x, "to_dask_array"):
        with warnings.catch_warnings():
            # Labels of pandas' own string type become objects, which is no loss.
            warnings.filterwarnings("ignore", "Dask currently has limited support", UserWarning)
            x = x.to_dask_array()
    if not (is_dask(x) and hasattr(x, "chunks")):
        raise ValueError(f"{type(x).__name__} beside a Dask collection: give Dask arrays or dataframes only")
    return x.rechunk(dict.fromkeys(range(1, x.ndim), -1)) if max(x.numblocks[1:], default=1) > 1 else x


def _aligned(arrays: list[Any]) -> list[Any]:
    """The arrays with the same partitions of rows, as far as their sizes are known."""
    if len({x.numblocks[0] for x in arrays}) > 1:
        arrays = [x.copy().compute_chunk_sizes() if np.isnan(x.shape[0]) else x for x in arrays]
    lengths = [x.shape[0] for x in arrays]
    if np.isnan(lengths).any():
        return arrays
    if len(set(lengths)) > 1:
        raise ValueError(f"the collections have {lengths} rows: row r of each must be the same sample")
    return [x if x.chunks[0] == arrays[0].chunks[0] else x.rechunk({0: arrays[0].chunks[0]}) for x in arrays]


def _sums(problem: Problem, solver: Exact, number: Any, *blocks: Any) -> ExactState | None:
    """The sums of one partition, on a worker; None if it has no rows."""
    lengths = [x.shape[0] for x in blocks]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"a partition has {lengths} rows: repartition the collections alike, or give arrays of known sizes "
            "(to_dask_array(lengths=True))"
        )
    if not lengths[0]:
        return None
    if number is not None:
        blocks = (*blocks[:-1], number(blocks[-1]))
    batch = _accepted(problem, blocks)
    return solver.step(problem, solver.init(problem, batch, None), batch)


def _accepted(problem: Problem, parts: Sequence[Any]) -> Tree:
    return problem.accept(tuple(parts) if len(parts) > 1 else parts[0])


def _merged(states: list[ExactState | None]) -> ExactState | None:
    present = [state for state in states if state is not None]
    return joined(present) if present else None

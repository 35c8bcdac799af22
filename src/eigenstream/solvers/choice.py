"""Which solver a name stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eigenstream.problems.base import Problem
from eigenstream.solvers.baselines import SGHA, EckartYoung, Oja
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.game import Paper, Smooth
from eigenstream.solvers.rsg import RSGPlus

SOLVERS: dict[str, Callable[[], Any]] = {
    "exact": Exact,
    "paper": Paper,
    "smooth": Smooth,
    "eckart_young": EckartYoung,
    "sgha": SGHA,
    "oja": Oja,
    "rsg+": RSGPlus,
}


def chosen(solver: Any, d: int, problem: Problem, budget: float) -> Any:
    """The solver that a name stands for, for a problem of ``d`` features."""
    if not isinstance(solver, str):
        return solver
    if solver == "auto":
        needed = problem.statistics_bytes(d)
        if needed > budget:
            raise ValueError(
                f"solver='auto': exact statistics of {d} features need {needed / 1e9:.1f} GB, over memory_budget of "
                f"{budget / 1e9:.1f} GB; raise it, or choose a streaming solver such as es.solvers.Paper(...)"
            )
        solver = "exact"
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r}: give 'auto', {', '.join(map(repr, SOLVERS))} or a solver object")
    return SOLVERS[solver]()

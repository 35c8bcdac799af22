"""The solver that a name stands for, and the rule behind ``"auto"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from eigenstream.problems.base import Problem
from eigenstream.solvers.baselines import SGHA, EckartYoung, Oja
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.game import Game
from eigenstream.solvers.paper import Paper, Smooth
from eigenstream.solvers.rsg import RSGPlus

SOLVERS: dict[str, Callable[[], Any]] = {
    "exact": Exact,
    "game": Game,
    "paper": Paper,
    "smooth": Smooth,
    "eckart_young": EckartYoung,
    "sgha": SGHA,
    "oja": Oja,
    "rsg+": RSGPlus,
}

#: Seconds for one row, fitted to CPU runs (docs/results/acceleration.md): exact sums take EXACT_ROW d², the game's
#: products GAME_ROW d K and its moves, per row, GAME_MOVE d.
EXACT_ROW, GAME_ROW, GAME_MOVE = 1.6e-11, 4.2e-10, 1.4e-8


def chosen(
    solver: Any, problem: Problem, sizes: list[int], k: int | None, which: str, budget: float, half_life: float | None
) -> tuple[Any, str]:
    """The solver for views of these dimensions, and the reason for it in words."""
    reason = "as given"
    if isinstance(solver, str) and solver == "auto":
        solver, reason = _automatic(problem, sum(sizes), k, which, budget)
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise ValueError(f"solver={solver!r}: give 'auto', {', '.join(map(repr, SOLVERS))} or a solver object")
        solver = SOLVERS[solver]()
    if half_life is not None:
        if not hasattr(solver, "half_life"):
            raise ValueError(
                f"half_life: {type(solver).__name__} weighs all rows the same; take solver='game' or 'exact'"
            )
        solver = replace(solver, half_life=half_life)
    return solver, reason


def _automatic(problem: Problem, d: int, k: int | None, which: str, budget: float) -> tuple[str, str]:
    needed = problem.statistics_bytes(d)
    sums = f"the sums of {d} features take {needed / 1e9:.2g} GB"
    if needed > budget:
        if which == "magnitude":
            raise ValueError(f'which="magnitude" needs exact sums, and {sums}, over memory_budget={budget:.2g} bytes')
        return "game", f"{sums}, over memory_budget of {budget / 1e9:.2g} GB"
    if not needed or k is None or which == "magnitude":
        return "exact", f"{sums}, and all of them are wanted" if needed else "nothing has to be summed"
    exact = EXACT_ROW * d**2
    game = GAME_ROW * d * Game().players(d, k) + GAME_MOVE * d
    times = f"a row costs about {1e6 * exact:.2g} µs exactly and {1e6 * game:.2g} µs in the game"
    return ("exact" if exact <= game else "game"), f"{sums}, within memory_budget, and {times}"

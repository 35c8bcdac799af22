"""The solver that a name stands for, and the rule behind ``"auto"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from eigenstream.core.memory import free_bytes
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


def chosen(
    solver: Any,
    problem: Problem,
    sizes: list[int],
    k: int | None,
    which: str,
    budget: float | None,
    half_life: float | None,
    shards: int = 1,
) -> tuple[Any, str]:
    """The solver for views of these dimensions, and the reason for it in words; ``shards``: devices share the sums."""
    reason = "as given"
    if solver == "auto":
        solver, reason = _automatic(problem, sum(sizes), which, budget, shards)
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
    if type(solver) is Game and solver.rank is None and problem.has_rows:
        return _within_budget(solver, problem, sizes, k, which, budget, shards, reason)
    return solver, reason


def _within_budget(
    game: Game,
    problem: Problem,
    sizes: list[int],
    k: int | None,
    which: str,
    budget: float | None,
    shards: int,
    reason: str,
) -> tuple[Any, str]:
    """A game of the rank that the budget has room for, or exact sums where these fit."""
    d = sum(sizes)
    if game.outlier is None:
        name, why = _automatic(problem, d, which, budget, shards)
        if name == "exact":
            return Exact(half_life=game.half_life), f"{why}, where a game gains nothing"
        reason = f"{reason}: {why}" if reason == "as given" else reason
    room = (free_bytes() / 2 if budget is None else budget) * shards
    rank = game.rank_within(room, d, k or problem.most_components(sizes))
    if not problem.diagonal_only:
        reason += f"; a sketch of rank {rank}"
    return replace(game, rank=rank), reason


def _automatic(problem: Problem, d: int, which: str, budget: float | None, shards: int) -> tuple[str, str]:
    """``"exact"`` wherever its sums fit, else ``"game"``."""
    needed = problem.statistics_bytes(d, shards)
    if not needed:
        return "exact", "nothing has to be summed"
    shared = " on each device" if needed < problem.statistics_bytes(d) else ""
    sums = f"the sums of {d} features take {needed / 1e9:.2g} GB{shared}"
    # The other half is for the solution.
    room = free_bytes() / 2 if budget is None else budget
    limit = f"{'half of the free memory' if budget is None else 'memory_budget'}, {room / 1e9:.2g} GB"
    if needed <= room:
        return "exact", f"{sums}, within {limit}"
    if which == "magnitude":
        raise ValueError(f'which="magnitude" needs exact sums, and {sums}, over {limit}: give memory_budget')
    return "game", f"{sums}, over {limit}"

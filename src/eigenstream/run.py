"""The one loop: batches in, a `Result` out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from eigenstream import rows, trees
from eigenstream.eigenpairs import WHICH
from eigenstream.problems.base import Negated, Problem, view_sizes
from eigenstream.problems.matrices import Matrices
from eigenstream.solvers.baselines import SGHA, EckartYoung, Oja
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.game import Paper, Smooth
from eigenstream.solvers.rsg import RSGPlus

__all__ = ["Result", "solve"]

Tree = Any

#: Steps between two looks at a running solver: its progress, its residual and whether it failed.
LOOK_EVERY = 50
SOLVERS: dict[str, Callable[[], Any]] = {
    "exact": Exact,
    "paper": Paper,
    "smooth": Smooth,
    "eckart_young": EckartYoung,
    "sgha": SGHA,
    "oja": Oja,
    "rsg+": RSGPlus,
}


@dataclass(frozen=True)
class Result:
    """Eigenpairs, and how they were come by."""

    #: (k,): the most wanted first.
    eigenvalues: np.ndarray
    #: Players: a pytree like one row of the data, with leaves ``(k, ...)``.
    eigenvectors: Tree
    #: Whether the answer is exact, or its residual fell under ``tol``.
    converged: bool
    #: Why the run stopped, in words.
    message: str
    #: ``‖A v - λ B v‖ / (‖A v‖ + |λ| ‖B v‖)``; of a streaming solver on its last batches, sampling noise included.
    residuals: np.ndarray
    n_iter: int
    n_samples_seen: int
    solver: Any
    #: One record for every look at the run: step, rows, eigenvalues and residual.
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: The solver's last state, from which it could go on.
    state: Any = field(default=None, repr=False)

    @property
    def V(self) -> np.ndarray:
        """The eigenvectors as columns, ``(d, k)``, views below one another, as `eigenstream.eigh` gives them."""
        return trees.columns(self.eigenvectors)


def solve(
    problem: Problem,
    batches: Iterable[Tree] | None,
    k: int,
    solver: Any = "auto",
    *,
    which: str = "largest",
    max_epochs: int = 1,
    max_steps: int | None = None,
    tol: float | None = None,
    memory_budget: float = 2e9,
    random_state: int = 0,
    verbose: bool = False,
) -> Result:
    """The ``k`` leading eigenpairs of a problem from a stream of batches.

    Parameters
    ----------
    problem : problem
        From `eigenstream.problems`.
    batches : iterable or None
        Batches as the problem takes them. A list or another iterable that starts anew each time serves several epochs.
        None for `eigenstream.problems.matrices`.
    k : int
        How many.
    solver : str or solver
        ``"auto"`` and ``"exact"`` sum the statistics and solve once; ``"paper"``, ``"smooth"``, ``"eckart_young"``,
        ``"sgha"``, ``"oja"``, ``"rsg+"``, or one of `eigenstream.solvers` with its settings.
    which : {"largest", "smallest", "magnitude"}
        From which end of the spectrum; ``"magnitude"`` with ``"exact"`` only.
    max_epochs : int
        Passes over ``batches``.
    max_steps : int, optional
        The most steps in all; 1000 for matrices.
    tol : float, optional
        Stop once every pair's residual, averaged over a look, is below this.
    memory_budget : float
        Bytes that ``"auto"`` may spend on exact statistics.
    random_state : int
        Seed of the first players.
    verbose : bool
        Whether to show progress.

    Returns
    -------
    Result

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(6000, 4)) * [4.0, 2.0, 1.0, 0.5]
    >>> batches = np.split(X, 60)
    >>> exact = es.solve(es.problems.pca(), batches, k=2)
    >>> game = es.solve(es.problems.pca(), batches, k=2, solver=es.solvers.Paper(learning_rate=0.03))
    >>> es.metrics.subspace_error(game.V, exact.V) < 1e-2
    True
    """
    if which not in WHICH:
        raise ValueError(f"which={which!r}: give one of {', '.join(map(repr, WHICH))}")
    if not (isinstance(k, int | np.integer) and k >= 1):
        raise ValueError(f"k={k!r}: give a whole number of at least 1")
    if not (isinstance(max_epochs, int | np.integer) and max_epochs >= 1):
        raise ValueError(f"max_epochs={max_epochs!r}: give a whole number of at least 1")
    stream = _Stream(problem, batches)
    first = stream.first
    template = problem.template(first)
    most = problem.most_components(view_sizes(template))
    if k > most:
        raise ValueError(f"k={k} is too large: this problem has at most {most} components; give k of at most {most}")
    solver = _chosen(solver, trees.size(template), problem, memory_budget)
    if isinstance(solver, Exact):
        return _solve_exact(problem, stream, int(k), solver, which)
    if which == "magnitude":
        raise ValueError('which="magnitude" needs the whole spectrum: take solver="exact"')
    posed = problem if which == "largest" else Negated(problem)
    return _iterate(posed, stream, int(k), solver, max_epochs, max_steps, tol, random_state, verbose)


class _Stream:
    """Checked batches of one shape, with the first already looked at."""

    def __init__(self, problem: Problem, batches: Iterable[Tree] | None):
        self.problem, self.needless = problem, isinstance(problem, Matrices)
        if self.needless:
            self.first = problem.accept(batches)
            return
        if batches is None:
            raise ValueError("batches is None: this problem needs data; give an iterable of batches")
        if isinstance(batches, np.ndarray | jax.Array):
            raise ValueError("batches is one array: give an iterable of batches, [X] for a single one")
        self.source, self.repeatable = batches, iter(batches) is not batches
        self._opened: Iterator[Tree] | None = iter(batches)
        head = next(self._opened, None)
        if head is None:
            raise ValueError("batches is empty: give at least one batch")
        self._head: Tree = head
        self.first = problem.accept(head)
        self.template = problem.template(self.first)

    def __iter__(self) -> Iterator[Tree]:
        if self._opened is None:
            fresh = iter(self.source)
        else:
            fresh, self._opened = _chain(self._head, self._opened), None
        for raw in fresh:
            batch = self.problem.accept(raw)
            seen = self.problem.template(batch)
            if seen != self.template:
                raise ValueError(f"the stream changed shape: its first rows were {self.template}, these are {seen}")
            yield batch


def _chain(head: Tree, rest: Iterator[Tree]) -> Iterator[Tree]:
    yield head
    yield from rest


def _chosen(solver: Any, d: int, problem: Problem, budget: float) -> Any:
    if not isinstance(solver, str):
        return solver
    if solver == "auto":
        needed = 4 * 8 * d * d
        if needed > budget and not isinstance(problem, Matrices):
            raise ValueError(
                f"solver='auto': exact statistics of {d} features need {needed / 1e9:.1f} GB, over memory_budget of "
                f"{budget / 1e9:.1f} GB; raise it, or choose a streaming solver such as es.solvers.Paper(...)"
            )
        solver = "exact"
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r}: give 'auto', {', '.join(map(repr, SOLVERS))} or a solver object")
    return SOLVERS[solver]()


def _solve_exact(problem: Problem, stream: _Stream, k: int, solver: Exact, which: str) -> Result:
    n = steps = passes = 0
    state: Any = solver.init(problem, stream.first, k, not stream.needless and stream.repeatable)
    after: Any = state
    while after is not None and not stream.needless:
        state, n, passes = after, 0, passes + 1
        for batch in stream:
            state = solver.step(problem, state, batch)
            n += rows.n_rows(batch)
            steps += 1
        after = solver.next_pass(state)
    _check_rows(problem, n, k, problem.fewest_rows(False))
    solved, V = solver.solve(problem, state, which)
    d, rank = trees.size(state.template), sum(solved.ranks)
    message = (
        "solved exactly" if stream.needless else f"solved exactly from {n} rows in {passes} pass" + "es" * (passes > 1)
    )
    if rank < d:
        message += f"; B has rank {rank} of {d}, and the solution lies in its range"
    return Result(solved.eigenvalues, V, True, message, np.zeros(k), steps, n, solver, [], state)


def _check_rows(problem: Problem, n: int, k: int, least: int) -> None:
    if n < least:
        raise ValueError(f"the stream held too few rows: at least {least} are needed")
    if problem.rank_of_rows and n < k:
        raise ValueError(f"the stream held {n} rows, fewer than k={k}: give more rows, or a smaller k")


@partial(jax.jit, static_argnums=0)
def _step(solver: Any, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.step(problem, state, batch)


@partial(jax.jit, static_argnums=(0, 3))
def _steps_without_data(solver: Any, problem: Problem, state: Any, count: int) -> Any:
    def body(state: Any, _: None) -> Any:
        return solver.step(problem, state, None)

    state, infos = jax.lax.scan(body, state, None, length=count)
    return state, jax.tree.map(lambda x: x[-1], infos)


def _iterate(
    problem: Problem,
    stream: _Stream,
    k: int,
    solver: Any,
    max_epochs: int,
    max_steps: int | None,
    tol: float | None,
    random_state: int,
    verbose: bool,
) -> Result:
    first = rows.to_device(stream.first)
    state = solver.init(problem, first, k, jax.random.key(random_state))
    sign = -1 if isinstance(problem, Negated) else 1
    history: list[dict[str, Any]] = []
    n = steps = 0
    converged, message = False, ""
    averaged = None
    with _progress(verbose, max_steps) as show:
        for advance, count, size in _advances(solver, problem, stream, max_epochs, max_steps):
            state, info = advance(state)
            n, steps = n + size, steps + count
            if steps > LOOK_EVERY // 10 and steps % LOOK_EVERY and count == 1:
                continue
            worst = float(np.max(np.asarray(info.residuals)))
            averaged = worst if averaged is None else averaged + 0.5 * (worst - averaged)
            record = {"step": steps, "rows": n, "eigenvalues": sign * np.asarray(info.eigenvalues), "residual": worst}
            history.append(record)
            show(record)
            if bool(state.failed):
                message = (
                    f"a step near number {steps} was not finite; this is the last finite state: lower learning_rate"
                )
                break
            if tol is not None and averaged < tol:
                converged, message = True, f"every residual is below tol={tol:g} after {steps} steps"
                break
        else:
            if bool(state.failed):
                message = (
                    f"a step near number {steps} was not finite; this is the last finite state: lower learning_rate"
                )
    _check_rows(problem, n, k, solver.fewest_rows(problem))
    rest = np.asarray(info.residuals)
    if not message:
        source = f"{steps} steps on the matrices" if stream.needless else f"{n} rows in {steps} batches"
        message = f"stopped after {source}, with a residual of {rest.max():.2g}"
        message += "" if stream.needless else " on the last batch, sampling noise included"
        message += f" (tol={tol:g} was not reached)" if tol is not None else ""
    lam, V = solver.eigenpairs(problem, state)
    return Result(sign * np.asarray(lam), V, converged, message, rest, steps, n, solver, history, state)


def _advances(
    solver: Any, problem: Problem, stream: _Stream, max_epochs: int, max_steps: int | None
) -> Iterator[tuple[Callable[[Any], Any], int, int]]:
    """One item for every compiled call: the call, how many steps it makes and how many rows it takes."""
    if stream.needless:
        left = 1000 if max_steps is None else max_steps
        while left > 0:
            count = min(left, LOOK_EVERY)
            yield partial(_scan, solver, problem, count), count, 0
            left -= count
        return
    if max_epochs > 1 and not stream.repeatable:
        raise ValueError(f"max_epochs={max_epochs}, but batches can be read once only: give a list or a re-iterable")
    allowed = np.inf if max_steps is None else max_steps
    for _ in range(max_epochs):
        for batch in _large_enough(stream, solver.fewest_rows(problem)):
            if allowed <= 0:
                return
            yield partial(_one, solver, problem, rows.to_device(batch)), 1, rows.n_rows(batch)
            allowed -= 1


def _scan(solver: Any, problem: Problem, count: int, state: Any) -> Any:
    return _steps_without_data(solver, problem, state, count)


def _one(solver: Any, problem: Problem, batch: Tree, state: Any) -> Any:
    return _step(solver, problem, state, batch)


def _large_enough(batches: Iterable[Tree], least: int) -> Iterator[Tree]:
    """Batches of at least ``least`` rows: a smaller one is joined to the next, or the last to the one before."""
    held: Tree = None
    for batch in batches:
        if held is not None:
            if min(rows.n_rows(held), rows.n_rows(batch)) >= least:
                yield held
            else:
                batch = rows.join(held, batch)
        held = batch
    if held is not None and rows.n_rows(held) >= least:
        yield held


class _progress:
    """A bar on the terminal, or nothing."""

    def __init__(self, verbose: bool, total: int | None):
        self.verbose, self.total = verbose, total

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        if not self.verbose:
            return lambda record: None
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns)
        self.bar.start()
        task = self.bar.add_task("solving", total=self.total)

        def show(record: dict[str, Any]) -> None:
            lam = " ".join(f"{v:.4g}" for v in record["eigenvalues"][:4])
            words = f"{record['rows']} rows  residual {record['residual']:.2g}  eigenvalues {lam}"
            self.bar.update(task, completed=record["step"], description=words)

        return show

    def __exit__(self, *exception: Any) -> None:
        if self.verbose:
            self.bar.stop()

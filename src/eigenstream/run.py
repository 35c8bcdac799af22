"""The one loop: batches in, a `Result` out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
#: A residual that a player reaches only while it is nowhere near an eigenvector.
FAR = 0.9
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

    #: (k,): the most wanted first; of an iterative solver, in the order of its players.
    eigenvalues: np.ndarray
    #: Players: a pytree like one row of the data, with leaves ``(k, ...)``.
    eigenvectors: Tree = field(repr=False)
    #: Whether the answer is exact, or its residual fell under ``tol``.
    converged: bool
    #: Why the run stopped, in words.
    message: str
    #: ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)``; of a streaming solver on its last batches, sampling noise included.
    residuals: np.ndarray = field(repr=False)
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
    memory_budget: float = 4e9,
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
        Passes over ``batches`` of an iterative solver; an exact solution takes as many as it needs.
    max_steps : int, optional
        The most steps of an iterative solver in all; 1000 for matrices.
    tol : float, optional
        Stop an iterative solver once the largest residual, a running mean over looks 50 steps apart, is below this.
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
    if not isinstance(problem, Problem):
        raise ValueError(f"problem={problem!r}: give a problem, for instance es.problems.pca(), called")
    if isinstance(solver, type):
        raise ValueError(f"solver is the class {solver.__name__}: give an object, {solver.__name__}(...)")
    if which not in WHICH:
        raise ValueError(f"which={which!r}: give one of {', '.join(map(repr, WHICH))}")
    if not (isinstance(k, int | np.integer) and k >= 1):
        raise ValueError(f"k={k!r}: give a whole number of at least 1")
    if max_steps is not None and not (isinstance(max_steps, int | np.integer) and max_steps >= 1):
        raise ValueError(f"max_steps={max_steps!r}: give a whole number of at least 1, or None")
    if not isinstance(random_state, int | np.integer):
        raise ValueError(f"random_state={random_state!r}: give a whole number, the seed")
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
    if tol is not None and isinstance(solver, RSGPlus):
        raise ValueError("tol: RSGPlus has no residual to stop on; give max_epochs or max_steps")
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
        if hasattr(batches, "shape"):
            raise ValueError("batches is one array: give an iterable of batches, [X] for a single one")
        self._opened: Iterator[Tree] | None = iter(batches)
        self.source, self.repeatable, self.n = batches, self._opened is not batches, 0
        head = next(self._opened, None)
        if head is None:
            raise ValueError("batches is empty: give at least one batch")
        self.first = problem.accept(head)
        self._head = self.first
        self.template = problem.template(self.first)

    def __iter__(self) -> Iterator[Tree]:
        if self._opened is None:
            return map(self._checked, self.source)
        head, opened = [self._head], self._opened
        self._head = self._opened = None
        self.n += rows.n_rows(head[0])
        return itertools.chain(head, map(self._checked, opened))

    def _checked(self, raw: Tree) -> Tree:
        batch = self.problem.accept(raw)
        seen = self.problem.template(batch)
        first, now = (jax.tree.map(lambda leaf: leaf.shape, t) for t in (self.template, seen))
        if first != now:
            raise ValueError(f"the stream changed shape: its first rows were of shape {first}, these are of {now}")
        self.n += rows.n_rows(batch)
        return batch


def _chosen(solver: Any, d: int, problem: Problem, budget: float) -> Any:
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


def _solve_exact(problem: Problem, stream: _Stream, k: int, solver: Exact, which: str) -> Result:
    n = steps = passes = 0
    state: Any = solver.init(problem, stream.first, k, not stream.needless and stream.repeatable)
    after: Any = state
    while after is not None and not stream.needless:
        state, passes = after, passes + 1
        before = stream.n
        for batch in stream:
            state = solver.step(problem, state, batch)
            steps += 1
        _check_again(stream, before)
        n = stream.n // passes
        after = solver.next_pass(state)
    _check_rows(problem, n, k, problem.fewest_rows(False))
    solved, V, info = solver.solve(problem, state, which)
    d, rank = trees.size(state.template), sum(solved.ranks)
    message = (
        info.message if stream.needless else f"solved exactly from {n} rows in {passes} pass" + "es" * (passes > 1)
    )
    if rank < d:
        message += f"; B has rank {rank} of {d}, and the solution lies in its range"
    return Result(solved.eigenvalues, V, info.converged, message, info.residuals, steps, n, solver, [], state)


def _check_again(stream: _Stream, before: int) -> None:
    if stream.n == before:
        raise ValueError("batches gave nothing when read again: give a list, or an iterable that starts anew each time")


def _check_rows(problem: Problem, n: int, k: int, least: int) -> None:
    if n < least:
        raise ValueError(f"the stream held too few rows: at least {least} are needed")
    if problem.rank_of_rows and n < k:
        raise ValueError(f"the stream held {n} rows, fewer than k={k}: give more rows, or a smaller k")


# The state is the loop's own: its memory serves the next.
@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(solver: Any, problem: Problem, state: Any, batch: Tree) -> Any:
    return solver.step(problem, state, batch)


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
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
    state = jax.tree.map(jnp.copy, solver.init(problem, stream.first, k, jax.random.key(random_state)))
    pilot = None if stream.needless else problem.pilot(stream.first)
    stream.first = None
    sign = -1 if isinstance(problem, Negated) else 1
    history: list[dict[str, Any]] = []
    n = steps = 0
    converged, message, averaged, info = False, "", None, None
    with _progress(verbose, max_steps) as show:
        for batch in _portions(solver, problem, stream, max_epochs, max_steps):
            if stream.needless:
                steps += batch
                state, info = _steps_without_data(solver, problem, state, batch)
            else:
                steps, n = steps + 1, stream.n
                batch = rows.to_device(batch if pilot is None else problem.less_pilot(batch, pilot))
                jax.block_until_ready(batch)
                state, info = _step(solver, problem, state, batch)
            # A batch may be most of what fits in memory: let go of it before the next is read.
            del batch
            if not stream.needless and steps > LOOK_EVERY // 10 and steps % LOOK_EVERY:
                continue
            worst = float(np.max(np.asarray(info.residuals)))
            averaged = worst if averaged is None else averaged + 0.5 * (worst - averaged)
            record = {"step": steps, "rows": n, "eigenvalues": sign * np.asarray(info.eigenvalues), "residual": worst}
            history.append(record)
            show(record)
            if bool(state.failed):
                break
            if tol is not None and averaged < tol:
                converged, message = True, f"every residual is below tol={tol:g} after {steps} steps"
                break
    _check_rows(problem, n, k, solver.fewest_rows(problem))
    rest = np.asarray(info.residuals) if info is not None else np.full(k, np.nan)
    if bool(state.failed):
        message = (
            f"a step near number {steps} was not finite; this is the last finite state: lower learning_rate, "
            "or look for NaN in the data"
        )
    elif not message:
        source = f"{steps} steps on the matrices" if stream.needless else f"{n} rows in {steps} batches"
        message = f"stopped after {source}, with a residual of {rest.max():.2g}"
        message += "" if stream.needless else " on the last batch, sampling noise included"
        message += f" (tol={tol:g} was not reached)" if tol is not None else ""
        if rest.max() > FAR and sign > 0:
            message += (
                "; near 1, so these are no eigenvectors: lower learning_rate, scale the features alike or use Adam"
            )
    lam, V = solver.eigenpairs(problem, state)
    return Result(sign * np.asarray(lam), V, converged, message, rest, steps, n, solver, history, state)


def _portions(solver: Any, problem: Problem, stream: _Stream, max_epochs: int, max_steps: int | None) -> Iterator[Tree]:
    """What each compiled call takes: a batch for one step, or a number of steps that need no data."""
    if stream.needless:
        left = 1000 if max_steps is None else max_steps
        return (min(LOOK_EVERY, left - start) for start in range(0, left, LOOK_EVERY))
    if max_epochs > 1 and not stream.repeatable:
        raise ValueError(f"max_epochs={max_epochs}, but batches can be read once only: give a list or a re-iterable")

    def epochs() -> Iterator[Iterator[Tree]]:
        for _ in range(max_epochs):
            before = stream.n
            yield _LargeEnough(stream, solver.fewest_rows(problem))
            _check_again(stream, before)

    return itertools.islice(itertools.chain.from_iterable(epochs()), max_steps)


class _LargeEnough:
    """Batches of at least ``least`` rows, each as soon as it is there.

    A smaller one, as the last of a stream may be, is filled up with the last rows before it; at the very start it waits
    for more. An iterator and not a generator, whose frame would keep the batch that is being used alive.
    """

    def __init__(self, batches: Iterable[Tree], least: int):
        self.batches, self.least, self.before = iter(batches), least, None

    def __iter__(self) -> _LargeEnough:
        return self

    def __next__(self) -> Tree:
        for batch in self.batches:
            if rows.n_rows(batch) < self.least and self.before is not None:
                batch = rows.join(self.before, batch)
            self.before = rows.last(batch, self.least)
            if rows.n_rows(batch) >= self.least:
                return batch
        raise StopIteration


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

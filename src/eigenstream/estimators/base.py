"""What every estimator shares: settings to a problem and a run, a run's result to attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from eigenstream import host, models, rows, trees
from eigenstream.checkpoint import Place
from eigenstream.engines import Playing
from eigenstream.moments import BLOCK_ROWS
from eigenstream.problems.base import Problem, check_finite
from eigenstream.result import Result
from eigenstream.run import Callback, Run
from eigenstream.solvers.exact import Exact
from eigenstream.streams.batching import Batches

Tree = Any

#: The parameters that every estimator takes, for numpydoc.
SHARED = """solver : str or solver
        ``"auto"`` (exact where that fits ``memory_budget`` and is faster, else the game), ``"exact"``, ``"game"``,
        ``"paper"`` and so on, or an object of `eigenstream.solvers` with its settings.
    batch_size : int
        Rows in a step of an iterative solver.
    max_epochs : int
        The most passes of an iterative solver over the data.
    tol : float, optional
        The residual at which an iterative solver stops; of ``"game"``, its estimate of what the sum of the leading
        eigenvalues still lacks.
    memory_budget : float
        Bytes that ``"auto"`` may spend on exact statistics.
    precision : {"float32", "tf32", "bf16"}, optional
        Of a streaming solver's products on a device; its state is in float32. Left out: JAX's own setting.
    mesh : str, mesh or None
        Devices to share a streaming solver's work out over: ``"auto"`` for all of them, or for instance
        ``"data=2,feature=4"``.
    half_life : float, optional
        Rows after which a row counts half, for a stream that drifts.
    random_state : int, RandomState or None
        Seed of the order of rows and of the first players.
    verbose : bool
        Whether to show progress, on a terminal."""

#: The attributes that every estimator learns.
LEARNED = """solver_ : solver
        What was used.
    n_samples_seen_, n_iter_ : int
        Rows read, and steps or blocks taken.
    converged_ : bool
        Whether the answer is exact, its residual fell under ``tol``, or the game judges itself near its end.
    message_ : str
        How the run ended, in words.
    residuals_ : (k,) array
        ``‖A v - λ B v‖``, relative to its parts.
    heldout_, heldout_error_ : (k,) arrays or None
        Of the game: eigenvalues on rows before they were learned from, and their standard errors.
    history_ : list of dict
        The looks at an iterative solver."""


#: Rows that are measured after a run that stopped before its end: a variance to within a percent.
STOPPED_ROWS = 2**15
#: Attributes that tell of the input and not of the solution.
INPUT = ("n_features_in_", "feature_names_in_", "classes_", "single_target_")


def documented(cls: type) -> type:
    """Fill the shared parameters and attributes into a docstring."""
    text = cls.__doc__ or ""
    cls.__doc__ = text.replace("{shared}", SHARED).replace("{learned}", LEARNED)
    return cls


class StreamEstimator(BaseEstimator):
    """The shell around a problem, a solver and the one loop.

    After `partial_fit` the solution is worked out when an attribute of it is first looked at, so that a batch costs no
    more than its sums.
    """

    n_components: int | None
    solver: Any
    batch_size: int
    max_epochs: int
    tol: float | None
    memory_budget: float
    precision: str | None
    mesh: Any
    half_life: float | None
    random_state: Any
    verbose: bool
    which: str = "largest"
    #: Whether a batch is one array, and a pair of them a mistake.
    _single_view = False

    # What an estimator adds.

    def _problem(self) -> Problem:
        """The problem that its settings pose."""
        raise NotImplementedError

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        """Set the learned attributes; ``again`` gives rows to measure what a streaming solver does not keep."""
        raise NotImplementedError

    def _wanted(self) -> int | None:
        """How many eigenpairs to solve for."""
        return self.n_components

    # What a user calls.

    def fit_stream(
        self,
        batches: Iterable[Tree],
        *,
        callbacks: Iterable[Callback] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: float = 60.0,
    ) -> Any:
        """Learn from an iterable of batches: tuples of views, or arrays where there is one.

        Parameters
        ----------
        batches : iterable
            Of arrays, sparse matrices or tensors: a list, a generator, `eigenstream.streams.batches`, a PyTorch
            ``DataLoader``.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        return self._fit_batches(batches, self._place(folder, resume, checkpoint_every), callbacks)

    def save(self, folder: str | Path) -> None:
        """Write the fitted model to ``folder``: ``model.safetensors`` and ``config.json``.

        `eigenstream.load` reads it back. What `partial_fit` would go on from is not in it.
        """
        check_is_fitted(self)
        models.save(self, Path(folder))

    # The glue.

    def _place(self, folder: str | Path | None, resume: bool, every: float) -> Place | None:
        if folder is None:
            return None
        settings = {name: value for name, value in self.get_params().items() if name not in ("verbose", "mesh")}
        return Place(Path(folder), {"estimator": type(self).__name__, **settings}, resume, every)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _forget(self) -> None:
        for name in [name for name in vars(self) if name.endswith("_") or name in ("_run", "_stale")]:
            delattr(self, name)

    def _new_run(self, seed: int) -> Run:
        return Run(
            self._problem(),
            self._wanted(),
            self.solver,
            which=self.which,
            memory_budget=self.memory_budget,
            precision=self.precision,
            mesh=self.mesh,
            half_life=self.half_life,
            random_state=seed,
            for_estimator=True,
            single_view=self._single_view,
        )

    def _batches(self, *views: Any) -> Batches:
        return Batches(views, self.batch_size, True, self._seed())

    def _fit_batches(
        self,
        batches: Iterable[Tree] | None,
        place: Place | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> Any:
        run = self._new_run(self._seed())
        result = run.through(
            batches, self.max_epochs, tol=self.tol, verbose=self.verbose, callbacks=callbacks, place=place
        )
        self._run = run
        once = batches is None or isinstance(batches, Iterator)
        self._learn(result, run.recent if once else _to_measure(batches, run))
        return self

    def _take(self, batch: Tree) -> Any:
        """Learn from a batch; the solution can wait."""
        run = vars(self).get("_run")
        if run is None:
            if "solver_" in vars(self):
                raise ValueError(
                    "this model was loaded, without the sums that partial_fit would go on from: fit all rows anew, by "
                    "fit_stream(..., folder=...) if that is to go on with resume=True"
                )
            run = self._new_run(self._seed())
            run.begin(run.problem.accept(batch))
        run.go_on()
        check_finite(batch)
        for piece in host.pieces(batch, BLOCK_ROWS if isinstance(run.solver, Exact) else self.batch_size):
            run.take(piece)
        self._run, self._stale = run, True
        for name in self._solution():
            delattr(self, name)
        return self

    def _solution(self) -> list[str]:
        return [name for name in vars(self) if name.endswith("_") and name not in INPUT]

    def _learn(self, result: Result, again: Iterable[Tree]) -> None:
        self._stale = False
        self.solver_ = result.solver
        self.n_samples_seen_, self.n_iter_ = result.n_samples_seen, max(result.n_iter, 1)
        self.converged_, self.message_ = result.converged, result.message
        self.residuals_, self.history_ = result.residuals, result.history
        self.heldout_, self.heldout_error_ = result.heldout, result.heldout_error
        self.eigenvalues_ = np.asarray(result.eigenvalues)
        self._publish(result, again)
        if isinstance(self._run.engine, Playing) and self._run.engine.failed:
            warnings.warn(self.message_, ConvergenceWarning, stacklevel=4)

    def __getattr__(self, name: str) -> Any:
        # Python asks here only for what is not there: a solution that nobody has looked at yet.
        if name.endswith("_") and name not in INPUT and not name.startswith("_") and vars(self).get("_stale"):
            self._learn(self._run.result(), self._run.recent)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __sklearn_is_fitted__(self) -> bool:
        return "_stale" in vars(self) or "solver_" in vars(self)

    def _checked(self, X: Any, reset: bool, fewest: int) -> Any:
        """At least ``fewest`` rows as scikit-learn checks them; whether they are finite is seen as they are read."""
        if isinstance(X, str | Path):
            raise ValueError(f"X is a path: files go to fit_stream(es.streams.batches({str(X)!r}))")
        options: dict[str, Any] = {"accept_sparse": "csr", "dtype": "numeric", "ensure_all_finite": False}
        return validate_data(self, X, reset=reset, ensure_min_samples=fewest, **options)

    def _checked_new(self, X: Any) -> Any:
        """Rows to apply a fitted model to."""
        if isinstance(X, str | Path):
            raise ValueError(f"X is a path: give an array, of a .npy file np.load({str(X)!r}, mmap_mode='r')")
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype="numeric")
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)


def projected(X: Any, W: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``(X - mean) W`` in blocks of rows, without a centred copy of them all; sparse rows stay sparse."""
    dtype = X.dtype if X.dtype in (np.float32, np.float64) else np.float64
    W, mean = W.astype(dtype), mean.astype(dtype)
    if scipy.sparse.issparse(X):
        return np.asarray(X @ W - mean @ W)
    out = np.empty((X.shape[0], W.shape[1]), dtype)
    for lo in range(0, len(X), BLOCK_ROWS):
        out[lo : lo + BLOCK_ROWS] = (X[lo : lo + BLOCK_ROWS] - mean) @ W
    return out


def flat(tree: Tree) -> np.ndarray:
    """Players of one view, whatever its leaves, as ``(d, k)`` columns in float64."""
    return np.ascontiguousarray(trees.columns(tree), np.float64)


def _to_measure(batches: Any, run: Run) -> Iterator[Tree]:
    """All rows once more in large blocks; of a run that stopped early, as many as tell enough."""
    if run.stopped:
        n = 0
        for batch in map(run.problem.accept, batches):
            yield batch
            n += rows.n_rows(batch)
            if n >= STOPPED_ROWS:
                return
    else:
        yield from map(run.problem.accept, batches.in_order(BLOCK_ROWS) if isinstance(batches, Batches) else batches)

"""What every estimator shares: settings to a problem and a run, a run's result to attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import BLOCK_ROWS
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import check_finite
from eigenstream.run.checkpoint import RunFolder
from eigenstream.run.loop import Callback, Run
from eigenstream.run.result import Result, Status
from eigenstream.streams.batching import Batches

T = TypeVar("T")

#: The parameters that every estimator takes, for numpydoc.
SHARED = """solver : str or solver
        ``"auto"`` takes ``"exact"`` if its sums fit ``memory_budget`` and are faster, else ``"game"``. Others are
        ``"paper"`` and so on, or an object of `eigenstream.solvers` with its settings.
    batch_size : int
        Rows in a step of an iterative solver.
    max_epochs : int
        The most passes of an iterative solver over the data.
    tol : float, optional
        Stop an iterative solver below this residual; ``"game"``, below this estimated shortfall of the sum of the
        leading eigenvalues.
    memory_budget : float
        Bytes that ``"auto"`` may spend on exact sums.
    precision : {"float32", "tf32", "bf16"}, optional
        Precision of a streaming solver's products on a device; its state is in float32. Default: JAX's own setting.
    mesh : str, mesh or None
        Devices that share a streaming solver's work: ``"auto"`` for all, or for instance ``"data=2,feature=4"``.
    half_life : float, optional
        Rows after which the weight of a row has halved, for a stream that drifts.
    random_state : int, RandomState or None
        Seed of the order of rows and of the first players.
    verbose : bool
        Whether to show progress on a terminal."""

#: The attributes that every estimator learns.
LEARNED = """solver_ : solver
        The solver that was used.
    n_samples_seen_, n_iter_ : int
        Rows read, and steps or blocks taken.
    converged_ : bool
        Whether the answer is exact, the residual fell below ``tol``, or the game estimates a shortfall below 1%.
    status_ : str
        How the run ended: solved, converged, not converged, stopped, interrupted or failed.
    message_ : str
        The same in words.
    residuals_ : (k,) array
        ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)``.
    heldout_, heldout_error_ : (k,) arrays or None
        Of the game: eigenvalues measured on each batch before it was learned from, and their standard errors; NaN if
        the whole stream fitted in memory.
    history_ : list of dict
        Snapshots of an iterative solver."""


#: Rows that are read again after a run that stopped early: they give variances to within a percent.
STOPPED_ROWS = 2**15
#: Attributes that describe the input and not the solution.
INPUT = ("n_features_in_", "feature_names_in_", "classes_", "single_target_")


@dataclass_transform(eq_default=False, kw_only_default=True)
def estimator(cls: type[T]) -> type[T]:
    """Make the annotated settings arguments of ``__init__``, and fill the shared ones into the docstring."""
    cls.__doc__ = (cls.__doc__ or "").replace("{shared}", SHARED).replace("{learned}", LEARNED)
    # Only n_components, and n_clusters, may be given by position.
    return dataclass(eq=False, repr=False)(cls)


@estimator
class StreamEstimator(BaseEstimator):
    """The shell around a problem, a solver and the loop.

    After `partial_fit` the solution is computed when one of its attributes is first read, so a batch costs no more than
    its sums.
    """

    n_components: int | None = None
    _: KW_ONLY
    solver: Any = "auto"
    batch_size: int = 100
    max_epochs: int = 1
    tol: float | None = None
    memory_budget: float = 4e9
    precision: str | None = None
    mesh: Any = None
    half_life: float | None = None
    random_state: Any = 0
    verbose: bool = False

    #: From which end of the spectrum; a setting of those estimators that offer it.
    which = "largest"
    #: Whether a batch is one array, and a pair of them a mistake.
    _single_view: ClassVar[bool] = False

    # What an estimator adds.

    def _problem(self) -> Problem:
        """The problem with these settings."""
        raise NotImplementedError

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        """Set the learned attributes; ``again`` gives rows to measure what a streaming solver does not sum."""
        raise NotImplementedError

    def _wanted(self) -> int | None:
        """The number of eigenpairs to solve for."""
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
        return self._fit_batches(batches, self._run_folder(folder, resume, checkpoint_every), callbacks)

    def save(self, folder: str | Path) -> None:
        """Write the fitted model to ``folder``: ``model.safetensors`` and ``config.json``.

        `eigenstream.load` reads it back. The sums that `partial_fit` would continue from are not written.
        """
        from eigenstream.estimators import model_files

        check_is_fitted(self)
        model_files.save(self, Path(folder))

    # The glue.

    def _run_folder(self, folder: str | Path | None, resume: bool, every: float) -> RunFolder | None:
        if folder is None:
            return None
        settings = {name: value for name, value in self.get_params().items() if name not in ("verbose", "mesh")}
        return RunFolder(Path(folder), {"estimator": type(self).__name__, **settings}, resume, every)

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
        self, batches: Iterable[Tree] | None, folder: RunFolder | None = None, callbacks: Iterable[Callback] = ()
    ) -> Any:
        run = self._new_run(self._seed())
        options: dict[str, Any] = {"tol": self.tol, "verbose": self.verbose, "callbacks": callbacks, "folder": folder}
        result = run.through(batches, self.max_epochs, **options)
        self._run = run
        once = batches is None or isinstance(batches, Iterator)
        self._learn(result, run.recent if once else _to_measure(batches, run))
        return self

    def _take(self, batch: Tree) -> Any:
        """Learn from a batch; the solution is computed later."""
        run = vars(self).get("_run")
        if run is None:
            if "solver_" in vars(self):
                raise ValueError(
                    "this model was loaded, without the sums that partial_fit would continue from: fit all rows anew, "
                    "with fit_stream(..., folder=...) if more rows are to follow by resume=True"
                )
            run = self._new_run(self._seed())
            run.begin(run.problem.accept(batch))
        run.reopen()
        check_finite(batch)
        for piece in host_batches.pieces(batch, BLOCK_ROWS if run.engine.sums_rows else self.batch_size):
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
        self.converged_, self.status_, self.message_ = result.converged, str(result.status), result.message
        self.residuals_, self.history_ = result.residuals, result.history
        self.heldout_, self.heldout_error_ = result.heldout, result.heldout_error
        self.eigenvalues_ = np.asarray(result.eigenvalues)
        self._publish(result, again)
        if result.status is Status.FAILED:
            warnings.warn(self.message_, ConvergenceWarning, stacklevel=4)

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that are missing: after partial_fit, those of a solution not computed yet.
        if name.endswith("_") and name not in INPUT and not name.startswith("_") and vars(self).get("_stale"):
            self._learn(self._run.result(), self._run.recent)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __sklearn_is_fitted__(self) -> bool:
        return "_stale" in vars(self) or "solver_" in vars(self)

    def _checked(self, X: Any, reset: bool, fewest: int) -> Any:
        """At least ``fewest`` rows, checked by scikit-learn; finite values are checked as the rows are read."""
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
    """``(X - mean) W`` in blocks of rows, without a centred copy of all; sparse rows stay sparse."""
    dtype = X.dtype if X.dtype in (np.float32, np.float64) else np.float64
    W, mean = W.astype(dtype), mean.astype(dtype)
    if scipy.sparse.issparse(X):
        return np.asarray(X @ W - mean @ W)
    out = np.empty((X.shape[0], W.shape[1]), dtype)
    for lo in range(0, len(X), BLOCK_ROWS):
        out[lo : lo + BLOCK_ROWS] = (X[lo : lo + BLOCK_ROWS] - mean) @ W
    return out


def flat(tree: Tree) -> np.ndarray:
    """The players of one view as ``(d, k)`` columns in float64."""
    return np.ascontiguousarray(players.to_matrix(tree), np.float64)


def _to_measure(batches: Any, run: Run) -> Iterator[Tree]:
    """All rows once more, in large blocks; after a run that stopped early, STOPPED_ROWS of them."""
    if run.stop is not None:
        n = 0
        for batch in map(run.problem.accept, batches):
            yield batch
            n += views.n_rows(batch)
            if n >= STOPPED_ROWS:
                return
    else:
        yield from map(run.problem.accept, batches.in_order(BLOCK_ROWS) if isinstance(batches, Batches) else batches)

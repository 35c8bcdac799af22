"""The base of all estimators: settings to a problem and a run, its result to attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from eigenstream.core import host_batches, players, views
from eigenstream.core.moments import BLOCK_ROWS
from eigenstream.core.types import Tree
from eigenstream.estimators import dask_rows, merging, model_files
from eigenstream.problems.base import Problem
from eigenstream.problems.checks import check_finite
from eigenstream.run.checkpoint import RunFolder
from eigenstream.run.loop import Callback, Run
from eigenstream.run.result import Result, Status
from eigenstream.streams.batching import Batches

T = TypeVar("T")

#: Products of means of up to NEAR deviations lose at most a digit, and of MANY numbers a centred copy takes long.
NEAR, MANY = 10, 2**24

#: Parts of docstrings that several estimators share.
DOCS = {
    "{shared}": """solver : str or solver
        ``"auto"`` takes ``"exact"`` if its sums fit ``memory_budget``, else ``"game"``. Others are ``"paper"`` and so
        on, or an object of `eigenstream.solvers` with its settings.
    batch_size : int
        Rows per step of an iterative solver.
    max_epochs : int, optional
        Maximum number of passes of an iterative solver over the data. Default: one; of ``"game"`` as many as it needs
        to converge, at most ten, if the data can be read again.
    tol : float, optional
        Stop an iterative solver below this residual; ``"game"``, below this estimated shortfall of the sum of the
        leading eigenvalues.
    memory_budget : float, optional
        Bytes that ``"auto"`` allows exact sums, whose solution takes about as much again; else those of the state of
        ``"game"``, and of rows that it may read or keep until their eigenproblem is solved. Default: half of what is
        free on that device, host memory for a CPU.
    precision : {"float32", "tf32", "bf16"}, optional
        Precision of a streaming solver's products on a device; its state is in float32, and so are products with rows
        that ``"game"`` keeps. Default: JAX's own setting.
    mesh : str, mesh or None
        Devices that share the work: ``"auto"`` for all, or for instance ``"data=2,feature=4"``.
    half_life : float, optional
        Number of rows after which the weight of a row has halved, for a stream that drifts.
    random_state : int, RandomState or None
        Seed of the order of rows and of the first players.
    verbose : bool
        Whether to show progress on a terminal.""",
    "{learned}": """solver_ : solver
        The solver that was used.
    reason_ : str
        Why: how much memory the sums take, and how much they may take.
    n_samples_seen_, n_iter_ : int
        Number of rows read, and of steps or blocks taken.
    converged_ : bool
        Whether the solution is exact, the residual fell below ``tol``, or the game estimates a shortfall below 1%.
    status_, message_ : str
        How the run ended (solved, converged, not converged, stopped, interrupted or failed), and why.
    residuals_ : (k,) array
        ``‖A v - λ B v‖ / (‖A‖ ‖v‖ + |λ| ‖B v‖)``.
    heldout_, heldout_error_ : (k,) arrays or None
        Of the game: eigenvalues measured on each batch before it was learned from, and their standard errors.
    shortfall_ : float or None
        Of the game: by how much the sum of the eigenvalues is estimated to fall short of its limit, relative to it.
    noise_floors_ : (k,) array or None
        Of the game: the preconditioned residuals that sampling noise alone would cause.
    history_ : list of dict
        Snapshots of an iterative solver.""",
    "{pair}": """x_mean_, y_mean_ : arrays
    single_target_ : bool
        Whether ``y`` was a vector, so that `predict` gives one.
    slopes_, intercept_ : (k, dy) and (dy,) arrays
        Regression of ``y`` on the scores of ``X``.
    coef_ : (dy, dx) array
        Coefficients of `predict`.""",
    "{graph}": """affinity : {"nearest_neighbors", "rbf", "precomputed"}, another scikit-learn kernel, or a function
        How to make a graph of the rows. ``"precomputed"``: ``X`` is its symmetric matrix of weights, dense or sparse.
    gamma : float, optional
        Coefficient of the kernel. None: one over the number of features.
    n_neighbors : int, optional
        Number of nearest neighbours. None: a tenth of the rows.
    ridge : float
        Added to the degrees, relative to their mean: needed if a node has no edges.""",
}

#: Number of rows that are read again after a run that stopped early: enough for variances to within a percent.
STOPPED_ROWS = 2**15
#: Types that rows are projected in; others are converted to the first.
FLOATS = [np.float64, np.float32]
#: Attributes that describe the input and not the solution.
INPUT = ("n_features_in_", "feature_names_in_", "classes_", "single_target_")


@dataclass_transform(eq_default=False, kw_only_default=True)
def estimator(cls: type[T]) -> type[T]:
    """Make a dataclass of an estimator, and fill the shared parts into its docstring."""
    for name, text in DOCS.items():
        cls.__doc__ = (cls.__doc__ or "").replace(name, text)
    return dataclass(eq=False, repr=False)(cls)


@estimator
class StreamEstimator(BaseEstimator):
    """Fit a problem with a solver. After `partial_fit` the solution is computed when an attribute is first read."""

    n_components: int | None = None
    _: KW_ONLY
    solver: Any = "auto"
    batch_size: int = 100
    max_epochs: int | None = None
    tol: float | None = None
    memory_budget: float | None = None
    precision: str | None = None
    mesh: Any = None
    half_life: float | None = None
    random_state: Any = 0
    verbose: bool = False

    #: Which end of the spectrum; some estimators make it a setting.
    which = "largest"
    #: Whether a batch is one array, so that a pair of arrays is a mistake.
    _single_view: ClassVar[bool] = False

    def _problem(self) -> Problem:
        """The problem with these settings."""
        raise NotImplementedError

    def _publish(self, result: Result, again: Iterable[Tree]) -> None:
        """Set the learned attributes; ``again`` gives the rows once more, for scores after a streaming solver."""
        raise NotImplementedError

    def _wanted(self) -> int | None:
        """The number of eigenpairs to solve for."""
        return self.n_components

    def fit_stream(
        self,
        batches: Iterable[Tree],
        *,
        callbacks: Iterable[Callback] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: float = 60.0,
    ) -> Any:
        """Learn from an iterable of batches: arrays, or tuples of views.

        Parameters
        ----------
        batches : iterable
            Arrays, sparse matrices or tensors in a list, a generator, `eigenstream.streams.batches`, a ``DataLoader``.
        callbacks, folder, resume, checkpoint_every
            As in `eigenstream.solve`.
        """
        self._forget()
        return self._fit_batches(batches, callbacks, folder=folder, resume=resume, checkpoint_every=checkpoint_every)

    def save(self, folder: str | Path, *, statistics: bool = False) -> None:
        """Write the fitted model to ``folder`` for `eigenstream.load`.

        Parameters
        ----------
        folder : str or Path
        statistics : bool
            Whether to write the exact solver's sums too, for `partial_fit` and `merge` of the loaded model. They take
            8 bytes for each entry of the covariance.
        """
        check_is_fitted(self)
        model_files.save(self, Path(folder), statistics)

    def merge(self, *others: Any) -> Any:
        """The model of this model's rows and those of ``others``, as by `eigenstream.merge`; no model changes."""
        return merging.merge([self, *others])

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _input(self) -> dict[str, Any]:
        """The attributes that describe the input."""
        return {name: value for name, value in vars(self).items() if name in INPUT}

    def _forget(self) -> None:
        for name in [name for name in vars(self) if name.endswith("_") or name in ("_run", "_stale")]:
            del self.__dict__[name]

    def _new_run(self, problem: Problem) -> Run:
        names = ("which", "memory_budget", "precision", "mesh", "half_life")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options |= {"random_state": self._seed(), "for_estimator": True, "single_view": self._single_view}
        return Run(problem, self._wanted(), self.solver, **options)

    def _batches(self, *views: Any) -> Batches:
        return Batches(views, self.batch_size, True, self._seed())

    def _run_folder(self, folder: Any = None, resume: bool = False, checkpoint_every: float = 60.0) -> RunFolder | None:
        if folder is None:
            return None
        settings = {name: value for name, value in self.get_params().items() if name not in ("verbose", "mesh")}
        return RunFolder(Path(folder), {"estimator": type(self).__name__, **settings}, resume, checkpoint_every)

    def _fit_batches(self, batches: Any, callbacks: Any = (), problem: Any = None, **checkpoints: Any) -> Any:
        run = self._new_run(self._problem() if problem is None else problem)
        options: dict[str, Any] = {"callbacks": callbacks, "folder": self._run_folder(**checkpoints)}
        result = run.through(batches, self.max_epochs, tol=self.tol, verbose=self.verbose, **options)
        self._run = run
        once = batches is None or isinstance(batches, Iterator)
        self._learn(result, run.recent if once else _to_measure(batches, run))
        return self

    def _take(self, batch: Tree) -> Any:
        """Learn from a batch; the solution is computed later."""
        run = vars(self).get("_run")
        if run is None and "solver_" in vars(self):
            raise ValueError(
                "this model was loaded, without the sums that partial_fit would continue from: save it with "
                "statistics=True, or fit all rows anew"
            )
        if run is None:
            run = self._new_run(self._problem())
            run.begin(run.problem.accept(batch))
        elif not run.engine.takes_more_rows:
            raise ValueError(
                "fit subtracted the mean of its own rows, which more rows would change: call partial_fit on a new "
                f"{type(self).__name__}, from the first row on"
            )
        run.reopen()
        check_finite(batch)
        for piece in host_batches.pieces(batch, BLOCK_ROWS if run.engine.sums_rows else self.batch_size):
            run.take(piece)
        self._run, self._stale = run, True
        for name in [name for name in vars(self) if name.endswith("_") and name not in INPUT]:
            del self.__dict__[name]
        return self

    def _learn(self, result: Result, again: Iterable[Tree]) -> None:
        self._stale = False
        self.solver_, self.reason_ = result.solver, getattr(vars(self).get("_run"), "reason", "as given")
        self.n_samples_seen_, self.n_iter_ = result.n_samples_seen, max(result.n_iter, 1)
        self.converged_, self.status_, self.message_ = result.converged, str(result.status), result.message
        self.residuals_, self.history_ = result.residuals, result.history
        self.heldout_, self.heldout_error_ = result.heldout, result.heldout_error
        self.shortfall_, self.noise_floors_ = result.shortfall, result.noise_floors
        self.eigenvalues_ = np.asarray(result.eigenvalues)
        self._publish(result, again)
        if result.status is Status.FAILED or (result.status is Status.NOT_CONVERGED and result.shortfall is not None):
            warnings.warn(self.message_, ConvergenceWarning, stacklevel=4)

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: after partial_fit, those of the solution.
        if name.endswith("_") and name not in INPUT and not name.startswith("_") and vars(self).get("_stale"):
            self._learn(self._run.result(), self._run.recent)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __sklearn_is_fitted__(self) -> bool:
        return "_stale" in vars(self) or "solver_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def _checked(self, X: Any, fewest: int) -> Any:
        """At least ``fewest`` rows to learn from."""
        if isinstance(X, str | Path):
            raise ValueError(f"X is a path: files go to fit_stream(es.streams.batches({str(X)!r}))")
        reset = "_run" not in vars(self)
        return validate_data(self, X, reset=reset, ensure_min_samples=fewest, **row_options(to_fit=True))

    def _checked_new(self, X: Any) -> Any:
        """Rows to apply the fitted model to."""
        check_is_fitted(self)
        if isinstance(X, str | Path):
            raise ValueError(f"X is a path: give an array; for a .npy file, np.load({str(X)!r}, mmap_mode='r')")
        return validate_data(self, X, reset=False, **row_options(to_fit=False))


class OneViewMixin(ClassNamePrefixFeaturesOutMixin, TransformerMixin):
    """The part that PCA and ICA share: components of the rows ``X``."""

    _single_view = True

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn from ``X``, an array, memory map, sparse matrix or Dask collection of rows by features."""
        self._forget()
        if dask_rows.is_dask(X):
            return dask_rows.fit(self, X)
        return self._fit_batches(self._batches(self._checked(X, 2)))

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Learn from more rows, one or many."""
        return self._take(self._checked(X, 1))

    def _set_components(self, W: np.ndarray, mean: np.ndarray) -> None:
        self.components_ = np.ascontiguousarray(W.T)
        self.mean_ = mean if self.center else np.zeros_like(mean)
        self.n_features_in_, self.n_components_ = W.shape


def row_options(to_fit: bool) -> dict[str, Any]:
    """Options of scikit-learn's checks. NaN and infinity in rows to fit are looked for when the rows are read."""
    return {"accept_sparse": "csr", "dtype": "numeric" if to_fit else FLOATS, "ensure_all_finite": not to_fit}


def projected(X: Any, W: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``(X - mean) W`` without a centred copy of all rows; sparse rows stay sparse."""
    W, mean = np.ascontiguousarray(W, X.dtype), mean.astype(X.dtype)
    if scipy.sparse.issparse(X):
        return np.asarray(X @ W - mean @ W)
    # BLAS may flag numbers that an earlier product left in its own memory. The rows were checked to be finite.
    with np.errstate(invalid="ignore"):
        if X.size > MANY:
            out = np.asarray(X @ W) - mean @ W
            # Products of large means would round the deviations away.
            if (np.abs(mean) @ np.abs(W) <= NEAR * out.std(0)).all():
                return out
        out = np.empty((X.shape[0], W.shape[1]), X.dtype)
        for lo in range(0, len(X), BLOCK_ROWS):
            out[lo : lo + BLOCK_ROWS] = (X[lo : lo + BLOCK_ROWS] - mean) @ W
    return out


def rebuilt(scores: Any, loadings: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Rows from their scores."""
    return check_array(scores, dtype=FLOATS) @ loadings.T + mean


def flat(tree: Tree) -> np.ndarray:
    """The players of one view as ``(d, k)`` columns in float64."""
    return np.ascontiguousarray(players.to_matrix(tree), np.float64)


def _to_measure(batches: Any, run: Run) -> Iterator[Tree]:
    """All rows once more, in large blocks; after a run that stopped early, the first STOPPED_ROWS."""
    if run.stop is None and isinstance(batches, Batches):
        batches = batches.in_order(BLOCK_ROWS)
    n = 0
    for batch in map(run.problem.accept, batches):
        yield batch
        n += views.n_rows(batch)
        if run.stop is not None and n >= STOPPED_ROWS:
            return

"""`eigenstream.solve`: the eigenpairs of a problem from a stream of batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem
from eigenstream.run.checkpoint import RunFolder
from eigenstream.run.loop import Callback, Run
from eigenstream.run.result import Result

__all__ = ["solve"]


def solve(
    problem: Problem,
    batches: Iterable[Tree] | None,
    k: int | None,
    solver: Any = "auto",
    *,
    which: str = "largest",
    max_epochs: int | None = 1,
    max_steps: int | None = None,
    tol: float | None = None,
    memory_budget: float | None = None,
    half_life: float | None = None,
    random_state: int = 0,
    precision: str | None = None,
    mesh: Any = None,
    verbose: bool = False,
    callbacks: Iterable[Callback] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: float = 60.0,
) -> Result:
    """Compute the ``k`` leading eigenpairs of a problem from a stream of batches.

    Parameters
    ----------
    problem : problem
        From `eigenstream.problems`.
    batches : iterable or None
        Batches in the problem's format, for instance from `eigenstream.streams.batches`. Several epochs need a list
        or another re-iterable. None for `eigenstream.problems.matrices`.
    k : int or None
        Number of eigenpairs; None for all.
    solver : str or solver
        ``"exact"`` sums the covariances and solves once; ``"game"`` is the accelerated game; ``"auto"`` chooses
        ``"exact"`` if its sums fit ``memory_budget``, else ``"game"``. Others: ``"paper"``, ``"smooth"``,
        ``"eckart_young"``, ``"sgha"``, ``"oja"``, ``"rsg+"``, or an object from `eigenstream.solvers`.
    which : {"largest", "smallest", "magnitude"}
        The end of the spectrum; ``"magnitude"`` with ``"exact"`` only.
    max_epochs : int or None
        Passes of an iterative solver over ``batches``. None: ``"game"`` reads until it has converged, at most ten
        times. The exact solver, and the game on rows that fit in memory, make as many as they need.
    max_steps : int, optional
        Maximal number of steps of an iterative solver. Default for matrices: 1000.
    tol : float, optional
        Stop an iterative solver when the largest residual, averaged over snapshots 50 steps apart, is below this. Stop
        ``"game"`` when its estimated relative shortfall of the eigenvalue sum is below this.
    memory_budget : float, optional
        Bytes that ``"auto"`` allows exact sums, whose solution takes about as much again; else those of the state of
        ``"game"``, and of rows that it may read or keep until their eigenproblem is solved. Default: half of what is
        free on that device, host memory for a CPU.
    half_life : float, optional
        A row's weight halves after this many further rows, for streams that drift; ``"game"`` and ``"exact"`` only.
    random_state : int
        Seed of the initial players.
    precision : {"float32", "tf32", "bf16"}, optional
        Precision of a streaming solver's products on a device; its state is float32, and so are products with rows
        that ``"game"`` keeps. Default: JAX's setting.
    mesh : str, mesh or None
        How to shard the work: ``"auto"``, features over all devices; ``"data=2,feature=4"``, rows over two
        and features over four; or a `jax.sharding.Mesh` with these axes. None: one device.
    verbose : bool
        Whether to show a progress bar on a terminal.
    callbacks : iterable of functions
        Called with the record of every snapshot; one that returns True stops the run.
    folder : path, optional
        Folder for ``checkpoints/`` and ``metrics.jsonl``.
    resume : bool
        Whether to continue from the newest checkpoint in ``folder``, if there is one. Give the same stream from its
        beginning: the result is then equal, bit for bit, to that of an uninterrupted run.
    checkpoint_every : float
        Seconds between checkpoints.

    Returns
    -------
    Result

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> X = np.random.default_rng(0).normal(size=(6000, 4)) * [4.0, 2.0, 1.0, 0.5]
    >>> batches = np.split(X, 60)
    >>> exact = es.solve(es.problems.pca(), batches, k=2)
    >>> streamed = es.solve(es.problems.pca(), batches, k=2, solver=es.solvers.Paper(learning_rate=0.03))
    >>> es.metrics.subspace_error(streamed.V, exact.V) < 1e-2
    True
    """
    common: Any = {"which": which, "half_life": half_life, "random_state": random_state, "precision": precision}
    limits: Any = {"max_epochs": max_epochs, "max_steps": max_steps, "tol": tol}
    settings = {"problem": problem, "solver": solver, "k": k, **common, **limits}
    run_folder = None if folder is None else RunFolder(Path(folder), settings, resume, checkpoint_every)
    run = Run(problem, k, solver, memory_budget=memory_budget, mesh=mesh, **common)
    return run.through(batches, **limits, verbose=verbose, callbacks=callbacks, folder=run_folder)

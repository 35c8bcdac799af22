"""`eigenstream.solve`: from a problem and a stream to eigenpairs, in one call."""

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
    max_epochs: int = 1,
    max_steps: int | None = None,
    tol: float | None = None,
    memory_budget: float = 4e9,
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
    """The ``k`` leading eigenpairs of a problem from a stream of batches.

    Parameters
    ----------
    problem : problem
        From `eigenstream.problems`.
    batches : iterable or None
        Batches as the problem takes them, for instance from `eigenstream.streams.batches`. A list or another iterable
        that starts anew each time serves several epochs. None for `eigenstream.problems.matrices`.
    k : int or None
        How many; None for all there are.
    solver : str or solver
        ``"exact"`` sums the statistics and solves once; ``"game"`` is the accelerated game; ``"auto"`` takes the first
        where it fits ``memory_budget`` and is the faster, else the second. ``"paper"``, ``"smooth"``,
        ``"eckart_young"``, ``"sgha"``, ``"oja"``, ``"rsg+"``, or one of `eigenstream.solvers` with its settings.
    which : {"largest", "smallest", "magnitude"}
        From which end of the spectrum; ``"magnitude"`` with ``"exact"`` only.
    max_epochs : int
        Passes over ``batches`` of an iterative solver; an exact solution takes as many as it needs.
    max_steps : int, optional
        The most steps of an iterative solver in all; 1000 for matrices.
    tol : float, optional
        Stop an iterative solver once the largest residual, a running mean over looks 50 steps apart, is below this;
        ``"game"``, once its estimate of how much the leading eigenvalues still lack, relative to their sum, is.
    memory_budget : float
        Bytes that ``"auto"`` may spend on exact statistics.
    half_life : float, optional
        Rows after which a row counts half, for a stream that drifts; of ``"game"`` and ``"exact"``.
    random_state : int
        Seed of the first players.
    precision : {"float32", "tf32", "bf16"}, optional
        Of a streaming solver's products on a device; its state is in float32. Left out: JAX's own setting.
    mesh : str, mesh or None
        Devices to share a streaming solver's work out over: ``"auto"``, features over all there are; rows over two and
        features over four, ``"data=2,feature=4"``; or a `jax.sharding.Mesh` of these axes. None: one device.
    verbose : bool
        Whether to show progress, on a terminal.
    callbacks : iterable of functions
        Called with the record of every look; one that returns True stops the run.
    folder : path, optional
        Where to keep ``checkpoints/`` and ``metrics.jsonl``.
    resume : bool
        Whether to go on from the newest checkpoint in ``folder``, if there is one, with the same stream from its
        beginning: the result is the same, bit for bit, as without the interruption.
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
    >>> game = es.solve(es.problems.pca(), batches, k=2, solver=es.solvers.Paper(learning_rate=0.03))
    >>> es.metrics.subspace_error(game.V, exact.V) < 1e-2
    True
    """
    common: dict[str, Any] = {"which": which, "half_life": half_life, "random_state": random_state}
    common["precision"] = precision
    run = Run(problem, k, solver, memory_budget=memory_budget, mesh=mesh, **common)
    settings = {"problem": problem, "solver": solver, "k": k, **common}
    settings |= {"max_epochs": max_epochs, "max_steps": max_steps, "tol": tol}
    kept = None if folder is None else RunFolder(Path(folder), settings, resume, checkpoint_every)
    return run.through(
        batches, max_epochs, max_steps=max_steps, tol=tol, verbose=verbose, callbacks=callbacks, folder=kept
    )

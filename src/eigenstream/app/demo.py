"""The demonstration: digits through CCA, the game beside the exact answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from eigenstream import datasets, metrics, problems, solvers
from eigenstream.app import report
from eigenstream.run import solve
from eigenstream.run.result import Result


def demo(out: Path, epochs: int) -> None:
    """Stream scikit-learn's digits through CCA of their upper and lower halves, and compare with the exact answer."""
    console, k, b = Console(), 4, 100
    upper, lower = datasets.digits_halves()
    order = np.random.default_rng(0).permutation(len(upper))
    upper, lower = upper[order], lower[order]
    batches = [(upper[i : i + b], lower[i : i + b]) for i in range(0, len(upper), b)]
    problem = problems.cca()
    steps = epochs * len(batches)
    console.print(f"CCA of {len(upper)} digits, upper against lower half, batches of {b}, k = {k}")

    seconds, exact = _timed(lambda: solve(problem, batches, k))
    rate = solvers.warmup_harmonic(base=2e-2, final=2e-3, warmup=steps // 20, total=steps + 1)
    game = solvers.Paper(learning_rate=rate, optimizer=optax.adam, averaging=0.1)
    game_seconds, streamed = _timed(
        lambda: solve(problem, batches, k, solver=game, max_epochs=epochs, max_steps=steps, verbose=True)
    )
    console.print(_table(exact, streamed))
    V = streamed.V
    captured = metrics.tcc(upper @ V[:32], lower @ V[32:], exact.eigenvalues)
    console.print(f"Exact: {exact.message}, {seconds:.2f} s")
    console.print(f"γ-EigenGame: {streamed.message}, {game_seconds:.1f} s with compilation")
    console.print(f"Total correlation captured: {captured:.4f}")

    out.mkdir(parents=True, exist_ok=True)
    path = out / "digits_cca.png"
    patterns = np.concatenate([v.reshape(k, 4, 8) for v in streamed.eigenvectors], axis=1)
    report.picture(streamed, exact, patterns, path)
    console.print(f"Picture: {path}")


def _timed(run: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def _table(exact: Result, streamed: Result) -> Table:
    table = Table("component", "exact", "γ-EigenGame", "difference")
    for i, (a, b) in enumerate(zip(exact.eigenvalues, streamed.eigenvalues, strict=True), start=1):
        table.add_row(str(i), f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}")
    return table

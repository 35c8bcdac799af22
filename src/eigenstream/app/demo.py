"""Demonstration on digits: CCA by Algorithm 2 and by the exact solver."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from eigenstream import datasets, metrics, problems, solvers
from eigenstream.app import report
from eigenstream.run import solve
from eigenstream.run.result import Result


def demo(out: Path, epochs: int) -> None:
    """Stream scikit-learn's digits through CCA of their upper and lower halves; compare with the exact solution."""
    console, k, b = Console(), 4, 100
    upper, lower = datasets.digits_halves()
    order = np.random.default_rng(0).permutation(len(upper))
    upper, lower = upper[order], lower[order]
    batches = [(upper[i : i + b], lower[i : i + b]) for i in range(0, len(upper), b)]
    steps = epochs * len(batches)
    console.print(f"CCA of {len(upper)} digits, upper against lower half, batches of {b}, k = {k}")

    rate = solvers.warmup_harmonic(base=2e-2, final=2e-3, warmup=steps // 20, total=steps + 1)
    algorithm2 = solvers.Paper(learning_rate=rate, optimizer=optax.adam, averaging=0.1)
    exact_seconds, exact = _timed(batches, k)
    seconds, streamed = _timed(batches, k, solver=algorithm2, max_epochs=epochs, max_steps=steps, verbose=True)

    table = Table("component", "exact", "Algorithm 2", "difference")
    for i, (true, found) in enumerate(zip(exact.eigenvalues, streamed.eigenvalues, strict=True), start=1):
        table.add_row(str(i), f"{true:.4f}", f"{found:.4f}", f"{found - true:+.4f}")
    console.print(table)
    V = streamed.V
    captured = metrics.tcc(upper @ V[:32], lower @ V[32:], exact.eigenvalues)
    console.print(f"Exact: {exact.message}, {exact_seconds:.2f} s")
    console.print(f"Algorithm 2 (γ-EigenGame): {streamed.message}, {seconds:.1f} s with compilation")
    console.print(f"Total correlation captured: {captured:.4f}")

    out.mkdir(parents=True, exist_ok=True)
    path = out / "digits_cca.png"
    patterns = np.concatenate([v.reshape(k, 4, 8) for v in streamed.eigenvectors], axis=1)
    report.draw_demo(streamed, exact, patterns, path)
    console.print(f"Picture: {path}")


def _timed(batches: list[Any], k: int, **options: Any) -> tuple[float, Result]:
    start = time.perf_counter()
    result = solve(problems.cca(), batches, k, **options)
    return time.perf_counter() - start, result

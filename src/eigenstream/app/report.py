"""Tables and figures of a run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from eigenstream.run.result import Result

#: Components listed in a report.
TABLE_ROWS = 50
#: Columns of the table and the estimator's attribute for each.
COLUMNS = {
    "eigenvalue": "eigenvalues_",
    "residual": "residuals_",
    "correlation": "correlations_",
    "covariance": "covariances_",
    "share of variance": "explained_variance_ratio_",
}


def write(estimator: Any, records: list[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.png`` from a fitted estimator and the snapshots of its run."""
    page, picture = folder / "report.md", folder / "report.png"
    columns = {title: getattr(estimator, name) for title, name in COLUMNS.items() if hasattr(estimator, name)}
    count = min(map(len, columns.values()))
    rows = list(zip(range(1, count + 1), *columns.values(), strict=False))
    lines = [
        f"# {type(estimator).__name__}, {count} components",
        "",
        f"{type(estimator.solver_).__name__}: {estimator.message_}.",
        "",
        "| component | " + " | ".join(columns) + " |",
        "| ---: |" + " ---: |" * len(columns),
        *("| " + " | ".join(f"{value:.6g}" for value in row) + " |" for row in rows[:TABLE_ROWS]),
        *([f"\n{count - TABLE_ROWS} more are in `model.safetensors`."] if count > TABLE_ROWS else []),
        "",
        f"![eigenvalues]({picture.name})",
        "",
    ]
    page.write_text("\n".join(lines))
    _draw_spectrum(estimator.eigenvalues_, [record for record in records if "eigenvalues" in record], picture)
    return page, picture


def _draw_spectrum(values: np.ndarray, records: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4) if records else (5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if records else 1, squeeze=False)[0]
    axes[0].plot(np.arange(1, len(values) + 1), values, "o-", markersize=3)
    axes[0].set(xlabel="component", ylabel="eigenvalue", title="Spectrum")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    if records:
        _plot_history(axes[1], records, 8)
        axes[1].set(xlabel="rows seen", ylabel="eigenvalue, running mean", title="Players along the stream")
        axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _plot_history(axes: Any, records: list[dict[str, Any]], most: int) -> None:
    """Plot up to ``most`` eigenvalues against the rows seen."""
    rows = [record["rows"] for record in records]
    curves = np.array([record["eigenvalues"] for record in records]).T
    for i, (curve, style) in enumerate(zip(curves[:most], itertools.cycle(("-", "--", "-.", ":")), strict=False)):
        axes.plot(rows, curve, style, color=f"C{i}", label=f"player {i + 1}")


def draw_demo(result: Result, exact: Result, patterns: np.ndarray, path: Path) -> None:
    """Draw a run's eigenvalues against the exact ones, and its eigenvectors as images ``(k, height, width)``."""
    from matplotlib.figure import Figure

    k = len(exact.eigenvalues)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2), squeeze=False)[0]
    axes = left.subplots()
    _plot_history(axes, result.history, k)
    for i, value in enumerate(exact.eigenvalues):
        axes.axhline(value, color=f"C{i}", linewidth=0.6)
    axes.set(xlabel="rows seen", ylabel="correlation", title="Players against the exact values (thin lines)")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    right.suptitle("Canonical patterns: upper half and lower half")
    for axis, pattern, value in zip(right.subplots(2, -(-k // 2)).flat, patterns, result.eigenvalues, strict=False):
        limit = np.abs(pattern).max()
        axis.imshow(pattern, cmap="RdBu", vmin=-limit, vmax=limit)
        axis.axhline(pattern.shape[0] / 2 - 0.5, color="black", linewidth=0.8)
        axis.set(xticks=[], yticks=[], title=f"{value:.3f}")
    figure.savefig(path, dpi=120)

"""Tables and pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eigenstream.run.result import Result

#: Components that a page lists.
TABLE_ROWS = 50


def write(estimator: Any, records: list[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.png`` of a fitted estimator and the looks at its run."""
    page, picture = folder / "report.md", folder / "report.png"
    name = type(estimator).__name__
    columns = {"eigenvalue": estimator.eigenvalues_, "residual": estimator.residuals_}
    for title, attribute in (
        ("correlation", "correlations_"),
        ("covariance", "covariances_"),
        ("share of variance", "explained_variance_ratio_"),
    ):
        if hasattr(estimator, attribute):
            columns[title] = getattr(estimator, attribute)
    count = min(len(values) for values in columns.values())
    lines = [
        f"# {name}, {count} components",
        "",
        f"{type(estimator.solver_).__name__}: {estimator.message_}.",
        "",
        "| component | " + " | ".join(columns) + " |",
        "| ---: |" + " ---: |" * len(columns),
        *(
            f"| {i + 1} | " + " | ".join(f"{values[i]:.6g}" for values in columns.values()) + " |"
            for i in range(min(count, TABLE_ROWS))
        ),
        *([f"\n{count - TABLE_ROWS} more are in `model.safetensors`."] if count > TABLE_ROWS else []),
        "",
        f"![eigenvalues]({picture.name})",
        "",
    ]
    page.write_text("\n".join(lines))
    _spectrum(estimator, [record for record in records if "eigenvalues" in record], picture)
    return page, picture


def _spectrum(estimator: Any, records: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4) if records else (5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if records else 1, squeeze=False)[0]
    values = estimator.eigenvalues_
    axes[0].plot(np.arange(1, len(values) + 1), values, "o-", markersize=3)
    axes[0].set(xlabel="component", ylabel="eigenvalue", title="Spectrum")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    if records:
        samples = [record["rows"] for record in records]
        curves = np.array([record["eigenvalues"] for record in records])
        for i, style in zip(range(min(curves.shape[1], 8)), ("-", "--", "-.", ":") * 2, strict=False):
            axes[1].plot(samples, curves[:, i], style, label=f"player {i + 1}")
        axes[1].set(xlabel="rows seen", ylabel="eigenvalue, running mean", title="Players along the stream")
        axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def picture(result: Result, exact: Result, patterns: np.ndarray, path: Path) -> None:
    """Draw a run's eigenvalues against the exact ones, and its eigenvectors as images ``(k, height, width)``."""
    from matplotlib.figure import Figure

    k = len(exact.eigenvalues)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2), squeeze=False)[0]
    axes = left.subplots()
    samples = [record["rows"] for record in result.history]
    curves = np.array([record["eigenvalues"] for record in result.history])
    for i, style in zip(range(k), ("-", "--", "-.", ":") * k, strict=False):
        axes.plot(samples, curves[:, i], style, color=f"C{i}", label=f"player {i + 1}")
        axes.axhline(exact.eigenvalues[i], color=f"C{i}", linewidth=0.6)
    axes.set(xlabel="samples seen", ylabel="correlation", title="Players against the exact values (thin lines)")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    right.suptitle("Canonical patterns: upper half and lower half")
    for axis, pattern, value in zip(right.subplots(2, -(-k // 2)).flat, patterns, result.eigenvalues, strict=False):
        limit = np.abs(pattern).max()
        axis.imshow(pattern, cmap="RdBu", vmin=-limit, vmax=limit)
        axis.axhline(pattern.shape[0] / 2 - 0.5, color="black", linewidth=0.8)
        axis.set(xticks=[], yticks=[], title=f"{value:.3f}")
    figure.savefig(path, dpi=120)

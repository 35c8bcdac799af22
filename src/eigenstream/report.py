"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eigenstream.run import Result

Tree = Any


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

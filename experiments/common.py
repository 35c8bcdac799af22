"""Shared by the experiments: the folder of results, and how figures, data and pages are written."""

from __future__ import annotations

import argparse
import csv
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: Line styles in addition to colours, for greyscale.
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)), (0, (3, 1)))


def command_line(main: Callable[..., None], has_small: bool = False) -> None:
    """Run an experiment from the command line, with ``--out`` and, if it has a small form, ``--small``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="only runs that take minutes on two CPU cores")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for figures, data and the page")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    main(arguments.out, **({"small": arguments.small} if has_small else {}))


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and SVG; the same data give the same bytes."""
    figure.savefig(path.with_suffix(".png"), dpi=120)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def write_csv(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    """Write columns of equal length, numbers to six digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow([f"{x:.6g}" if isinstance(x, float | np.floating) else x for x in row])


def write_json(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found, indent=1, default=_plain) + "\n")


def _plain(x: Any) -> Any:
    """An array as a list of numbers to six digits; a scalar unchanged."""
    if np.ndim(x) == 0:
        return x.tolist()
    return [_plain(v) if np.ndim(v) else None if np.isnan(v) else float(f"{v:.6g}") for v in x]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to four digits."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(_cell(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float | np.floating) else str(x)


def spread(values: Any) -> str:
    """Mean and standard deviation over seeds; for a single seed the value alone."""
    if len(values) < 2:
        return f"{np.mean(values):.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


def write_page(path: Path, title: str, claim: str, holds: str, body: str) -> None:
    """Write a page: the command, the paper's claim, whether it holds here, and the measurements."""
    text = f"""# {title}

Made by `python -m experiments.{path.stem}`.

{_filled("**The paper's claim.** " + claim)}

{_filled("**Here.** " + holds)}

{_reflowed(body)}
"""
    path.write_text(text)


def _reflowed(body: str) -> str:
    """Wrap paragraphs; leave tables, pictures and headings unchanged."""
    parts = body.strip().split("\n\n")
    return "\n\n".join(part if part.startswith(("|", "!", "#")) else _filled(part) for part in parts)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)

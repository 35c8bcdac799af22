"""SIGKILL at random times of a run, resume, compare bits.

    python benchmarks/kills.py [--kills 10]        # for each of two solvers

Writes docs/results/kills.json and docs/results/kills.md; with ``--page`` the page alone, from the outcome on disk.
Every run is a process of the command line. A kill may happen while Python starts, between checkpoints, during one, or
after the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def command(folder: Path, out: Path, solver: str) -> list[str]:
    settings = ["--solver", "paper", "--option", "learning_rate=0.02", "--epochs", "4"] if solver == "paper" else []
    files = [str(folder / "x.npy"), str(folder / "y.npy")]
    return [
        *(sys.executable, "-c", "from eigenstream.cli import main; main()", "fit", "cca", *files, "-k", "3"),
        *("--out", str(out), "--resume", "--quiet", "--checkpoint-every", "0.2", *settings),
    ]


def experiment(folder: Path, solver: str, kills: int) -> dict[str, Any]:
    """The length of a run without kills; for every kill its time, the last checkpoint, and whether the bits agree."""
    generator = np.random.default_rng(0)
    n, width = (30_000, 40) if solver == "paper" else (1_000_000, 60)
    latent = generator.normal(size=(n, 5)).astype(np.float32)
    for name in ("x", "y"):
        noise = generator.standard_normal((n, width), np.float32)
        np.save(folder / f"{name}.npy", np.c_[latent + noise[:, :5], noise[:, 5:]])
    began = time.monotonic()
    subprocess.run(command(folder, folder / "whole", solver), check=True, capture_output=True)
    length = time.monotonic() - began
    wanted = (folder / "whole" / "model.safetensors").read_bytes()
    records = []
    for i in range(kills):
        out, moment = folder / f"killed{i}", generator.uniform(0, length)
        process = subprocess.Popen(command(folder, out, solver), stdout=subprocess.DEVNULL)
        time.sleep(moment)
        process.kill()
        process.wait()
        found = sorted(int(path.name) for path in (out / "checkpoints").glob("[0-9]*") if path.name.isdigit())
        over = (out / "model.safetensors").exists()
        subprocess.run(command(folder, out, solver), check=True, capture_output=True)
        same = (out / "model.safetensors").read_bytes() == wanted
        records.append({"moment": moment, "checkpoint": found[-1] if found else None, "over": over, "same": same})
    return {"solver": solver, "seconds": length, "kills": records}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.page:
        found = []
        for solver in ("paper", "exact"):
            with tempfile.TemporaryDirectory() as folder:
                found.append(experiment(Path(folder), solver, options.kills))
        (RESULTS / "kills.json").write_text(json.dumps(found, indent=1) + "\n")
    text = page(json.loads((RESULTS / "kills.json").read_text()))
    (RESULTS / "kills.md").write_text(text)
    print(text)


def page(found: list[dict[str, Any]]) -> str:
    kills = len(found[0]["kills"])
    lines = [
        f"# {2 * kills} kills and resumes",
        "",
        f"`python benchmarks/kills.py --kills {kills}`: `eigenstream fit cca` in its own process, SIGKILL at a",
        "uniformly random time within the length of a run, then the same command with `--resume`.",
        "`model.safetensors` is compared byte for byte with that of a run without a kill.",
        "",
        "| solver | seconds of a run | kills | before a checkpoint | after one | after the end | same bits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in found:
        records = result["kills"]
        over = sum(r["over"] for r in records)
        early = sum(r["checkpoint"] is None and not r["over"] for r in records)
        same = sum(r["same"] for r in records)
        cells = (result["solver"], f"{result['seconds']:.1f}", kills, early, kills - early - over, over, same)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()

"""Run every experiment, each in its own process, which frees its memory and compiled programs at the end."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.common import command_line

#: Small experiments that use one core each run two at a time; those that use all cores, or are timed, run alone.
TOGETHER = ("ica_unmixing", "batch_size", "sequential", "proto_values", "sinusoid")
ALONE = ("streaming_cca", "neural_cca")


def main(out: Path, small: bool) -> None:
    one = partial(run, out=out, small=small)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, TOGETHER))
    for name in ALONE:
        one(name)


def run(name: str, out: Path, small: bool) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-m", f"experiments.{name}", "--out", str(out), *(["--small"] if small else [])]
    subprocess.run(command, check=True)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    command_line(main, has_small=True)

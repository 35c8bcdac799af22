"""Free memory of the device that JAX computes on."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np

from eigenstream import distributed


def free_bytes() -> float:
    """Bytes that are free on JAX's default device, on a CPU of host memory; the least of all processes."""
    return min(float(own) for own in distributed.gather_all(np.float64(_free())))


def _free() -> float:
    stats = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats["bytes_in_use"])
    return min(_available(), _left_in_group())


def _available() -> float:
    """Memory that can be taken without swapping: Linux counts it; elsewhere half of what is installed, or 4 GB."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    if not hasattr(os, "sysconf"):
        return 4e9
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_group() -> float:
    """What a container's limit leaves; file pages count as free, because the kernel drops them first."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return float("inf") if limit == "max" else float(limit) - float(used) + float(pages.get("inactive_file", 0))
    except (OSError, ValueError):
        return float("inf")

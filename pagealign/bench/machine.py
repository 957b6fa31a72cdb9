"""What the machine is: its caches, its processor, how busy it is, and pinned threads."""

from __future__ import annotations

import os
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TOPOLOGY = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that Intel's kernels have variants for, as /proc/cpuinfo names them
TOLD_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
TOLD_TILES = ("amx_tile", "amx_bf16")


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Size of the highest-level cache that Linux names; 0 if it names none."""
    found = []
    for index in caches.glob("index*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        digits = size.rstrip("KMG")
        if digits.isdigit():
            found.append((level, int(digits) * units.get(size[-1], 1)))
    return max(found, default=(0, 0))[1]


def processor(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """The processor's name and count, and those of its instruction sets that matter here."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return {"processor": "unknown", "instruction sets": "unknown"}
    fields = [line.split(":", 1) for line in lines if ":" in line]
    names = [value.strip() for key, value in fields if key.strip() == "model name"]
    flags = next((value.split() for key, value in fields if key.strip() == "flags"), [])
    told = [flag for flag in TOLD_FLAGS + TOLD_TILES if flag in flags]
    return {
        "processor": f"{len(names)} x {names[0]}" if names else "unknown",
        "instruction sets": ", ".join(told) or "none of those that matter here",
    }


def cores() -> int:
    """Physical cores that this process may run on: hyperthreads share a core's kernels."""
    found = set()
    cpus = os.sched_getaffinity(0)
    for cpu in cpus:
        topology = TOPOLOGY / f"cpu{cpu}" / "topology"
        try:
            names = ("physical_package_id", "core_id")
            found.add(tuple((topology / name).read_text().strip() for name in names))
        except OSError:
            return len(cpus)
    return len(found)


def busy() -> float:
    """Processes that ran or wanted to, on average over the last minute."""
    return os.getloadavg()[0]


def pinned(cpus: int) -> dict[str, str]:
    """Environment variables for a process with ``cpus`` threads, each on a core of its own.

    They count from the process's start. Freed memory stays in the process too: a page fault
    for each large temporary would be timed with the approach that makes one.
    """
    return {
        "OMP_NUM_THREADS": str(cpus),
        "MKL_NUM_THREADS": str(cpus),
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": "cores",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }

"""``python -m pagealign.bench``: see ``make bench-kernels``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pagealign.bench import machine
from pagealign.errors import PagealignError

STARTED = "PAGEALIGN_BENCH_STARTED"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-kernels ARGS=...",
        description="Attention kernels, timed: in place, gather and varlen, page size 1.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, under two minutes")
    parser.add_argument("--out", type=Path, default=Path("reports/bench"), metavar="DIR")
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="sgl_kernel, ipex, flashinfer or torch; may be repeated (default: those that run)",
    )
    parser.add_argument("--threads", type=int, default=machine.cores(), help="default: one a core")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="with --threads 1: count processor time, on a machine that is busy",
    )
    parser.add_argument("--list", action="store_true", help="say which backends run here; stop")
    parser.add_argument(
        "--fixtures", type=Path, metavar="DIR", help="save small inputs with Intel's results; stop"
    )
    found = parser.parse_args(arguments)
    if found.threads < 1:
        parser.error("--threads has to be at least 1")
    return found


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if STARTED not in os.environ:
        # OpenMP and malloc read these when a process starts
        os.environ.update(machine.pinned(options.threads) | {STARTED: "1"})
        os.execv(sys.executable, [sys.executable, "-m", "pagealign.bench", *arguments])
    try:
        if options.fixtures:
            from pagealign.bench import fixtures

            return fixtures.run(options.fixtures)
        from pagealign.bench import run

        return (
            run.list_backends()
            if options.list
            else run.run(options.quick, options.out, options.backend, options.cpu_time)
        )
    except PagealignError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

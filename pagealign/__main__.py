"""``python -m pagealign``, and what the console script ``pagealign`` calls."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line; ``doctor`` works even where nothing is installed."""
    old = sys.version_info[:2] < (3, 11)
    if old or not find_spec("typer"):
        from pagealign import doctor

        if sys.argv[1:2] == ["doctor"]:
            sys.exit(doctor.main(sys.argv[2:]))
        lack = "is older than Python 3.11" if old else "has no typer"
        sys.exit(_fail(f"{sys.executable} {lack}; run `make env`, then use .venv/bin/pagealign"))
    from pagealign.cli import app

    app(prog_name="pagealign")


def _fail(message: str) -> int:
    print(f"pagealign: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

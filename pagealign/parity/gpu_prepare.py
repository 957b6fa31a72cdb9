"""``python -m pagealign.parity.gpu_prepare DIR``: record ``DIR/stock.zip``, ``DIR/aligned.zip``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.parity.jobs import Call, run_calls
from pagealign.trees import build_tree


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        models = Path(work) / "models"
        calls = [
            Call(
                name,
                build_tree(name),
                folder / f"{name}.log",
                "pagealign.parity.gpu_calls",
                "record",
                {"models": str(models), "out": str(folder / f"{name}.zip")},
            )
            for name in ("stock", "aligned")
        ]
        run_calls(calls, models)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).absolute())
    except PagealignError as error:
        sys.exit(f"gpu_prepare: {error}")

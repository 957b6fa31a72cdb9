"""The command line. Commands import what they run when they run: ``--help`` stays quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pagealign import __version__
from pagealign.errors import PagealignError
from pagealign.evals import commands as evals
from pagealign.evals.commands import Tree

app = typer.Typer(
    name="pagealign",
    help="Page-aligned encoder KV for SGLang: run, compare and check the patch series.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(evals.app, name="eval")

BAD_INPUT = 2
INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn a PagealignError into one red line and exit code 2, Ctrl-C into 130."""
    try:
        yield
    except PagealignError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"pagealign: {error}", style="red"))
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("pagealign: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    pass


@app.command()
def transcribe(
    audio: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AUDIO", help="Recordings; the fetched clips if none."),
    ] = None,
    tree: Annotated[Tree, typer.Option(help="The SGLang tree to run.")] = Tree.aligned,
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Your own SGLang checkout, in place of --tree."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = 64,
    backend: Annotated[str, typer.Option(help="SGLang's --attention-backend.")] = "intel_xpu",
    device: Annotated[str, typer.Option(help="auto, cpu, xpu or cuda.")] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Whisper folder; Whisper-base if none."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Clips sent at once.")] = 1,
    language: Annotated[str, typer.Option(help="The language spoken.")] = "en",
) -> None:
    """Transcribe recordings on a real SGLang server that is started for it."""
    with errors_as_lines():
        from pagealign import transcribe as module

        code = module.run(
            audio=audio or [],
            tree=tree.value,
            sglang=sglang,
            page_size=page_size,
            backend=backend,
            device=device,
            model=model,
            concurrency=concurrency,
            language=language,
        )
    raise typer.Exit(code)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the table and the logs go.")
    ] = Path("reports/demo"),
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="This row only; may be repeated.")
    ] = None,
) -> None:
    """Run stock and patched SGLang on the same clips and print one table."""
    with errors_as_lines():
        from pagealign import demo as module

        code = module.run(out=out, only=only or [])
    raise typer.Exit(code)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=1, help="How long.")] = 30,
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = 64,
    backend: Annotated[str, typer.Option(help="SGLang's --attention-backend.")] = "intel_xpu",
    seed: Annotated[int, typer.Option(help="Which requests are sent, and when.")] = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the table and the log go.")
    ] = Path("reports/soak"),
) -> None:
    """Mixed traffic, aborts and retractions on a patched server with a small pool."""
    with errors_as_lines():
        from pagealign import soak as module

        code = module.run(minutes=minutes, page_size=page_size, backend=backend, seed=seed, out=out)
    raise typer.Exit(code)


@app.command()
def compare(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, no server.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path(
        "reports/compare"
    ),
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="CSV or JSON lines with arrival, encoder_len, decode_len; may be repeated.",
        ),
    ] = None,
    trace_model: Annotated[
        str, typer.Option(help="Whose KV the traces fill: whisper-large-v3, llama-3.2-11b-vision.")
    ] = "whisper-large-v3",
    steps_per_second: Annotated[
        float, typer.Option(help="Decode steps per unit of a trace's arrivals.")
    ] = 1.0,
    pool_slots: Annotated[int, typer.Option(help="The traces' pool, in slots.")] = 131_072,
    max_running: Annotated[int, typer.Option(help="The traces' requests at once.")] = 256,
    page_size: Annotated[
        list[int] | None,
        typer.Option(help="Of the pool; may be repeated. The backend's, or 1 to 256."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Refuse page sizes that its kernels refuse.")
    ] = None,
    parallel: Annotated[str, typer.Option(help="processes, dask or ray.")] = "processes",
    jobs: Annotated[int, typer.Option(help="Processes; -1: one per core.")] = -1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a running Dask or Ray cluster.")
    ] = None,
) -> None:
    """Compare page-aligned, varlen gather and page size 1; write a report."""
    with errors_as_lines():
        from pagealign.compare import run as module

        code = module.run(
            quick=quick,
            out=out,
            traces=trace or [],
            model=trace_model,
            rate=steps_per_second,
            pool_slots=pool_slots,
            max_running=max_running,
            page_sizes=page_size or [],
            backend=backend,
            parallel=parallel,
            jobs=jobs,
            scheduler=scheduler,
        )
    raise typer.Exit(code)


@app.command()
def port(
    version: Annotated[
        str, typer.Argument(help="A release of SGLang, such as 0.5.22, or a wheel's path.")
    ],
    patches: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The series; patches/ if none.")
    ] = None,
    write_pin: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="If all applies, write the series and its new PIN there; patches: in place.",
        ),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Make a git repository there to mend the series in."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave the code out.")] = False,
) -> None:
    """Try the series on another release, hunk by hunk, in a scratch folder."""
    with errors_as_lines():
        from pagealign.port import run as module

        code = module.run(
            version=version,
            patches=patches,
            write_pin=write_pin,
            repo=repo,
            as_json=json,
            brief=brief,
        )
    raise typer.Exit(code)


@app.command()
def parity(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer workloads, no prefixes.")] = False,
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Your own SGLang, in place of the aligned tree."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the result goes.")] = Path(
        "reports/parity"
    ),
) -> None:
    """Show that at page size 1 the series changes nothing; exit 1 where it does."""
    with errors_as_lines():
        from pagealign.parity import run as module

        code = module.run(quick=quick, out=out, tree=sglang, at_once=jobs)
    raise typer.Exit(code)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed, which parts can run here, and what is missing."""
    with errors_as_lines():
        from pagealign import doctor as module

        code = module.run(as_json=json)
    raise typer.Exit(code)


@app.command()
def tree(
    name: Annotated[str, typer.Argument(help="stock, aligned, aligned-core or varlen.")],
) -> None:
    """Build an SGLang tree if it is missing; print the folder to put on PYTHONPATH."""
    with errors_as_lines():
        from pagealign.trees import build_tree

        path = build_tree(name)
    print(path)


@app.command()
def assets() -> None:
    """Fetch, check and convert the weights and the recordings."""
    with errors_as_lines():
        from pagealign.assets import clips, whisper_base

        weights = whisper_base()
        recordings = clips()
    print(weights)
    for clip in recordings:
        print(f"{clip.path} ({clip.seconds:.1f} s)")

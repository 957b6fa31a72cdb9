"""``pagealign eval``: the options of its commands."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Accuracy of a server, yours or the pinned one: Whisper's WER, DocVQA's ANLS.",
    no_args_is_help=True,
)


class Tree(enum.StrEnum):
    """The trees that a server can run on, here and in ``pagealign transcribe``."""

    aligned = "aligned"
    stock = "stock"
    varlen = "varlen"


BaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="A server that runs: OpenAI-compatible.")
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="The model's name there, if it has several.")
]
ServerTree = Annotated[
    Tree | None, typer.Option(help="Start the pinned server on this tree instead.")
]
PageSize = Annotated[int, typer.Option(min=1, help="With --server: slots per page.")]
Backend = Annotated[str, typer.Option(help="With --server: SGLang's --attention-backend.")]
Device = Annotated[str, typer.Option(help="With --server: auto, cpu, xpu or cuda.")]
Config = Annotated[str | None, typer.Option(help="A Hugging Face data set's configuration.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first so many; all if none.")]
Concurrency = Annotated[str, typer.Option(help="Requests at once; several runs: 1,4,16.")]
Seed = Annotated[int, typer.Option(help="Of the bootstrap intervals.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the answers in --out.")]


@app.command()
def whisper(
    base_url: BaseUrl = None,
    model: Model = None,
    server: ServerTree = None,
    page_size: PageSize = 64,
    backend: Backend = "intel_xpu",
    device: Device = "auto",
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A Whisper folder, for --server and --peer; with --server Whisper-base if none.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|NAME",
            help="A folder of audio with transcripts, a .parquet file, or a Hugging Face data "
            "set; the LibriVox clips if none.",
        ),
    ] = None,
    config: Config = None,
    split: Annotated[str, typer.Option(help="A Hugging Face data set's split.")] = "test",
    text_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The data set's column with the words.")
    ] = None,
    limit: Limit = None,
    concurrency: Concurrency = "1",
    language: Annotated[
        str, typer.Option(help="The language spoken; auto: the server finds out.")
    ] = "en",
    timestamps: Annotated[
        str | None, typer.Option(help="Ask for timestamps: segment or word.")
    ] = None,
    long: Annotated[str, typer.Option(help="Clips above 30 s: auto, send or skip.")] = "auto",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="transformers, faster-whisper or all, beside it; may be repeated."),
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where answers, results and plot go.")
    ] = Path("reports/eval-whisper"),
    resume: Resume = False,
) -> None:
    """Transcribe and score: WER and CER, speed, and the same run at each concurrency."""
    from pagealign.cli import errors_as_lines

    with errors_as_lines():
        from pagealign.evals import whisper as module

        code = module.run(
            base_url=base_url,
            model=model,
            server=server.value if server else None,
            page_size=page_size,
            backend=backend,
            device=device,
            weights=weights,
            data=data,
            config=config,
            split=split,
            text_column=text_column,
            limit=limit,
            concurrency=concurrency,
            language=language,
            timestamps=timestamps,
            long=long,
            peer=peer or [],
            seed=seed,
            out=out,
            resume=resume,
        )
    raise typer.Exit(code)


@app.command()
def docvqa(
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH|NAME",
            help="The challenge's .json or a folder with it, a .parquet file, or a Hugging Face "
            "data set.",
        ),
    ],
    base_url: BaseUrl = None,
    model: Model = None,
    server: ServerTree = None,
    page_size: PageSize = 64,
    backend: Backend = "intel_xpu",
    device: Device = "auto",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With --server: the model's folder or hub name."),
    ] = None,
    config: Config = None,
    split: Annotated[str, typer.Option(help="A Hugging Face data set's split.")] = "validation",
    limit: Limit = None,
    concurrency: Concurrency = "1",
    prompt: Annotated[
        str | None, typer.Option(help="What is asked; {question} is the question.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 64,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where answers, results and plot go.")
    ] = Path("reports/eval-docvqa"),
    resume: Resume = False,
) -> None:
    """Ask about document images and score: ANLS, and the same run at each concurrency."""
    from pagealign.cli import errors_as_lines

    with errors_as_lines():
        from pagealign.evals import docvqa as module

        code = module.run(
            data=data,
            base_url=base_url,
            model=model,
            server=server.value if server else None,
            page_size=page_size,
            backend=backend,
            device=device,
            weights=weights,
            config=config,
            split=split,
            limit=limit,
            concurrency=concurrency,
            prompt=prompt or module.PROMPT,
            max_tokens=max_tokens,
            seed=seed,
            out=out,
            resume=resume,
        )
    raise typer.Exit(code)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="DIR", help="--out of one evaluation.")],
    second: Annotated[Path, typer.Argument(metavar="DIR", help="--out of another.")],
) -> None:
    """Two evaluations of the same data, item by item: identical texts, paired difference."""
    from pagealign.cli import errors_as_lines

    with errors_as_lines():
        from pagealign.evals import compare as module

        code = module.run(first, second)
    raise typer.Exit(code)

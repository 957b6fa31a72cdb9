"""The picture of one row and its pages, for each approach: where the gap lies, and what each
kernel reads. Drawn to scale for a small page, so that single slots can be seen."""

from __future__ import annotations

from dataclasses import dataclass

from pagealign.layout import ceil_align

PAGE, ENCODER, DECODER = 4, 10, 5  # small stand-ins for 64, 1500 and the decoded length
COLORS = {
    "encoder": "#4c78a8",
    "gap": "#e7e7e7",
    "decoder": "#f58518",
    "tail": "#fbe3c8",
    "copy": "#b7b7b7",
}


@dataclass(frozen=True)
class Read:
    """What a kernel is given: cells ``[start, stop)`` of the row, in steps of ``unit`` slots,
    copied to a buffer first or not."""

    kernel: str
    start: int
    stop: int
    unit: int
    copied: bool = False


@dataclass(frozen=True)
class Picture:
    """A row as kinds of cells (encoder, gap, decoder, tail), and the reads of it."""

    title: str
    cells: tuple[str, ...]
    reads: tuple[Read, ...]


def row_cells(reserve: int) -> tuple[str, ...]:
    """The kinds of the row's slots when ``reserve`` slots are kept for the encoder; a last
    page that is not full ends in ``tail``."""
    used = reserve + DECODER
    return (
        ("encoder",) * ENCODER
        + ("gap",) * (reserve - ENCODER)
        + ("decoder",) * DECODER
        + ("tail",) * (ceil_align(used, PAGE) - used)
    )


def pictures() -> tuple[Picture, ...]:
    """One for each approach."""
    reserve = ceil_align(ENCODER, PAGE)

    def reads(start: int, unit: int, copied: bool = False) -> tuple[Read, ...]:
        return (
            Read("cross-attention", 0, ENCODER, unit, copied),
            Read("self-attention", start, start + DECODER, unit, copied),
        )

    return (
        Picture("page-aligned: whole pages, in place", row_cells(reserve), reads(reserve, PAGE)),
        Picture("varlen gather: slot by slot, copied", row_cells(ENCODER), reads(ENCODER, 1, True)),
        Picture("page-size-1 view: slot by slot, in place", row_cells(ENCODER), reads(ENCODER, 1)),
    )


def draw():
    """A matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    shown = pictures()
    figure = Figure(figsize=(9, 2.1 * len(shown)), layout="constrained")
    for axes, picture in zip(figure.subplots(len(shown)), shown, strict=True):
        for slot, kind in enumerate(picture.cells):
            axes.add_patch(Rectangle((slot, 0), 1, 1, fc=COLORS[kind], ec="white", lw=1))
        for edge in range(0, len(picture.cells) + 1, PAGE):
            axes.plot((edge, edge), (-0.15, 1.15), color="black", lw=1.5)
        for read in picture.reads:
            _draw_read(axes, read)
        axes.set_title(picture.title, loc="left", fontsize=11)
        axes.set_xlim(-0.3, 20.3)
        axes.set_ylim(-1.7, 1.3)
        axes.axis("off")
    labels = {
        "encoder": "encoder",
        "gap": "gap: reserved, never written or read",
        "decoder": "decoder",
        "tail": "not yet written",
        "copy": "copy in a ragged buffer",
    }
    figure.legend(
        handles=[Patch(fc=COLORS[kind], label=text) for kind, text in labels.items()],
        loc="outside lower center",
        ncols=3,
        fontsize=9,
        frameon=False,
    )
    return figure


def _draw_read(axes, read: Read) -> None:
    """A bracket for every unit that the kernel's table names, or the copy it reads."""
    from matplotlib.patches import Rectangle

    if read.copied:
        for slot in range(read.start, read.stop):
            axes.annotate(
                "",
                (slot + 0.5, -0.62),
                (slot + 0.5, -0.05),
                arrowprops={"arrowstyle": "->", "lw": 0.6, "color": "#666666"},
            )
            axes.add_patch(Rectangle((slot + 0.06, -1.0), 0.88, 0.35, fc=COLORS["copy"]))
    else:
        for first in range(read.start, read.stop, read.unit):
            last = first + read.unit
            inset = 0.08
            axes.plot(
                (first + inset, first + inset, last - inset, last - inset),
                (-0.3, -0.5, -0.5, -0.3),
                color="#444444",
                lw=1.2,
            )
    axes.text((read.start + read.stop) / 2, -1.15, read.kernel, ha="center", va="top", fontsize=9)

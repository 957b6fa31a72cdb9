"""Small generated document images with questions, in the challenge's own file format."""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from pagealign.evals.documents import ANSWERS, ID, IMAGE, QUESTION


def generated(folder: Path, pages: int, seed: int = 0) -> Path:
    """Write ``pages`` small form images with a question each, and their ``questions.json``.

    What is asked is printed on the page in capitals, in PIL's own font; pages differ in
    colour, which a tiny model sees too. Returns the folder.
    """
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    data = []
    for page in range(pages):
        fields = {
            "invoice number": f"{draw.randrange(10_000, 99_999)}",
            "date": f"{draw.randrange(1, 29)} May {draw.randrange(1960, 2000)}",
            "total": f"${draw.randrange(1, 999)}.{draw.randrange(10, 99)}",
        }
        image = Image.new("RGB", (220, 120), tuple(draw.randrange(256) for _ in "rgb"))
        pen = ImageDraw.Draw(image)
        pen.rectangle((5, 5, 215, 30 + draw.randrange(80)), fill="white")
        for n, (field_name, value) in enumerate(fields.items()):
            pen.text((10, 12 + 30 * n), f"{field_name.upper()}: {value}", fill="black")
        image.save(folder / f"page{page}.png")
        asked = draw.choice(list(fields))
        data.append(
            {
                ID: page, QUESTION: f"What is the {asked}?", IMAGE: f"page{page}.png",
                ANSWERS: [fields[asked], fields[asked].replace("$", "")],
            }
        )  # fmt: skip
    (folder / "questions.json").write_text(json.dumps({"dataset_split": "val", "data": data}))
    return folder

"""``pagealign eval docvqa`` on the real server with a tiny random Mllama.

Its answers mean nothing; that all are asked, scored and kept, and that they are the same
one at a time and four at once, does.
"""

import json
from pathlib import Path

import pytest
from document_pages import generated
from typer.testing import CliRunner

from pagealign.cli import app
from pagealign.evals.scores import anls
from pagealign.tiny_models import tiny_mllama, tiny_mllama_processor

pytestmark = pytest.mark.server
PAGES = 6


def test_answers_do_not_depend_on_concurrency(tmp_path: Path) -> None:
    pages = generated(tmp_path / "pages", PAGES)
    weights = tmp_path / "mllama"
    weights.mkdir()
    tiny_mllama_processor(tiny_mllama(weights))
    line = ["eval", "docvqa", "--data", pages, "--server", "aligned", "--weights", weights]
    line += ["--page-size", "64", "--device", "cpu", "--concurrency", "1,4", "--max-tokens", "12"]
    line += ["--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in line])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["server"] == "SGLang 0.5.23, aligned, intel_xpu, page size 64"
    first, second = found["runs"]
    assert second["against_first"] == {"value": 0, "error": 0, "identical": PAGES, "items": PAGES}
    answers = first["answers"]
    assert len({answer["text"] for answer in answers}) > PAGES // 2  # it sees the pages
    references = [q["answers"] for q in json.loads((pages / "questions.json").read_text())["data"]]
    scores = [anls(a["text"], r) for a, r in zip(answers, references, strict=True)]
    assert [answer["score"] for answer in answers] == scores
    assert {answer["tokens"] for answer in answers} == {12}

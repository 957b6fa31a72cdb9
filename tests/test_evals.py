"""``pagealign eval`` against a server in this process: figures, resume, each bad input."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from document_pages import generated
from fake_openai import FakeOpenAI
from rich.console import Console
from typer.testing import CliRunner

from pagealign.cli import app
from pagealign.errors import PagealignError
from pagealign.evals import documents, peers, speech, target, whisper
from pagealign.evals.asking import STOP_AFTER

RATE = 16_000


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """No weights are fetched for a count of tokens, and nothing goes into a real cache."""
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(whisper, "tokenizer", lambda weights: lambda text: len(text.split()))


def write_wav(path: Path, seconds: float = 0.1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.zeros(int(RATE * seconds), np.float32), RATE)


@pytest.fixture
def audio(tmp_path) -> Path:
    """Three recordings of a sentence each."""
    folder = tmp_path / "audio"
    for name, words in {"a": "the cat sat", "b": "on the mat", "c": "all day long"}.items():
        write_wav(folder / f"{name}.wav")
        (folder / f"{name}.txt").write_text(words)
    return folder


@pytest.fixture
def pages(tmp_path) -> Path:
    return generated(tmp_path / "pages", 6)


def right(folder: Path):
    """Answers each question with its first reference."""
    data = json.loads((folder / "questions.json").read_text())["data"]
    return lambda asked: data[[q["question"] for q in data].index(asked.split("\n")[0])]["answers"][
        0
    ]


def numbered(folder: Path) -> Path:
    """Makes every question's text its own."""
    file = folder / "questions.json"
    body = json.loads(file.read_text())
    for row in body["data"]:
        row["question"] += f" ({row['questionId']})"
    file.write_text(json.dumps(body))
    return folder


def evaluate(*line: object) -> tuple[int, str]:
    """The command's exit code and all that it printed."""
    result = CliRunner().invoke(app, ["eval", *map(str, line)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


# --- whisper ------------------------------------------------------------------------------


def test_whisper_figures(audio, tmp_path):
    """b loses a word: 1 of 9. The second run is told so by a counter: a differs then."""
    heard = {"a.wav": "The cat sat.", "b.wav": "on mat", "c.wav": "all day long"}
    with FakeOpenAI(heard.__getitem__) as fake:
        out = tmp_path / "out"
        code, said = evaluate("whisper", "--base-url", fake.url, "--data", audio, "--out", out)
    assert code == 0, said
    found = results(out)
    (run,) = found["runs"]
    assert run["wer"] == pytest.approx(1 / 9)
    # "on the mat" less "the " of 34 characters
    assert run["cer"] == pytest.approx(4 / (11 + 10 + 12))
    assert [clip["errors"]["word_errors"] for clip in run["clips"]] == [0, 1, 0]
    assert run["wer_interval"][0] == 0
    assert run["failures"] == 0 and run["against_first"] is None
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "11.11%" in said and "33.3%" in said
    assert [form["language"] for form in fake.forms] == ["en"] * 3
    assert {form["response_format"] for form in fake.forms} == {"json"}


def test_runs_at_each_concurrency_are_compared(audio, tmp_path):
    """All three wait for each other, so three are at once; then one answer differs."""
    together = threading.Barrier(3)
    asked = []

    def answer(name: str) -> str:
        asked.append(name)
        if len(asked) <= 3:
            return "the cat sat"
        together.wait(30)
        return "the cat" if name == "a.wav" else "the cat sat"

    out = tmp_path / "out"
    with FakeOpenAI(answer) as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", out]
        code, said = evaluate(*line, "--concurrency", "1,3")
    assert code == 0
    assert fake.most_at_once == 3
    first, second = results(out)["runs"]
    assert second["against_first"]["value"] == pytest.approx(1 / 9)
    assert (second["against_first"]["identical"], second["against_first"]["items"]) == (2, 3)
    assert "2 of 3" in said and "differ" in said and "+11.11%" in said


def test_language_and_timestamps_pass_through(audio, tmp_path):
    with FakeOpenAI(lambda name: "x") as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio]
        evaluate(*line, "--language", "auto", "--out", tmp_path / "1")
        evaluate(*line, "--language", "de", "--timestamps", "word", "--out", tmp_path / "2")
    auto, german = fake.forms[0], fake.forms[-1]
    assert "language" not in auto and "timestamp_granularities[]" not in auto
    assert german["language"] == "de"
    assert german["timestamp_granularities[]"] == "word"
    assert german["response_format"] == "verbose_json"


@pytest.mark.parametrize(
    ("version", "long", "sent", "message"),
    [
        ("0.5.23", "auto", ["a.wav", "b.wav", "c.wav", "long.wav"], ""),
        ("0.5.18", "auto", [], "isn't known to cut them: --long send sends them all the same"),
        (None, "auto", [], "1 clips are longer than 30 s (the first: long, 31.0 s)"),
        (None, "send", ["a.wav", "b.wav", "c.wav", "long.wav"], ""),
        (None, "skip", ["a.wav", "b.wav", "c.wav"], "skipped: 1 long: 31.0 s long"),
    ],
)  # fmt: skip
def test_audio_above_30_seconds(audio, tmp_path, version, long, sent, message):
    write_wav(audio / "long.wav", 31)
    (audio / "long.txt").write_text("a long speech")
    with FakeOpenAI(lambda name: "x", version=version) as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", tmp_path / "out"]
        code, said = evaluate(*line, "--long", long)
    assert sorted(fake.asked) == sent
    assert code == (0 if sent else 2)
    assert message in said


def test_what_is_broken_is_skipped_and_named(audio, tmp_path):
    (audio / "broken.wav").write_bytes(b"RIFF, and then nothing of the kind")
    (audio / "broken.txt").write_text("x")
    write_wav(audio / "wordless.wav")
    (audio / "notes.md").write_text("not audio")
    out = tmp_path / "out"
    with FakeOpenAI(lambda name: "x") as fake:
        code, said = evaluate("whisper", "--base-url", fake.url, "--data", audio, "--out", out)
    assert code == 0
    assert len(fake.asked) == 3
    assert "skipped: 2 broken: broken: libsndfile can't read it wordless: no words" in said
    assert [item["name"] for item in results(out)["skipped"]] == ["broken", "wordless"]


def test_a_refused_request_is_a_failure_with_a_name(audio, tmp_path):
    out = tmp_path / "out"
    with FakeOpenAI(lambda name: 500 if name == "b.wav" else "x") as fake:
        code, said = evaluate("whisper", "--base-url", fake.url, "--data", audio, "--out", out)
    assert code == 1
    assert "failed: 1 1 at once, b: Error code: 500" in said and "refused: b.wav" in said
    (run,) = results(out)["runs"]
    assert run["failures"] == 1 and run["clips"][1]["errors"] is None


PAGE = "<!DOCTYPE html><html><body>the cat sat</body></html>"


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("text/html; charset=utf-8", PAGE, "the answer is a page of HTML"),
        ("text/html", "the cat sat", "the answer is a page of HTML"),
        ("text/plain", PAGE, "the answer is a page of HTML"),
        ("application/json", PAGE, "the answer is a page of HTML"),
        ("application/json", "the cat sat", "the answer isn't JSON"),
        ("application/json", "[]", "the answer isn't a JSON object: []"),
        ("application/json", "null", "the answer isn't a JSON object: None"),
        ("application/json", '{"text": ["the cat sat"]}', "the answer has no text"),
        ("application/json", '{"text": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_what_is_no_transcription_is_a_failure(audio, tmp_path, kind, body, why):
    out = tmp_path / "out"
    with FakeOpenAI(lambda name: (kind, body)) as fake:
        code, said = evaluate("whisper", "--base-url", fake.url, "--data", audio, "--out", out)
    assert code == 1
    assert "failed: 3 1 at once, a: " in said and why in said
    assert results(out)["runs"][0]["failures"] == 3


def test_a_transcription_in_plain_text(audio, tmp_path):
    with FakeOpenAI(lambda name: ("text/plain; charset=utf-8", " the cat sat\n")) as fake:
        out = tmp_path / "out"
        code, _ = evaluate("whisper", "--base-url", fake.url, "--data", audio, "--out", out)
    assert code == 0
    assert [clip["text"] for clip in results(out)["runs"][0]["clips"]] == ["the cat sat"] * 3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (PAGE, "the answer is a page of HTML"),
        ("[]", "the answer isn't a JSON object: []"),
        ("{}", "the answer has no choices"),
        ('{"choices": {"0": 1}}', "the answer has no choices"),
        ('{"choices": [null]}', "the answer has no choices"),
        ('{"choices": [{"index": 0}]}', "the answer has no message"),
        ('{"choices": [{"message": {"role": "assistant"}}]}', "the answer has no message"),
        ('{"choices": [{"message": {"content": ["x"]}}]}', "the answer's content isn't a text"),
    ],
)
def test_what_is_no_chat_completion_is_a_failure(pages, tmp_path, body, why):
    out = tmp_path / "out"
    with FakeOpenAI(lambda asked: ("application/json", body)) as fake:
        line = ["docvqa", "--base-url", fake.url, "--data", pages, "--out", out]
        code, said = evaluate(*line, "--limit", 2)
    assert code == 1
    assert "failed: 2 1 at once, 0: " in said and why in said


def test_a_chat_completion_of_the_least(pages, tmp_path):
    """Null is an empty answer; a usage of something else is none."""
    body = '{"choices": [{"message": {"content": null}}], "usage": {"completion_tokens": "9"}}'
    out = tmp_path / "out"
    with FakeOpenAI(lambda asked: ("application/json", body)) as fake:
        line = ["docvqa", "--base-url", fake.url, "--data", pages, "--out", out]
        assert evaluate(*line, "--limit", 1)[0] == 0
    (answer,) = results(out)["runs"][0]["answers"]
    assert (answer["text"], answer["score"], answer["tokens"]) == ("", 0.0, None)


def test_an_answer_that_breaks_the_client_is_a_failure(tmp_path):
    from pagealign.evals.asking import ask_all
    from pagealign.evals.journal import Journal

    def ask(item):
        raise {"a": AttributeError, "b": KeyError, "c": TypeError}[item.name](item.name)

    items = [speech.Speech(name, 1.0, "x", name) for name in "abc"]
    with Journal(tmp_path / "answers.jsonl", {}) as journal:
        records = ask_all(items, ask, 1, journal)
    assert [record["error"] for record in records] == ["a", "'b'", "c"]


def test_many_failures_in_a_row_end_the_run(tmp_path):
    for n in range(STOP_AFTER + 3):
        write_wav(tmp_path / "audio" / f"{n:02}.wav")
        (tmp_path / "audio" / f"{n:02}.txt").write_text("x")
    with FakeOpenAI(lambda name: 400) as fake:
        line = ["--base-url", fake.url, "--data", tmp_path / "audio", "--out", tmp_path / "out"]
        code, said = evaluate("whisper", *line)
    assert code == 2
    assert len(fake.asked) == STOP_AFTER
    assert f"{STOP_AFTER} requests in a row failed, the last one: Error code: 400" in said
    assert "--resume" in said


def test_folders_in_other_forms(tmp_path):
    """LibriSpeech's transcripts, and the metadata of an audio folder."""
    write_wav(tmp_path / "l/19/198/19-198-0000.flac")
    (tmp_path / "l/19/198/19-198.trans.txt").write_text("19-198-0000 A WORD\n19-198-0001 B\n")
    write_wav(tmp_path / "m/x.wav")
    write_wav(tmp_path / "m/y.wav")
    (tmp_path / "m/metadata.csv").write_text('file_name,sentence\nx.wav,"one, two"\ny.wav,three\n')
    (item,) = speech.load(str(tmp_path / "l")).items
    assert (item.name, item.transcript) == ("19/198/19-198-0000", "A WORD")
    assert item.seconds == pytest.approx(0.1)
    assert [i.transcript for i in speech.load(str(tmp_path / "m")).items] == ["one, two", "three"]
    assert len(speech.load(str(tmp_path / "m"), limit=1).items) == 1


def test_text_in_another_encoding_is_skipped_and_named(audio, tmp_path):
    (audio / "b.txt").write_bytes("für".encode("latin-1"))
    (audio / "c.txt").write_text("all day long", "utf-8-sig")
    write_wav(audio / "l/1-2-3.flac")
    (audio / "l/1-2.trans.txt").write_bytes("1-2-3 FÜR\n".encode("latin-1"))
    write_wav(audio / "m/x.wav")
    (audio / "m/metadata.csv").write_bytes("file_name,text\nx.wav,für\n".encode("latin-1"))
    corpus = speech.load(str(audio))
    assert [(i.name, i.transcript) for i in corpus.items] == [
        ("a", "the cat sat"), ("c", "all day long"),
    ]  # fmt: skip
    assert {item.name: item.why for item in corpus.skipped} == {
        "b": "b.txt can't be read: it isn't UTF-8",
        "l/1-2-3": "no words: there is no 1-2-3.txt beside it",
        "m/x": "no words: there is no x.txt beside it",
        "l/1-2.trans.txt": "can't be read: it isn't UTF-8",
        "m/metadata.csv": "can't be read: it isn't UTF-8",
    }


def test_a_byte_order_mark_is_no_text(tmp_path, pages):
    """Excel's CSV, and JSON from some editors."""
    write_wav(tmp_path / "m/x.wav")
    (tmp_path / "m/metadata.csv").write_text("file_name,text\nx.wav,one\n", "utf-8-sig")
    write_wav(tmp_path / "j/x.wav")
    row = json.dumps({"file_name": "x.wav", "text": "one"})
    (tmp_path / "j/metadata.jsonl").write_text(row, "utf-8-sig")
    write_wav(tmp_path / "l/1-2-3.wav")
    (tmp_path / "l/1-2.trans.txt").write_text("1-2-3 one\n", "utf-8-sig")
    for folder in "mjl":
        (item,) = speech.load(str(tmp_path / folder)).items
        assert item.transcript == "one"
    body = (pages / "questions.json").read_text()
    (pages / "questions.json").write_text(body, "utf-8-sig")
    assert len(documents.load(str(pages)).items) == 6


def test_what_is_listed_and_not_there_is_named(tmp_path):
    write_wav(tmp_path / "m/inner/x.wav")
    write_wav(tmp_path / "outside.wav")
    (tmp_path / "m/y.m4a").touch()
    rows = ["file_name,text", "inner/../inner/x.wav,one", "gone.wav,two", "y.m4a,three"]
    (tmp_path / "m/metadata.csv").write_text("\n".join([*rows, "../outside.wav,four"]))
    (tmp_path / "m/1-2.trans.txt").write_text("1-2-0 FIVE\n\n")
    corpus = speech.load(str(tmp_path / "m"))
    assert [(i.name, i.transcript) for i in corpus.items] == [("inner/x", "one")]
    there = "in metadata.csv, but not among the folder's recordings"
    assert [(item.name, item.why) for item in corpus.skipped] == [
        ("1-2-0", "in 1-2.trans.txt, but not among the folder's recordings"),
        ("gone.wav", there), ("y.m4a", there), ("../outside.wav", there),
    ]  # fmt: skip


@pytest.mark.parametrize("load", [speech.load, documents.load])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("FILE.zip", "is a file of a kind that isn't read"),
        ("./none", "doesn't exist"),
        ("none/", "doesn't exist"),
        ("a/b/c", "doesn't exist"),
        ("some folder/x", "doesn't exist"),
        ("none.parquet", "doesn't exist"),
        ("some/none.json", "doesn't exist"),
        ("some/none", "is no folder or file here, and as a data set can't be loaded"),
    ],
)
def test_the_hub_is_asked_for_names_only(tmp_path, monkeypatch, load, data, message):
    import datasets

    asked = []

    def load_dataset(*args, **_):
        asked.append(args[0])
        raise FileNotFoundError("no such set")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    Path("FILE.zip").touch()
    with pytest.raises(PagealignError, match=message):
        load(data)
    assert asked == (["some/none"] if data == "some/none" else [])


def parquet(path: Path, rows: list[dict]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def test_rows_without_an_id_are_named_by_what_they_hold(tmp_path, no_cache):
    """The same row of another file is another item, and the same item has the same name."""
    write_wav(tmp_path / "a.wav", 0.1)
    write_wav(tmp_path / "b.wav", 0.2)
    one, two = ({"bytes": (tmp_path / f"{n}.wav").read_bytes(), "path": "x.wav"} for n in "ab")
    names = [
        [item.name for item in speech.load(parquet(tmp_path / file, rows)).items]
        for file, rows in {
            "1.parquet": [{"audio": one, "text": "x"}, {"audio": one, "text": "x"}],
            "2.parquet": [{"audio": two, "text": "x"}, {"audio": one, "text": "x"}],
            "3.parquet": [{"id": 0, "audio": one, "text": "x"}],
        }.items()
    ]
    assert [[name[:6] for name in file] for file in names[:2]] == [["00000-", "00001-"]] * 2
    assert names[0][0] != names[1][0] and names[0][1] == names[1][1]
    assert names[2] == ["0"]


def test_questions_without_an_id_are_named_by_what_they_hold(tmp_path, pages):
    body = json.loads((pages / "questions.json").read_text())
    for row in body["data"]:
        row["questionId"] = None
    (pages / "questions.json").write_text(json.dumps(body))
    first = [item.name for item in documents.load(str(pages)).items]
    body["data"][0]["question"] += "?"
    (pages / "questions.json").write_text(json.dumps(body))
    second = [item.name for item in documents.load(str(pages)).items]
    assert first[0][:6] == second[0][:6] == "00000-" and first[0] != second[0]
    assert first[1:] == second[1:] and len(set(first)) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [(5, "the column text holds int, not text: name another with"), ([5], "holds list, not text")],
)
def test_words_that_are_no_text(tmp_path, no_cache, words, message):
    data = parquet(tmp_path / "d.parquet", [{"audio": b"x", "text": words}])
    with pytest.raises(PagealignError, match=message):
        speech.load(data)


def test_questions_that_are_no_text_are_skipped(pages):
    body = json.loads((pages / "questions.json").read_text())
    for number, change in enumerate(
        ({"answers": 5}, {"answers": {"a": "x"}}, {"answers": [5]}, {"question": None})
    ):
        body["data"][number] |= change
    (pages / "questions.json").write_text(json.dumps(body))
    found = documents.load(str(pages))
    assert [item.name for item in found.items] == ["4", "5"]
    assert [(item.name, item.why) for item in found.skipped] == [
        ("0", "no answers"), ("1", "no answers"), ("2", "no answers"), ("3", "no question"),
    ]  # fmt: skip


def test_a_hugging_face_data_set(tmp_path, monkeypatch):
    """A real Dataset with audio in it, as a Parquet file and as if it came from the hub."""
    import datasets

    write_wav(tmp_path / "a.wav", 0.25)
    rows = {
        "id": ["one", "two"],
        "audio": [
            {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "a.wav"},
            {"bytes": b"nothing", "path": "b.wav"},
        ],
        "sentence": ["hello there", "x"],
    }
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "audio": datasets.Audio(),
            "sentence": datasets.Value("string"),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.to_parquet(tmp_path / "data.parquet")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    calls = []
    real = datasets.load_dataset

    def load_dataset(*args, **options):
        calls.append((args, options))
        return real(*args, **options) if args[0] == "parquet" else made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for data in (str(tmp_path / "data.parquet"), "someone/speech"):
        corpus = speech.load(data, "clean", "test.other", limit=5)
        (item,), (skipped,) = corpus.items, corpus.skipped
        assert (item.name, item.transcript, item.filename) == ("one", "hello there", "a.wav")
        assert item.seconds == pytest.approx(0.25)
        assert item.read() == (tmp_path / "a.wav").read_bytes()
        assert skipped.name == "two" and "broken" in skipped.why
    assert calls[-1] == (("someone/speech", "clean"), {"split": "test.other", "streaming": True})
    with pytest.raises(Exception, match="has no column words, but id, audio, sentence: name one"):
        speech.load("someone/speech", text_column="words")


# --- docvqa -------------------------------------------------------------------------------


def test_docvqa_figures(pages, tmp_path):
    """Five right and one half wrong: scores by hand."""
    numbered(pages)
    answers = right(pages)
    wrong = {"(2)": "nothing like it at all"}

    def answer(asked: str) -> str:
        return next((w for mark, w in wrong.items() if mark in asked), answers(asked).upper())

    out = tmp_path / "out"
    with FakeOpenAI(answer) as fake:
        line = ["docvqa", "--base-url", fake.url, "--data", pages, "--out", out]
        code, said = evaluate(*line, "--concurrency", "1,4", "--prompt", "{question}\nBriefly.")
    assert code == 0, said
    first, second = results(out)["runs"]
    assert first["anls"] == pytest.approx(5 / 6)
    assert first["exact"] == 5
    # the deviation of five ones and a zero over root 6
    assert first["error"] == pytest.approx(np.std([1, 1, 0, 1, 1, 1], ddof=1) / np.sqrt(6))
    assert second["against_first"] == {"value": 0.0, "error": 0.0, "identical": 6, "items": 6}
    assert first["answers"][0]["tokens"] == 3
    assert "6 of 6" in said and "0.8333" in said
    image, text = fake.forms[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text["text"].endswith("(0)\nBriefly.")
    assert fake.forms[0]["temperature"] == 0 and fake.forms[0]["max_tokens"] == 64


def test_images_in_other_formats_are_sent_as_png(tmp_path):
    from PIL import Image

    file = tmp_path / "x.gif"
    Image.new("P", (3, 2)).save(file)
    assert (
        documents.Question("0", "?", ("x",), file).image_url().startswith("data:image/png;base64,")
    )


def test_broken_images_are_skipped_and_named(pages, tmp_path):
    (pages / "page1.png").write_bytes((pages / "page1.png").read_bytes()[:200])
    (pages / "page3.png").unlink()
    (pages / "page4.png").write_text("no image")
    out = tmp_path / "out"
    with FakeOpenAI(lambda asked: "x") as fake:
        code, said = evaluate("docvqa", "--base-url", fake.url, "--data", pages, "--out", out)
    assert code == 0
    assert len(fake.asked) == 3
    assert "skipped: 3 1: broken image page1.png" in said
    assert "3: there is no image page3.png 4: broken image page4.png" in said


def test_a_parquet_file_of_documents(pages, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    data = json.loads((pages / "questions.json").read_text())["data"]
    rows = {
        "questionId": [str(q["questionId"]) for q in data],
        "question": [q["question"] for q in data],
        "image": [{"bytes": (pages / q["image"]).read_bytes(), "path": None} for q in data],
        "answers": [q["answers"] for q in data],
    }
    features = datasets.Features(
        {
            "questionId": datasets.Value("string"), "question": datasets.Value("string"),
            "image": datasets.Image(), "answers": datasets.List(datasets.Value("string")),
        }
    )  # fmt: skip
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "d.parquet")
    found = documents.load(str(tmp_path / "d.parquet"), limit=4).items
    assert [q.name for q in found] == ["0", "1", "2", "3"]
    assert [q.answers for q in found] == [tuple(q["answers"]) for q in data[:4]]
    assert [q.image_url() for q in found] == [
        documents.Question("", "", (), pages / f"page{n}.png").image_url() for n in range(4)
    ]


# --- resume -------------------------------------------------------------------------------


def start(line: list[str], tmp_path: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "pagealign", "eval", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """SIGKILL after five answers of twelve, when both connections wait for another: these two
    are asked again, the five are not, and no answer is missing."""
    pages = numbered(generated(tmp_path / "pages", 12))
    answers = right(pages)
    with FakeOpenAI(answers, hold_after=5, hold=2) as fake:
        line = ["docvqa", "--base-url", fake.url, "--data", str(pages), "--out", "out"]
        line += ["--concurrency", "2"]
        process = start(line, tmp_path)
        try:
            assert fake.held.wait(120), process.communicate(timeout=5)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        answered = fake.asked[:5]
    with (tmp_path / "out/answers.jsonl").open("ab") as file:
        file.write(b'{"key": "2/7", "name": "7", "te')  # as if it died within a write
    with FakeOpenAI(answers) as fake:
        line[2] = fake.url
        process = start([*line, "--resume"], tmp_path)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        again = fake.asked
    assert not set(answered) & set(again)
    assert sorted(answered + again) == sorted(set(answered + again))
    assert len(answered + again) == 12
    (run,) = results(tmp_path / "out")["runs"]
    assert run["anls"] == 1.0 and run["exact"] == 12 and run["failures"] == 0
    names = [
        json.loads(text)["name"]
        for text in (tmp_path / "out/answers.jsonl").read_text().splitlines()[1:]
    ]
    assert sorted(names, key=int) == [str(n) for n in range(12)]


def test_failures_are_tried_again(audio, tmp_path):
    line = ["whisper", "--data", audio, "--out", tmp_path / "out", "--base-url"]
    with FakeOpenAI(lambda name: 500 if name == "b.wav" else "x") as fake:
        assert evaluate(*line, fake.url)[0] == 1
    with FakeOpenAI(lambda name: "x") as fake:
        assert evaluate(*line, fake.url, "--resume")[0] == 0
    assert fake.asked == ["b.wav"]
    with FakeOpenAI(lambda name: "x") as fake:
        code, said = evaluate(*line, fake.url)
        assert code == 2 and "--resume goes on with it, another --out begins anew" in said
        code, said = evaluate(*line, fake.url, "--resume", "--language", "de")
        assert code == 2 and "is of another run (language: 'en' there, 'de' now)" in said
    assert fake.asked == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--config", "clean", "config: None there, 'clean' now"),
        ("--split", "train", "split: 'test' there, 'train' now"),
        ("--text-column", "words", "text_column: None there, 'words' now"),
    ],
)
def test_resume_of_other_data_is_refused(audio, tmp_path, option, value, message):
    line = ["whisper", "--data", audio, "--out", tmp_path / "out", "--base-url"]
    with FakeOpenAI(lambda name: "x") as fake:
        assert evaluate(*line, fake.url)[0] == 0
        code, said = evaluate(*line, fake.url, "--resume", option, value)
    assert code == 2 and message in said
    assert len(fake.asked) == 3


@pytest.mark.parametrize("evaluation", ["whisper", "docvqa"])
def test_out_is_looked_at_before_a_server_starts(audio, pages, tmp_path, monkeypatch, evaluation):
    """Neither a folder with an earlier run, nor one of other settings, nor one that can't be."""

    def started(pinned):
        raise AssertionError("the server is started")

    monkeypatch.setattr(target, "started", started)
    monkeypatch.setattr("pagealign.transcribe.model_of", lambda weights: tmp_path)
    data = {"whisper": audio, "docvqa": pages}[evaluation]
    out = tmp_path / "out"
    line = [evaluation, "--data", data, "--out", out]
    with FakeOpenAI(lambda name: "x") as fake:
        assert evaluate(*line, "--base-url", fake.url)[0] == 0
    line += ["--server", "aligned", "--weights", tmp_path]
    code, said = evaluate(*line)
    assert code == 2 and "holds the answers of an earlier run" in said
    code, said = evaluate(*line, "--resume", "--split", "other")
    assert code == 2 and "is of another run (split: " in said
    (out / "answers.jsonl").unlink()
    (out / "answers.jsonl").mkdir()
    code, said = evaluate(*line)
    assert code == 2 and "answers.jsonl can't be used (Is a directory): use another --out" in said


# --- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "give either --base-url URL or --server"),
        ("--base-url URL --server aligned", "give either --base-url URL or --server"),
        ("--base-url localhost:1", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://[::1", "--base-url http://[::1 isn't a URL: give http://HOST:PORT"),
        ("--base-url http://127.0.0.1:abc", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://127.0.0.1:99999", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://:80", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://a\x01b:80", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("--base-url URL/elsewhere", "isn't what an OpenAI-compatible server says"),
        ("--base-url URL --model other", "doesn't serve 'other' but fake"),
        ("--base-url URL --concurrency 1,x", "--concurrency 1,x: give different numbers from 1"),
        ("--base-url URL --concurrency 0", "give different numbers from 1"),
        ("--base-url URL --concurrency 2,2", "give different numbers from 1"),
        ("--base-url URL --long ago", "--long ago: use auto, send, skip"),
        ("--base-url URL --timestamps line", "--timestamps line: use segment or word"),
        ("--base-url URL --peer whisperx", "--peer whisperx: use transformers, faster-whisper"),
        ("--base-url URL --peer transformers", "--peer beside --base-url needs --weights"),
        ("--base-url URL --weights EMPTY", "--weights EMPTY isn't a Hugging Face model's folder"),
        ("--base-url URL --weights none", "--weights none isn't a Hugging Face model's folder"),
        ("--base-url URL --peer transformers --weights a/b", "a/b isn't a folder with a Whisper"),
        ("--base-url URL --peer transformers --weights LLAMA", "isn't a folder with a Whisper"),
        ("--base-url URL --data ./none", "--data ./none doesn't exist"),
        ("--base-url URL --data EMPTY", "holds no usable recording (0 skipped)"),
        ("--base-url URL --data BROKEN", "(1 skipped; the first: x: broken: libsndfile"),
        ("--base-url URL --out FILE", "--out FILE can't be made: File exists"),
    ],
)  # fmt: skip
def test_whisper_bad_input(audio, tmp_path, line, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "LLAMA").mkdir()
    (tmp_path / "LLAMA/config.json").write_text('{"model_type": "mllama"}')
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN/x.mp3").write_text("x")
    (tmp_path / "BROKEN/x.txt").write_text("x")
    (tmp_path / "FILE").write_text("x")
    with FakeOpenAI(lambda name: "x") as fake:
        words = [
            {"URL": fake.url, "URL/elsewhere": f"{fake.url}/elsewhere"}.get(w, w)
            for w in line.split()
        ]
        words = [
            str(tmp_path / w) if w in ("EMPTY", "BROKEN", "FILE", "LLAMA") else w for w in words
        ]
        defaults = [] if "--data" in words else ["--data", audio]
        if "--out" not in words:
            defaults += ["--out", tmp_path / "out"]
        code, said = evaluate("whisper", *words, *defaults)
    assert code == 2
    assert message in said.replace(f"{tmp_path}/", "")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("NONE", "doesn't exist"),
        ("NONE.json", "doesn't exist"),
        ("NONE.parquet", "doesn't exist"),
        ("EMPTY", "must hold one .json, .jsonl or .parquet file (none): name the file"),
        ("bad.json", "isn't DocVQA's"),
        ("rows.jsonl", "has no column image, but question, answers: name one with a field"),
        ("twice.json", "has the question id 1 twice"),
        ("noimage.json", "no usable question (1 skipped; the first: 1: there is no image x.png)"),
    ],
)  # fmt: skip
def test_docvqa_bad_data(pages, tmp_path, data, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "bad.json").write_text("[1, 2]")
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answers": ["x"]}\n')
    row = {"questionId": 1, "question": "?", "answers": ["x"], "image": "pages/page0.png"}
    (tmp_path / "twice.json").write_text(json.dumps({"data": [row, row]}))
    (tmp_path / "noimage.json").write_text(json.dumps({"data": [row | {"image": "x.png"}]}))
    with FakeOpenAI(lambda name: "x") as fake:
        line = ["docvqa", "--base-url", fake.url, "--out", tmp_path / "out"]
        code, said = evaluate(*line, "--data", tmp_path / data)
    assert code == 2 and fake.asked == []
    assert message in said


def test_docvqa_other_bad_input(pages, tmp_path):
    with FakeOpenAI(lambda name: "x", models=("one", "two")) as fake:
        line = ["docvqa", "--data", pages, "--out", tmp_path / "out"]
        assert "serves one, two: choose with --model" in evaluate(*line, "--base-url", fake.url)[1]
        code, said = evaluate(*line, "--base-url", fake.url, "--model", "two")
        assert code == 0
        assert {form["model"] for form in fake.forms} == {"two"}
        said = evaluate(*line, "--base-url", fake.url, "--prompt", "hm")[1]
        assert "--prompt must say where the question goes: {question}" in said
    assert "--server needs --weights" in evaluate(*line, "--server", "aligned")[1]
    said = evaluate(*line, "--server", "aligned", "--weights", tmp_path)[1]
    assert f"--weights {tmp_path} isn't a Hugging Face model's folder" in said


@pytest.mark.parametrize("body", [{"data": [{"id": 1}, {"id": 2}]}, [], None, {"data": [None]}])
def test_models_that_are_none(audio, tmp_path, body):
    with FakeOpenAI(lambda name: "x") as fake:
        fake.body = body
        line = ["whisper", "--data", audio, "--out", tmp_path / "out"]
        code, said = evaluate(*line, "--base-url", fake.url)
    assert code == 2 and "isn't what an OpenAI-compatible server says" in said


def test_a_missing_package_is_named(audio, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with FakeOpenAI(lambda name: "x") as fake:
        line = ["whisper", "--base-url", fake.url, "--out", tmp_path / "out"]
        said = evaluate(*line, "--data", "someone/speech")[1]
        assert "--data someone/speech needs the package datasets: pip install datasets" in said
        monkeypatch.setattr(peers, "find_spec", lambda name: None)
        said = evaluate(*line, "--data", audio, "--peer", "faster-whisper")[1]
        assert "--peer faster-whisper needs the package faster_whisper: pip install" in said
        assert peers.chosen(["all"]) == []


def whisper_folder(tmp_path: Path) -> Path:
    """What is taken for a Whisper's folder; nothing can be loaded from it."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text('{"model_type": "whisper"}')
    return tmp_path / "weights"


def test_peers_stand_beside_the_server(audio, tmp_path, monkeypatch):
    heard = {"a.wav": "the cat sat", "b.wav": "on the mat", "c.wav": "all day long"}
    monkeypatch.setattr(
        peers, "_transformers", lambda *_: iter([" the cat sat", "on a mat", "all day long"])
    )
    weights = whisper_folder(tmp_path)
    out = tmp_path / "out"
    with FakeOpenAI(heard.__getitem__) as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", out]
        code, said = evaluate(*line, "--peer", "transformers", "--weights", weights)
    assert code == 0
    server, peer = results(out)["runs"]
    assert (server["wer"], peer["label"]) == (0, "transformers")
    assert peer["wer"] == pytest.approx(1 / 9)
    assert peer["against_first"]["identical"] == 2
    assert peer["latency"] == [None] * 3
    assert "2 of 3" in said


def test_what_transformers_would_not_hear_is_refused_first(audio, tmp_path, monkeypatch):
    """A long clip, or a language to be found out; without the clip, all is asked."""
    write_wav(audio / "long.wav", 31)
    (audio / "long.txt").write_text("a long speech")
    monkeypatch.setattr(peers, "_transformers", lambda items, *_: iter(["x"] * len(items)))
    with FakeOpenAI(lambda name: "x", version="0.5.23") as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", tmp_path / "out"]
        line += ["--weights", whisper_folder(tmp_path), "--peer", "transformers"]
        code, said = evaluate(*line)
        assert code == 2
        assert "hears 30 s of a clip, and 1 are longer (the first: long, 31.0 s)" in said
        code, said = evaluate(*line, "--long", "skip", "--language", "auto")
        assert code == 2 and "--peer transformers is told the language" in said
        assert fake.asked == []
        assert evaluate(*line, "--long", "skip")[0] == 0
    assert len(fake.asked) == 3


@pytest.mark.parametrize(("language", "given"), [("auto", None), ("de", "de")])
def test_faster_whisper_finds_the_language_out(tmp_path, monkeypatch, language, given):
    """Stand-ins for the two packages: what the peer is asked for."""
    asked = []

    class WhisperModel:
        def __init__(self, *_, **__):
            pass

        def transcribe(self, audio, **options):
            asked.append(options["language"])
            return iter([SimpleNamespace(text=" x")]), None

    class TransformersConverter:
        def __init__(self, *_, **__):
            pass

        def convert(self, folder):
            pass

    monkeypatch.setitem(sys.modules, "faster_whisper", SimpleNamespace(WhisperModel=WhisperModel))
    converters = SimpleNamespace(TransformersConverter=TransformersConverter)
    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(converters=converters))
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", converters)
    item = speech.Speech("a", 31.0, "x", "a.wav", content=b"x")
    weights = whisper_folder(tmp_path)
    peers.check(["faster-whisper"], weights, language, [item])
    (record,) = peers.transcribe(
        "faster-whisper", [item], weights, language, Console(file=io.StringIO())
    )
    assert record["text"] == "x" and asked == [given]


def test_software_decides_who_cuts_long_audio():
    assert target.Target("u", "m", "SGLang 0.5.23").cuts_long_audio
    assert target.Target("u", "m", "SGLang 0.6.0rc1").cuts_long_audio
    assert not target.Target("u", "m", "SGLang 0.5.18").cuts_long_audio
    assert not target.Target("u", "m", "").cuts_long_audio


# --- compare ------------------------------------------------------------------------------


def test_two_evaluations_are_compared(audio, tmp_path):
    """The second drops a word of b: 1 of 9 words more, and one text of three differs."""
    for out, b in (("1", "on the mat"), ("2", "on mat")):
        heard = {"a.wav": "the cat sat", "b.wav": b, "c.wav": "all day long"}
        with FakeOpenAI(heard.__getitem__) as fake:
            line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", tmp_path / out]
            assert evaluate(*line)[0] == 0
    code, said = evaluate("compare", tmp_path / "1", tmp_path / "2")
    assert code == 1
    assert "+0.1111" in said and "2 of 3" in said and "b: 'on the mat' / 'on mat'" in said
    code, said = evaluate("compare", tmp_path / "1", tmp_path / "1")
    assert code == 0 and "+0.0000" in said and "3 of 3" in said


def test_compare_names_the_settings_that_differ(audio, tmp_path):
    (tmp_path / "other").mkdir()
    write_wav(tmp_path / "other/a.wav")
    (tmp_path / "other/a.txt").write_text("the cat sat")
    with FakeOpenAI(lambda name: "x") as fake:
        line = ["whisper", "--base-url", fake.url]
        evaluate(*line, "--data", audio, "--out", tmp_path / "1")
        evaluate(*line, "--data", tmp_path / "other", "--language", "de", "--out", tmp_path / "2")
    code, said = evaluate("compare", tmp_path / "1", tmp_path / "2")
    assert code == 0
    assert "settings that differ: 2 " in said
    assert f"data: '{audio}' / '{tmp_path}/other'" in said and "language: 'en' / 'de'" in said
    assert "only one of the two answered: 1 a server, model fake, 1 at once: 2, b, c" in said
    said = evaluate("compare", tmp_path / "1", tmp_path / "1")[1]
    assert "differ" not in said.replace("difference", "") and "only one" not in said


@pytest.mark.parametrize(
    "body",
    [
        "[]", "{", "null", '{"eval": "whisper"}', '{"eval": "whisper", "runs": []}',
        '{"eval": "whisper", "runs": [{}]}', '{"eval": "whisper", "runs": {"a": 1}}',
        '{"eval": ["whisper"], "runs": [{}]}', '{"eval": "other", "runs": [{}]}',
        '{"eval": "whisper", "server": "s", "runs": [{"label": "l", "concurrency": 1}]}',
        '{"eval": "whisper", "runs": [{"label": "l", "concurrency": 1, "clips": []}]}',
        '{"eval": "docvqa", "server": "s", "runs": [{"label": "l", "concurrency": 1, '
        '"answers": [{"name": "a", "text": "x"}]}]}',
        '{"eval": "docvqa", "server": "s", "runs": [{"label": "l", "concurrency": 1, '
        '"answers": [{"name": "a", "text": "x", "score": "y"}]}]}',
    ],
)  # fmt: skip
def test_compare_of_what_is_no_evaluation(tmp_path, body):
    (tmp_path / "results.json").write_text(body)
    code, said = evaluate("compare", tmp_path, tmp_path)
    assert code == 2 and "isn't the results.json of an evaluation" in said


def test_compare_bad_input(audio, tmp_path):
    code, said = evaluate("compare", tmp_path, tmp_path)
    assert code == 2 and "isn't the results.json of an evaluation" in said
    body = {
        "eval": "whisper",
        "server": "s",
        "runs": [{"label": "l", "concurrency": 1, "clips": [], "answers": []}],
    }
    for name, evaluation in (("1", "whisper"), ("2", "docvqa")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(body | {"eval": evaluation}))
    assert "is of whisper" in evaluate("compare", tmp_path / "1", tmp_path / "2")[1]
    assert "no answered item in common" in evaluate("compare", tmp_path / "1", tmp_path / "1")[1]

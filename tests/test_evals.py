"""``pagealign eval`` against a server in this process: figures, resume, each bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
from document_pages import generated
from fake_openai import FakeOpenAI
from typer.testing import CliRunner

from pagealign.cli import app
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


# --- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "give either --base-url URL or --server"),
        ("--base-url URL --server aligned", "give either --base-url URL or --server"),
        ("--base-url localhost:1", "isn't a URL: give http://HOST:PORT"),
        ("--base-url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("--base-url URL/elsewhere", "isn't what an OpenAI-compatible server says"),
        ("--base-url URL --model other", "doesn't serve 'other' but fake"),
        ("--base-url URL --concurrency 1,x", "--concurrency 1,x: give different numbers from 1"),
        ("--base-url URL --concurrency 0", "give different numbers from 1"),
        ("--base-url URL --concurrency 2,2", "give different numbers from 1"),
        ("--base-url URL --long ago", "--long ago: use auto, send, skip"),
        ("--base-url URL --timestamps line", "--timestamps line: use segment or word"),
        ("--base-url URL --peer whisperx", "--peer whisperx: use transformers, faster-whisper"),
        ("--base-url URL --data ./none", "--data ./none doesn't exist"),
        ("--base-url URL --data EMPTY", "holds no usable recording (0 skipped)"),
        ("--base-url URL --data BROKEN", "(1 skipped; the first: x: broken: libsndfile"),
        ("--base-url URL --out FILE", "--out FILE can't be made: File exists"),
    ],
)  # fmt: skip
def test_whisper_bad_input(audio, tmp_path, line, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN/x.mp3").write_text("x")
    (tmp_path / "BROKEN/x.txt").write_text("x")
    (tmp_path / "FILE").write_text("x")
    with FakeOpenAI(lambda name: "x") as fake:
        words = [
            {"URL": fake.url, "URL/elsewhere": f"{fake.url}/elsewhere"}.get(w, w)
            for w in line.split()
        ]
        words = [str(tmp_path / w) if w in ("EMPTY", "BROKEN", "FILE") else w for w in words]
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


def test_peers_stand_beside_the_server(audio, tmp_path, monkeypatch):
    heard = {"a.wav": "the cat sat", "b.wav": "on the mat", "c.wav": "all day long"}
    monkeypatch.setattr(
        peers, "_transformers", lambda *_: iter([" the cat sat", "on a mat", "all day long"])
    )
    monkeypatch.setattr("pagealign.transcribe.model_of", lambda weights: tmp_path)
    out = tmp_path / "out"
    with FakeOpenAI(heard.__getitem__) as fake:
        line = ["whisper", "--base-url", fake.url, "--data", audio, "--out", out]
        code, said = evaluate(*line, "--peer", "transformers")
    assert code == 0
    server, peer = results(out)["runs"]
    assert (server["wer"], peer["label"]) == (0, "transformers")
    assert peer["wer"] == pytest.approx(1 / 9)
    assert peer["against_first"]["identical"] == 2
    assert peer["latency"] == [None] * 3
    assert "2 of 3" in said


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


def test_compare_bad_input(audio, tmp_path):
    code, said = evaluate("compare", tmp_path, tmp_path)
    assert code == 2 and "isn't the results.json of an evaluation" in said
    body = {
        "eval": "whisper",
        "server": "s",
        "runs": [{"label": "l", "concurrency": 1, "clips": []}],
    }
    for name, evaluation in (("1", "whisper"), ("2", "docvqa")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(body | {"eval": evaluation}))
    assert "is of whisper" in evaluate("compare", tmp_path / "1", tmp_path / "2")[1]
    assert "no answered item in common" in evaluate("compare", tmp_path / "1", tmp_path / "1")[1]

"""The demo's and the transcriber's judgement and reports, with a fake server."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import wave
from dataclasses import replace
from pathlib import Path

import pytest

from pagealign import demo, report, transcribe
from pagealign.assets import Clip
from pagealign.client import Client, Generation, at_once, explained
from pagealign.demo import Case, Expect, Row, as_expected, check, chosen, exit_code
from pagealign.errors import PagealignError
from pagealign.hf_reference import Reference
from pagealign.server import PoolChecks, Server, ServerDied, ServerSpec

FAKE = Path(__file__).with_name("fake_server.py")
REFUSAL = "sgl_kernel._errors.StrictnessError: Unsupported page size for decode attention: 1"
FREED = "AssertionError in free_segment (paged.py:352): assert torch.equal("


# --- the verdict ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "died", "problems", "verdict"),
    [
        (Expect.EXACT, None, (), True),
        (Expect.EXACT, None, ("austen-all alone: token 3 of 90 differs",), False),
        (Expect.EXACT, REFUSAL, (), False),
        (Expect.REFUSED, REFUSAL, (), True),
        (Expect.REFUSED, "RuntimeError: page_size 1 is not supported", (), True),
        (Expect.REFUSED, FREED, (), False),
        (Expect.REFUSED, None, (), False),
        (Expect.FREED_TWICE, FREED, (), True),
        (Expect.FREED_TWICE, "AssertionError in _debug_check_no_duplicate_pages (paged.py:9)", (),
         True),
        (Expect.FREED_TWICE, "ImportError: libcuda.so.1", (), False),
        (Expect.FREED_TWICE, "ended by SIGKILL, as when memory runs out", (), False),
        (Expect.FREED_TWICE, None, (), False),
    ],
)  # fmt: skip
def test_as_expected(
    expect: Expect, died: str | None, problems: tuple[str, ...], verdict: bool
) -> None:
    assert as_expected(expect, died, problems) is verdict


def reference(*tokens: int) -> Reference:
    return Reference(tokens, "words", tuple(-0.5 for _ in tokens), tuple(1.0 for _ in tokens))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "same", "problem"),
    [
        ((7, 8, 9), (-0.5, -0.5, -0.5), True, None),
        ((7, 8, 9), (-0.5, -0.5009, -0.5), True, None),
        ((7, 8, 9), (-0.5, -0.52, -0.5), True, "x: a log-probability is -0.5200, not -0.5000"),
        ((7, 8, 9), (-0.5, math.nan, -0.5), True, "x: a log-probability is nan, not -0.5000"),
        ((7, 1, 9), (-0.5, -0.5, -0.5), False, "x: token 1 of 3 differs"),
        ((7, 8), (-0.5, -0.5), False, "x: token 2 of 3 differs"),
        ((7, 8, 9, 9), (-0.5,) * 4, False, "x: token 3 of 3 differs"),
    ],
)
def test_check(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], same: bool, problem: str | None
) -> None:
    work = demo._Work()
    assert check(Generation(tokens, "", logprobs, {}), reference(7, 8, 9), "x", work) is same
    assert work.problems == ((problem,) if problem else ())


def row(**fields: object) -> Row:
    base = Row(
        name="aligned-intel_xpu-64",
        tree="aligned",
        backend="intel_xpu",
        page_size=64,
        poison=True,
        checks="busy",
        expected=Expect.EXACT.value,
        as_expected=True,
        died=None,
        problems=(),
        clips=6,
        alone=6,
        together=6,
        wer=1 / 71,
        pool_start=9920,
        pool_end=9920,
        text_beside=3,
        startup_seconds=25.0,
        seconds=61.4,
        log=Path("/out/aligned-intel_xpu-64.log"),
    )
    return replace(base, **fields)


STOCK = row(
    name="stock-torch_native-64",
    tree="stock",
    backend="torch_native",
    poison=False,
    expected=Expect.FREED_TWICE.value,
    died=FREED,
    alone=0,
    wer=None,
    pool_end=None,
    text_beside=None,
    log=Path("/out/stock-torch_native-64.log"),
)


def test_exit_code() -> None:
    wrong = row(as_expected=False, problems=("x",))
    assert exit_code([]) == exit_code([STOCK, row()]) == 0
    assert exit_code([row(), wrong]) == 1
    # stock is a release that is not ours: reported, not our failure
    assert exit_code([replace(STOCK, as_expected=False), row()]) == 0


def test_chosen_rows() -> None:
    assert chosen([]) == list(demo.CASES) and len(demo.CASES) == 5
    assert [c.name for c in chosen(["aligned-intel_xpu-128"])] == ["aligned-intel_xpu-128"]
    with pytest.raises(PagealignError, match="no row 'x': use one of stock-intel_xpu-64, "):
        chosen(["x"])


# --- the report -------------------------------------------------------------------------


def test_the_reports(tmp_path: Path) -> None:
    rows = [STOCK, row(), row(as_expected=False, alone=5, problems=("a | b differs",))]
    as_json, as_markdown = demo.write_report(rows, tmp_path / "new")
    read = json.loads(as_json.read_text())["rows"]
    assert [r["as_expected"] for r in read] == [True, True, False]
    assert read[0]["died"] == FREED and read[1]["log"] == "/out/aligned-intel_xpu-64.log"
    lines = as_markdown.read_text().splitlines()
    assert lines[4] == (
        "| stock | torch_native | 64 | dies: pages freed twice | yes |  |  |  |  |  | 61 |"
    )
    assert lines[5] == (
        "| aligned | intel_xpu | 64 | exact, poisoned | yes | 6/6 | 6/6 | 1.4% | 3 "
        "| 9920/9920 | 61 |"
    )
    assert lines[6].startswith("| aligned | intel_xpu | 64 | wrong, poisoned | NO | 5/6 | 6/6 |")
    assert f"- stock-torch_native-64: {FREED} (log: `stock-torch_native-64.log`)" in lines
    assert "- aligned-intel_xpu-64: a | b differs (log: `aligned-intel_xpu-64.log`)" in lines


def test_a_died_row_that_should_not_have_says_so() -> None:
    assert demo._result(row(died="KeyError: 1", as_expected=False)) == "died"


def test_markdown_cells_stay_in_their_cell() -> None:
    columns = (report.Column("a", str), report.Column("b", lambda r: r.upper(), right=True))
    assert report.markdown(["x|y\nz"], columns) == (
        "| a | b |\n|---|---:|\n| x\\|y z | X\\|Y Z |\n"
    )


def test_the_table_shows_brackets_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    console = report.console()
    widest = row(pool_start=10240, pool_end=10240, text_beside=13, seconds=1143.0)
    console.print(report.table([STOCK, widest], demo.COLUMNS, "title"))
    out = capsys.readouterr().out
    assert "dies: pages freed twice" in out and "10240/10240" in out  # not folded
    assert max(map(len, out.splitlines())) <= report.WIDTH
    console.print(report.table(["[red]x"], (report.Column("c", str),)))
    assert "[red]x" in capsys.readouterr().out


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    path = report.write(tmp_path / "a" / "r.md", "one")
    report.write(path, "two")
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]


# --- a whole run, on a fake server ------------------------------------------------------


@pytest.fixture
def spoken(tmp_path: Path) -> list[Clip]:
    """Six recordings that differ by a sample."""
    out = []
    for i in range(6):
        path = tmp_path / f"clip-{i}.wav"
        with wave.open(str(path), "wb") as w:
            w.setparams((1, 2, 16_000, 0, "NONE", ""))
            w.writeframes(bytes([i, 0]) * 160)
        out.append(Clip(path.stem, path, 0.01, f"word {chr(97 + i)}"))
    return out


@pytest.fixture
def answers(spoken: list[Clip], monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """What the fake server says, right as it stands; ``use`` it after changing it."""
    return {
        c.name: {"tokens": [i, 9], "logprobs": [-0.5, -0.5], "text": f"Word {chr(97 + i)}."}
        for i, c in enumerate(spoken)
    }


@pytest.fixture
def run_demo(spoken: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run one case of the demo on a fake server; the exit code and the only row."""

    def run(answers: dict[str, dict], mode: str = "ok", **fields: object) -> tuple[int, dict]:
        case = replace(Case("aligned", "intel_xpu", 64, Expect.EXACT, PoolChecks.BUSY), **fields)
        want = {
            c.name: Reference((i, 9), f"Word {chr(97 + i)}.", (-0.5, -0.5), (1.0, 1.0))
            for i, c in enumerate(spoken)
        }
        canned = {hashlib.sha256(c.path.read_bytes()).hexdigest(): answers[c.name] for c in spoken}
        canned |= {key: answers[key] for key in ("free", "seconds") if key in answers}
        monkeypatch.setenv("FAKE_ANSWERS", json.dumps(canned))
        monkeypatch.setattr(demo, "CASES", (case,))
        monkeypatch.setattr(demo, "clips", lambda: spoken)
        monkeypatch.setattr(demo, "whisper_base", lambda: tmp_path)
        monkeypatch.setattr(demo, "references", lambda *_: list(want.values()))
        monkeypatch.setattr("pagealign.trees.build_tree", lambda _: tmp_path)
        monkeypatch.setattr(
            demo,
            "ServerSpec",
            lambda **f: ServerSpec(**f, launcher=(sys.executable, str(FAKE), mode)),
        )
        code = demo.run(tmp_path / "out")
        (found,) = json.loads((tmp_path / "out" / "demo.json").read_text())["rows"]
        return code, found

    return run


def test_a_right_server_passes(run_demo, answers: dict[str, dict]) -> None:
    code, found = run_demo(answers | {"seconds": 0.3}, beside=True)
    assert (code, found["as_expected"], found["problems"]) == (0, True, [])
    assert (found["alone"], found["together"], found["clips"]) == (6, 6, 6)
    assert found["wer"] == 0.0 and found["text_beside"] > 0
    assert found["pool_start"] == found["pool_end"] > 0


def test_a_wrong_token_fails_the_demo(
    run_demo, answers: dict[str, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["clip-3"]["tokens"] = [3, 8]
    code, found = run_demo(answers)
    assert (code, found["as_expected"], found["alone"], found["together"]) == (1, False, 5, 5)
    assert found["problems"] == [
        "clip-3 alone: token 1 of 2 differs",
        "clip-3 together: token 1 of 2 differs",
    ]
    assert "aligned-intel_xpu-64: expected tokens equal transformers', got wrong" in (
        capsys.readouterr().out
    )


def test_a_wrong_text_fails_the_demo(run_demo, answers: dict[str, dict]) -> None:
    answers["clip-1"]["text"] = "Word x."
    code, found = run_demo(answers | {"seconds": 0.3}, beside=True)
    assert code == 1 and found["problems"] == ["clip-1: the transcription API says 'Word x.'"]
    assert found["wer"] == pytest.approx(1 / 12)


def test_a_page_lost_fails_the_demo(run_demo, answers: dict[str, dict]) -> None:
    code, found = run_demo(answers | {"free": 9_856})
    assert code == 1
    assert found["problems"] == [
        "free slots: 9856 at the start, 9856 at the end, the pool has 9920"
    ]


def test_a_death_at_start_fails_an_aligned_row_and_suits_stocks(
    run_demo, answers: dict[str, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_demo(answers, "dies")
    assert (code, found["as_expected"]) == (1, False)
    code, found = run_demo(answers, "dies", tree="stock", expect=Expect.REFUSED)
    assert (code, found["as_expected"]) == (0, True)
    out = capsys.readouterr().out
    assert "stock-intel_xpu-64.log" in out and "Unsupported page size" in out


def test_a_death_at_work_has_the_logs_reason(run_demo, answers: dict[str, dict]) -> None:
    code, found = run_demo(answers, "dies-later")
    assert code == 1 and found["alone"] == 0
    assert found["died"].startswith("sgl_kernel._errors.StrictnessError: Unsupported page size")


# --- the client -------------------------------------------------------------------------


def test_the_client(
    spoken: list[Clip], answers: dict[str, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = spoken[2]
    digest = hashlib.sha256(clip.path.read_bytes()).hexdigest()
    monkeypatch.setenv("FAKE_ANSWERS", json.dumps({digest: answers[clip.name]}))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    spec = ServerSpec(tmp_path, tmp_path, launcher=(sys.executable, str(FAKE), "ok"))
    with Server(spec, tmp_path / "log") as server, Client(server.url) as client:
        assert client.transcribe(clip.path) == "Word c."
        found = client.transcribe_tokens(clip.path)
        assert found == Generation((2, 9), "Word c.", (-0.5, -0.5), {"prompt_tokens": 4})
        assert client.generate_text("x").tokens == (5, 6)
        assert client.healthy()


def test_a_failed_request_is_explained(spoken: list[Clip], tmp_path: Path) -> None:
    spec = ServerSpec(tmp_path, tmp_path, launcher=(sys.executable, str(FAKE), "dies-later"))
    with (
        Server(spec, tmp_path / "log") as server,
        Client(server.url) as client,
        pytest.raises(ServerDied, match="Unsupported page size .* attention: 1"),
        explained(server),
    ):
        client.transcribe(spoken[0].path)


def test_at_once_keeps_the_order() -> None:
    assert at_once(lambda n: n * n, range(10), 4) == [n * n for n in range(10)]


# --- transcribe -------------------------------------------------------------------------


@pytest.fixture
def fake_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoken: list[Clip]) -> None:
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pagealign.trees.build_tree", lambda _: tmp_path)
    monkeypatch.setattr(transcribe, "whisper_base", lambda: tmp_path)
    monkeypatch.setattr(transcribe, "resolve_device", lambda _: "cpu")


def use_fake(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(
        transcribe,
        "ServerSpec",
        lambda **f: ServerSpec(**f, launcher=(sys.executable, str(FAKE), mode)),
    )


def test_transcribe(
    fake_tree: None,
    spoken: list[Clip],
    answers: dict[str, dict],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    canned = {hashlib.sha256(c.path.read_bytes()).hexdigest(): answers[c.name] for c in spoken}
    monkeypatch.setenv("FAKE_ANSWERS", json.dumps(canned))
    use_fake(monkeypatch, "ok")
    spoken[1].path.with_suffix(".txt").write_text("word x\n")
    assert transcribe.run([spoken[0].path, spoken[1].path], concurrency=2) == 0
    out = capsys.readouterr().out
    known = next(line for line in out.splitlines() if "clip-1" in line)
    unknown = next(line for line in out.splitlines() if "clip-0" in line)
    assert "Word b." in known and "50.0%" in known
    assert "Word a." in unknown and "%" not in unknown


def test_transcribe_reports_a_death(
    fake_tree: None,
    spoken: list[Clip],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_fake(monkeypatch, "dies")
    assert transcribe.run([spoken[0].path]) == 1
    out = capsys.readouterr().out
    assert "Unsupported page size for prefill attention: 1" in out and "log: " in out


def test_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert transcribe.model_of(tmp_path) == tmp_path
    assert transcribe.model_of(Path("openai/whisper-tiny")) == Path("openai/whisper-tiny")
    with pytest.raises(PagealignError, match="isn't a Hugging Face Whisper folder"):
        transcribe.model_of(tmp_path / "none")

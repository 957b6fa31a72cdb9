"""The command line: what reaches the command modules, errors as lines, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagealign.cli import app
from pagealign.errors import PagealignError
from pagealign.paths import REPO, cache_dir


@pytest.fixture
def module(monkeypatch):
    """Puts a stand-in with the given ``run`` in place of a command's module."""

    def replace(name: str, **functions) -> None:
        stand_in = types.SimpleNamespace(**functions)
        monkeypatch.setitem(sys.modules, f"pagealign.{name}", stand_in)
        monkeypatch.setattr("pagealign." + name, stand_in, raising=False)

    return replace


def raising(error: BaseException):
    def run(**_):
        raise error

    return run


def test_transcribe_hands_on_its_defaults(module):
    calls = []
    module("transcribe", run=lambda **options: calls.append(options) or 0)
    result = CliRunner().invoke(app, ["transcribe"])
    assert result.exit_code == 0, result.output
    assert calls == [
        {
            "audio": [],
            "tree": "aligned",
            "sglang": None,
            "page_size": 64,
            "backend": "intel_xpu",
            "device": "auto",
            "model": None,
            "concurrency": 1,
            "language": "en",
        }
    ]


def test_transcribe_hands_on_what_is_given(module):
    calls = []
    module("transcribe", run=lambda **options: calls.append(options) or 0)
    line = (
        "transcribe a.wav b.wav --tree stock --sglang my/sglang --page-size 128 --backend "
        "torch_native --device cpu --model my/whisper --concurrency 4 --language de"
    )
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert calls == [
        {
            "audio": [Path("a.wav"), Path("b.wav")],
            "tree": "stock",
            "sglang": Path("my/sglang"),
            "page_size": 128,
            "backend": "torch_native",
            "device": "cpu",
            "model": Path("my/whisper"),
            "concurrency": 4,
            "language": "de",
        }
    ]


def test_demo_hands_on_its_options(module):
    calls = []
    module("demo", run=lambda **options: calls.append(options) or 0)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    line = "demo --out o --only one --only two"
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert calls == [
        {"out": Path("reports/demo"), "only": []},
        {"out": Path("o"), "only": ["one", "two"]},
    ]


def test_transcribe_on_the_alternative(module):
    calls = []
    module("transcribe", run=lambda **options: calls.append(options) or 0)
    assert CliRunner().invoke(app, ["transcribe", "--tree", "varlen"]).exit_code == 0
    assert calls[0]["tree"] == "varlen"


def test_compare_hands_on_its_options(monkeypatch):
    calls = []
    monkeypatch.setattr("pagealign.compare.run.run", lambda **options: calls.append(options) or 0)
    line = (
        "compare --quick --out o --trace a.csv --trace b.jsonl --trace-model m --pool-slots 99 "
        "--steps-per-second 2 --max-running 7 --page-size 64 --page-size 128 --backend intel_xpu "
        "--parallel dask --jobs 3 --scheduler h:1"
    )
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert CliRunner().invoke(app, ["compare"]).exit_code == 0
    given = {
        "quick": True,
        "out": Path("o"),
        "traces": [Path("a.csv"), Path("b.jsonl")],
        "model": "m",
        "rate": 2.0,
        "pool_slots": 99,
        "max_running": 7,
        "page_sizes": [64, 128],
        "backend": "intel_xpu",
        "parallel": "dask",
        "jobs": 3,
        "scheduler": "h:1",
    }
    left = {
        "quick": False,
        "out": Path("reports/compare"),
        "traces": [],
        "model": "whisper-large-v3",
        "rate": 1.0,
        "pool_slots": 131_072,
        "max_running": 256,
        "page_sizes": [],
        "backend": None,
        "parallel": "processes",
        "jobs": -1,
        "scheduler": None,
    }
    assert calls == [given, left]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--trace {missing}", "missing.csv"),
        ("--trace {negative}", "negative.csv, line 2"),
        ("--trace {good} --backend intel_xpu --page-size 32", "32"),
        ("--trace {good} --pool-slots 1000", "1000"),
        ("--trace {good} --trace-model gpt", "gpt"),
        ("--trace {good} --backend intel-xpu", "intel-xpu"),
        ("--page-size 100000000000000000000", "100000000000000000000"),
        ("--parallel slurm", "slurm"),
    ],
)
def test_compare_refuses_before_it_runs(tmp_path, monkeypatch, options, told):
    monkeypatch.setattr("pagealign.compare.run.build_tree", None, raising=False)
    monkeypatch.setattr("pagealign.compare.run.workers", None)
    head = "arrival,encoder_len,decode_len\n"
    (tmp_path / "negative.csv").write_text(head + "0,1500,-4\n")
    (tmp_path / "good.csv").write_text(head + "0,1500,4\n")
    files = {n: tmp_path / f"{n}.csv" for n in ("missing", "negative", "good")}
    line = ["compare", "--quick", "--out", str(tmp_path / "out"), *options.format(**files).split()]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2, result.output
    assert told in result.stderr and result.stderr.count("\n") == 1
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_commands_code_is_the_exit_code(module, code):
    module("demo", run=lambda **_: code)
    assert CliRunner().invoke(app, ["demo"]).exit_code == code


@pytest.mark.parametrize("command", ["transcribe", "demo"])
def test_an_error_is_one_line_on_stderr_and_code_2(module, command):
    message = "no such file: [bold]x.wav[/bold]; name a recording " + "y" * 100
    module(command, run=raising(PagealignError(message)))
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"pagealign: {message}\n"


def test_an_error_is_red_on_a_terminal(module, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    module("demo", run=raising(PagealignError("broken")))
    result = CliRunner().invoke(app, ["demo"], color=True)
    assert "\x1b[31m" in result.stderr


def test_an_interruption_is_code_130_without_a_traceback(module):
    module("demo", run=raising(KeyboardInterrupt()))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 130
    assert result.stderr == "pagealign: interrupted\n"


def test_another_exception_is_not_hidden(module):
    module("demo", run=raising(ZeroDivisionError()))
    assert isinstance(CliRunner().invoke(app, ["demo"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "line",
    [
        "transcribe --page-size 0",
        "transcribe --page-size many",
        "transcribe --concurrency 0",
        "transcribe --tree varnished",
        "tree",
        "nonsense",
    ],
)
def test_wrong_usage_is_code_2(module, line):
    module("transcribe", run=lambda **_: 0)
    assert CliRunner().invoke(app, line.split()).exit_code == 2


def test_tree_prints_the_path_and_nothing_else(module, tmp_path):
    module("trees", build_tree=lambda name: tmp_path / name)
    result = CliRunner().invoke(app, ["tree", "aligned"])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'aligned'}\n")


def test_help_imports_no_heavy_package():
    code = (
        "import sys\n"
        "from pagealign.cli import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, stdout=subprocess.DEVNULL)


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m pagealign`` with the standard library and nothing else."""
    env = {"PYTHONPATH": str(REPO), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    command = [sys.executable, "-S", "-m", "pagealign", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_without_typer_a_command_says_what_to_do():
    result = bare("demo")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "make env" in result.stderr


def test_without_typer_doctor_still_reports():
    result = bare("doctor")
    assert result.returncode == 1
    assert result.stderr == ""
    assert "typer" not in result.stdout
    assert "torch" in result.stdout and "make env" in result.stdout


def test_without_typer_doctor_refuses_what_it_does_not_know():
    result = bare("doctor", "--jsn")
    assert result.returncode == 2
    assert "--jsn" in result.stderr


@pytest.mark.parametrize("command", ["demo", "soak", "parity --quick", "compare --quick"])
def test_a_file_for_a_folder_is_told_before_anything_runs(tmp_path, command):
    out = tmp_path / "out"
    out.write_text("mine")
    result = CliRunner().invoke(app, [*command.split(), "--out", str(out)])
    assert result.exit_code == 2
    assert result.output == f"pagealign: --out {out} can't be made: File exists\n"
    assert out.read_text() == "mine"


def in_a_file(tmp_path: Path) -> dict[str, str]:
    """Variables that put the cache below a file."""
    file = tmp_path / "file"
    file.touch()
    more = {"PAGEALIGN_CACHE": str(file / "cache")}
    return {key: value for key, value in os.environ.items() if key != "PAGEALIGN_WHEEL"} | more


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["pagealign", "tree", "aligned"], 2),
        (["pagealign", "assets"], 2),
        (["pagealign.series", "check"], 1),
        (["pagealign.parity.gpu_prepare", "OUT"], 1),
    ],
)
def test_a_cache_that_cannot_be_made_is_one_line(tmp_path, command, code):
    command = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPO, env=in_a_file(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done
    assert done.stderr.count("\n") == 1
    assert "Not a directory" in done.stderr
    assert "PAGEALIGN_CACHE=" in done.stderr


def test_a_read_only_cache_is_refused_only_to_write(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_dir("trees", to_write=False) == tmp_path / "trees"
    with pytest.raises(PagealignError, match="Permission denied.*PAGEALIGN_CACHE="):
        cache_dir("trees")


@pytest.mark.parametrize("script", ["setup_env.sh", "setup_bench_env.sh"])
def test_the_scripts_say_so_too(tmp_path, script):
    env = in_a_file(tmp_path) | {"PYTHON": sys.executable}
    done = subprocess.run([REPO / "scripts" / script], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert "PAGEALIGN_CACHE=" in done.stderr

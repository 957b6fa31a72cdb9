"""The journal of answers: what survives, what is refused."""

from __future__ import annotations

import json

import pytest

from pagealign.errors import PagealignError
from pagealign.evals.journal import Journal, check

RUN = {"eval": "x", "prompt": "p", "pair": (1, 2)}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "out" / "answers.jsonl"
    with Journal(file, RUN) as journal:
        journal.append({"key": "1/a", "text": "ä\nb"})
        journal.append({"key": "1/b", "error": "gone"})
    return file


def test_each_line_is_whole_and_on_its_own(path):
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"run": {"eval": "x", "prompt": "p", "pair": [1, 2]}},
        {"key": "1/a", "text": "ä\nb"},
        {"key": "1/b", "error": "gone"},
    ]


def test_resume_knows_answers_and_tries_failures_again(path):
    with Journal(path, RUN, resume=True) as journal:
        assert journal.answered("1/a")
        assert not journal.answered("1/b")
        assert not journal.answered("4/a")
        journal.append({"key": "1/b", "text": "now"})
    with Journal(path, RUN, resume=True) as journal:
        assert journal.answered("1/b")
        assert journal.records["1/b"]["text"] == "now"


@pytest.mark.parametrize("torn", [b'{"key": "1/c", "te', b'{"key": "1/c"}', b"\xc3"])
def test_a_torn_last_line_is_dropped(path, torn):
    before = path.read_bytes()
    path.write_bytes(before + torn)
    with Journal(path, RUN, resume=True) as journal:
        assert set(journal.records) == {"1/a", "1/b"}
        journal.append({"key": "1/c", "text": "c"})
    assert path.read_bytes() == before + b'{"key": "1/c", "text": "c"}\n'


def test_a_torn_first_line_is_a_new_run(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"run": {"ev')
    with Journal(file, RUN) as journal:
        assert journal.records == {}
    assert json.loads(file.read_text())["run"]["eval"] == "x"


def test_resume_of_nothing_begins(tmp_path):
    with Journal(tmp_path / "answers.jsonl", RUN, resume=True) as journal:
        assert journal.records == {}


@pytest.mark.parametrize(
    ("run", "resume", "line", "message"),
    [
        (RUN, False, b"", "--resume goes on with it"),
        (RUN | {"prompt": "q"}, True, b"", "prompt: 'p' there, 'q' now"),
        (RUN, True, b"no json\n", r"answers.jsonl:4 can't be read"),
        (RUN, True, b'{"no": "key"}\n', r"answers.jsonl:4 can't be read"),
    ],
)
def test_refusals_leave_the_file_alone(path, run, resume, line, message):
    path.write_bytes(path.read_bytes() + line + b'{"key": "1/z", "text": ""}\n')
    before = path.read_bytes()
    with pytest.raises(PagealignError, match=message):
        Journal(path, run, resume=resume)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("known", "resume", "line", "message"),
    [
        ({"eval": "x"}, False, b"", "--resume goes on with it"),
        ({"eval": "x", "prompt": "q"}, True, b"", "prompt: 'p' there, 'q' now"),
        ({"more": 1}, True, b"", "more: None there, 1 now"),
        ({"eval": "x"}, True, b"no json\n", r"answers.jsonl:4 can't be read"),
        ({"eval": "x"}, True, b'{"key": 5}\n', r"answers.jsonl:4 can't be read"),
    ],
)
def test_check_refuses_what_a_journal_would(path, known, resume, line, message):
    path.write_bytes(path.read_bytes() + line)
    before = path.read_bytes()
    with pytest.raises(PagealignError, match=message):
        check(path, known, resume=resume)
    assert path.read_bytes() == before


def test_check_lets_pass_what_a_journal_would(path, tmp_path):
    check(path, {"eval": "x", "pair": (1, 2)}, resume=True)
    check(tmp_path / "none" / "answers.jsonl", RUN, resume=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "torn.jsonl").write_bytes(b'{"run": {"ev')
    check(tmp_path / "torn.jsonl", RUN, resume=False)


@pytest.mark.parametrize("first", [b"[]\n", b'{"run": []}\n', b"3\n"])
def test_a_first_line_of_something_else(tmp_path, first):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(first)
    for refuse in (Journal, check):
        with pytest.raises(PagealignError, match="its first line doesn't say of which"):
            refuse(file, RUN, resume=True)


def test_what_cannot_be_opened_or_written(tmp_path, path):
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "file").touch()
    for refuse in (Journal, check):
        with pytest.raises(PagealignError, match="can't be used .Is a directory.: use another"):
            refuse(tmp_path / "a.jsonl", RUN, resume=True)
        with pytest.raises(PagealignError, match="can't be used .* use another --out"):
            refuse(tmp_path / "file" / "a.jsonl", RUN, resume=True)
    with (
        Journal(path, RUN, resume=True) as journal,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(PagealignError, match="can't be used .No space left"),
    ):
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        journal.append({"key": "1/c", "text": "c"})


def test_one_run_at_a_time(path):
    with Journal(path, RUN, resume=True), pytest.raises(PagealignError, match="in use"):
        Journal(path, RUN, resume=True)
    with Journal(path, RUN, resume=True), pytest.raises(PagealignError, match="in use"):
        check(path, RUN, resume=True)

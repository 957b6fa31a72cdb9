"""Why a server died, from its log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*):(?: (?P<text>.*))?$|^(?P<bare>[A-Z][\w.]*)$")
_FRAME = re.compile(
    r'^  File "(?:.*[/\\])?(?P<file>[^"/\\]+)", line (?P<line>\d+), in (?P<function>.+)$'
)
_ARGPARSE = re.compile(r"^\S+: error: (.*)$")
_START = "Traceback (most recent call last):"
# SGLang logs the tracebacks of optional parts that it then does without.
_HARMLESS = ("torchcodec", "libavutil")


@dataclass(frozen=True)
class Failure:
    """The exception that ended a traceback: its line, and where it was raised."""

    error: str
    where: str  # "function (file.py:line): code"


def _failures(lines: list[str]) -> list[Failure]:
    """The tracebacks in ``lines``, in order."""
    found, at = [], 0
    while at < len(lines):
        if not lines[at].endswith(_START):
            at += 1
            continue
        at += 1
        where = ""
        while at < len(lines) and (lines[at].startswith(" ") or not lines[at]):
            if frame := _FRAME.match(lines[at]):
                where = f"{frame['function']} ({frame['file']}:{frame['line']})"
            elif lines[at].startswith("    ") and lines[at].strip("^~ ") and ": " not in where:
                where += f": {lines[at].strip()}"
            at += 1
        if at == len(lines):
            break
        match = _ERROR.match(lines[at])
        if match is None:
            continue
        error = lines[at].strip()
        at += 1
        if match["kind"] and not match["text"]:  # a message that starts on the next line
            while at < len(lines) and not lines[at].strip():
                at += 1
            error += f" {lines[at].strip()}" if at < len(lines) else ""
        found.append(Failure(error, where))
    return found


def reason(log: str, returncode: int | None = None) -> str:
    """One line: what ended the server that wrote ``log``.

    The last traceback's exception that isn't one SGLang carries on after, with the place
    that raised it where an assertion has no message; else a refused argument; else how
    the process ended. ``returncode`` is Popen's, negative for a signal.
    """
    lines = [_STAMP.sub("", _COLOUR.sub("", line)) for line in log.splitlines()]
    failures = [f for f in _failures(lines) if not any(h in f.error for h in _HARMLESS)]
    if failures:
        last = failures[-1]
        bare = last.error == "AssertionError" and last.where
        return f"AssertionError in {last.where}" if bare else last.error
    for line in reversed(lines):
        if match := _ARGPARSE.match(line):
            return match[1]
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        hint = ", as when memory runs out" if -returncode == signal.SIGKILL else ""
        return f"ended by {name}{hint}; nothing in the log says why"
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    return f"exit code {returncode}; the log ends with: {last_line[:200]}"

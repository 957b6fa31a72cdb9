"""What a server's answer holds, read without trust: anything may listen at a URL."""

from __future__ import annotations

import json
from typing import Any, Protocol

Body = dict[str, Any]


class Raw(Protocol):
    """The openai client's raw response."""

    @property
    def headers(self) -> Any: ...

    @property
    def text(self) -> str: ...


def transcript(raw: Raw) -> Body:
    """``{"text": ...}`` of a transcription, with ``segments`` and ``words`` if it has some.

    A server that ignores the format may answer in plain text. Raises ValueError for a page
    of HTML and for anything else that isn't a transcription.
    """
    if _kind(raw) == "text/plain":
        return {"text": _sendable(raw.text.strip())}
    body = _object(raw)
    if not isinstance(body.get("text"), str):
        raise ValueError(f"the answer has no text: {_short(body)}")
    more = {name: body[name] for name in ("segments", "words") if body.get(name)}
    return _sendable({"text": body["text"].strip(), **more})


def chat(raw: Raw) -> tuple[str, Body]:
    """The first choice's text, and the usage (empty if there is none).

    A content of null is an empty text, as a model's that says nothing. Raises ValueError for
    a page of HTML and for anything else that isn't a chat completion.
    """
    body = _object(raw)
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise ValueError(f"the answer has no choices: {_short(body)}")
    message = choice.get("message")
    if not isinstance(message, dict) or "content" not in message:
        raise ValueError(f"the answer has no message: {_short(body)}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the answer's content isn't a text: {_short(content)}")
    usage = body.get("usage")
    return _sendable((content or "").strip()), usage if isinstance(usage, dict) else {}


def count(usage: Body, name: str) -> int | None:
    """A count of tokens in ``usage``; None where it isn't a number."""
    found = usage.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _kind(raw: Raw) -> str:
    kind = raw.headers.get("content-type", "").partition(";")[0].strip().lower()
    page = raw.text[:200].lstrip().lower().startswith(("<!doctype", "<html"))
    if page or kind in ("text/html", "application/xhtml+xml"):
        raise ValueError(f"the answer is a page of HTML, not a model's: {_short(raw.text)}")
    return kind


def _object(raw: Raw) -> Body:
    _kind(raw)
    try:
        body = json.loads(raw.text)
    except (ValueError, RecursionError):
        raise ValueError(f"the answer isn't JSON: {_short(raw.text)}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the answer isn't a JSON object: {_short(body)}")
    return body


def _sendable(value: Any) -> Any:
    """``value`` as it is; UnicodeEncodeError, a ValueError, where UTF-8 can't hold it."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _short(value: object) -> str:
    return " ".join(str(value).split())[:120]

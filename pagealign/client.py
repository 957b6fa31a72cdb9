"""Talk to a server: OpenAI's transcription API, and SGLang's own for tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from pagealign.errors import PagealignError
from pagealign.hf_reference import MAX_NEW_TOKENS
from pagealign.server import Server, ServerDied

T, R = TypeVar("T"), TypeVar("R")
TIMEOUT = 600.0  # seconds


@dataclass(frozen=True)
class Generation:
    """An answer of ``/generate``.

    ``tokens`` are the new ids, end-of-text included; ``logprobs`` their natural logs, one
    each; ``meta`` is SGLang's ``meta_info`` (prompt_tokens, completion_tokens, ...).
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    meta: dict[str, Any]


class Client:
    """A client for the server at ``url``, for use in a ``with``; its methods are
    thread-safe. Errors are httpx's and openai's own."""

    def __init__(self, url: str, language: str = "en") -> None:
        from openai import OpenAI

        self.language = language
        # a proxy in the environment isn't for a server on this machine
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False)
        self.openai = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(timeout=TIMEOUT, trust_env=False),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()

    def transcribe(self, audio: Path) -> str:
        """The text that ``/v1/audio/transcriptions`` gives for a recording."""
        with audio.open("rb") as f:
            answer = self.openai.audio.transcriptions.create(
                file=f, model="whisper", language=self.language, temperature=0
            )
        return answer.text.strip()

    def transcribe_tokens(
        self,
        audio: Path,
        limit: int = MAX_NEW_TOKENS,
        *,
        stop: str | None = None,
        rid: str | None = None,
        patience: float = TIMEOUT,
    ) -> Generation:
        """The same request through ``/generate``, which gives ids and log-probabilities.

        ``stop`` ends the text before that string, ``rid`` is a name to ``abort`` it by, and
        after ``patience`` seconds without an answer the connection is closed and
        httpx.TimeoutException raised. English only: ``/generate`` takes no language, and
        English is what Whisper's processor then assumes.
        """
        data = base64.b64encode(audio.read_bytes()).decode()
        return self._generate(
            {"text": "", "audio_data": f"data:audio/wav;base64,{data}", "rid": rid},
            {"max_new_tokens": limit, "stop": stop},
            patience,
        )

    def abort(self, rid: str) -> None:
        """End the request of that name, if it still runs."""
        _checked(self.http.post("/abort_request", json={"rid": rid}))

    def generate_text(self, text: str, limit: int = 8) -> Generation:
        """A request without audio: the decoder alone, an empty encoder."""
        return self._generate({"text": text}, {"max_new_tokens": limit, "ignore_eos": True})

    def healthy(self) -> bool:
        """Whether ``/health_generate`` answers 200: it generates one token from id 0."""
        return self.http.get("/health_generate").status_code == 200

    def _generate(
        self, what: dict[str, Any], sampling: dict[str, Any], patience: float = TIMEOUT
    ) -> Generation:
        body = what | {
            "sampling_params": {"temperature": 0, **sampling},
            "return_logprob": True,
        }
        answer = _checked(self.http.post("/generate", json=body, timeout=patience)).json()
        chosen = answer["meta_info"].pop("output_token_logprobs")
        return Generation(
            tokens=tuple(answer["output_ids"]),
            text=answer["text"].strip(),
            logprobs=tuple(float(logprob) for logprob, *_ in chosen),
            meta=answer["meta_info"],
        )


@contextmanager
def explained(server: Server) -> Iterator[None]:
    """Within, a request that fails raises ServerDied, with the reason in the server's log,
    if that is why, and PagealignError with the server's answer otherwise."""
    from openai import OpenAIError

    try:
        yield
    except (httpx.HTTPError, OpenAIError) as error:
        # a dying scheduler takes the rest with it, after a few seconds of diagnostics
        if server.died_within(20):
            raise ServerDied(server.reason(), server.log) from error
        raise PagealignError(f"the server refused a request: {error}") from error


def _checked(response: httpx.Response) -> httpx.Response:
    """``response``; an HTTPError with the server's own words if it is an error."""
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.request.url.path} answered {response.status_code}: {response.text[:300]}",
            request=response.request,
            response=response,
        )
    return response


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose end waits for its work, unless an exception, such as an interruption,
    ends it: the server that the work waits for has to be stopped first then."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def at_once(work: Callable[[T], R], items: Sequence[T], limit: int) -> list[R]:
    """``work`` of each item, at most ``limit`` at a time; results in the items' order."""
    with threads(limit) as pool:
        return list(pool.map(work, items))

"""The server that is asked: one that runs already, or the pinned one, started for it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from pagealign.errors import PagealignError
from pagealign.paths import cache_dir
from pagealign.server import PoolChecks, Server, ServerSpec, resolve_device

TIMEOUT = 600.0  # seconds for one answer
# The releases whose wheels were read for how they treat long audio.
CUTS_LONG_AUDIO = (0, 5, 19)


@dataclass(frozen=True)
class Target:
    """A server that answers: its OpenAI base (with ``/v1``), the model's name there, what it
    says it is ("SGLang 0.5.23", or empty), and ``check``, which raises if it died."""

    url: str
    model: str
    software: str = ""
    check: Callable[[], None] = lambda: None

    @property
    def cuts_long_audio(self) -> bool:
        """Whether its transcription endpoint is known to cut audio above 30 s by itself."""
        match = re.match(r"SGLang (\d+)\.(\d+)\.(\d+)", self.software)
        return bool(match) and tuple(map(int, match.groups())) >= CUTS_LONG_AUDIO

    def openai(self):
        """An openai client; OPENAI_API_KEY is sent if it is set. Nothing is retried."""
        from openai import OpenAI

        return OpenAI(
            base_url=self.url,
            api_key=_api_key(),
            max_retries=0,
            http_client=httpx.Client(timeout=TIMEOUT, trust_env=not _is_local(self.url)),
        )


@dataclass(frozen=True)
class PinnedServer:
    """What ``--server`` asks for: the tree, and how it is run. ``weights`` is a Hugging Face
    folder or a hub name; ``dtype`` float32 on a CPU, float16 elsewhere if None."""

    tree: str
    weights: Path
    page_size: int = 64
    backend: str = "intel_xpu"
    device: str = "auto"
    concurrency: int = 1
    extra_args: tuple[str, ...] = ()


def connect(base_url: str, model: str | None = None) -> Target:
    """The server at ``base_url``, with or without ``/v1``.

    Raises PagealignError where nothing answers, where it has no models, or where ``model``
    isn't among them; without ``model`` it must serve exactly one.
    """
    _check_url(base_url)
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {_api_key()}"}
    local = _is_local(base_url)
    with httpx.Client(timeout=30, trust_env=not local, headers=headers) as client:
        try:
            answer = client.get(f"{root}/v1/models")
            served = [card["id"] for card in answer.raise_for_status().json()["data"]]
            if not all(isinstance(name, str) for name in served):
                raise TypeError("a model's id isn't a text")
        except httpx.TransportError as error:
            raise PagealignError(
                f"no server answers at {root} ({error}): start it, or let --server aligned "
                "start one"
            ) from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise PagealignError(
                f"{root}/v1/models isn't what an OpenAI-compatible server says ({error}): check "
                "--base-url"
            ) from error
        software = _software(client, root)
    if not served:
        raise PagealignError(f"{root} serves no model")
    if model is None and len(served) > 1:
        raise PagealignError(f"{root} serves {', '.join(served)}: choose with --model")
    if model is not None and model not in served:
        raise PagealignError(f"{root} doesn't serve {model!r} but {', '.join(served)}")
    return Target(f"{root}/v1", model or served[0], software)


@contextmanager
def started(pinned: PinnedServer) -> Iterator[Target]:
    """The pinned server on one of our trees, ready within and gone afterwards."""
    from pagealign.trees import build_tree

    device = resolve_device(pinned.device)
    spec = ServerSpec(
        tree=build_tree(pinned.tree),
        model=pinned.weights,
        backend=pinned.backend,
        page_size=pinned.page_size,
        device=device,
        # the real kernels take half precision only
        dtype="float32" if device == "cpu" else "float16",
        pool_checks=PoolChecks.IDLE,
        concurrency=pinned.concurrency,
        extra_args=pinned.extra_args,
    )
    log = cache_dir("logs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}.log"
    with Server(spec, log) as server:

        def check() -> None:
            # a dying scheduler takes the rest with it, after a few seconds of diagnostics
            if server.died_within(20):
                server.check_alive()

        found = connect(server.url)
        yield Target(found.url, found.model, found.software, check)


def check_given(base_url: str | None, server: object | None) -> None:
    """Raises PagealignError unless exactly one of the two is given, or for a bad URL."""
    if (base_url is None) == (server is None):
        raise PagealignError("give either --base-url URL or --server aligned, stock or varlen")
    if base_url is not None:
        _check_url(base_url)


def weights_of(weights: Path | None) -> Path:
    """``--weights``: Whisper-base if None, a folder, or a hub name; PagealignError for
    anything else."""
    from pagealign.transcribe import model_of

    try:
        return model_of(weights)
    except PagealignError:
        if weights is None:
            raise  # Whisper-base can't be fetched, which it says
        raise PagealignError(
            f"--weights {weights} isn't a Hugging Face model's folder (no config.json there)"
        ) from None


def describe(pinned: PinnedServer | None, target: Target) -> str:
    """The server, for the reports and the journal: not its port, which changes."""
    software = target.software or "a server"
    if pinned is None:
        return f"{software}, model {target.model}"
    return f"{software}, {pinned.tree}, {pinned.backend}, page size {pinned.page_size}"


@contextmanager
def reached(
    base_url: str | None, pinned: PinnedServer | None, model: str | None
) -> Iterator[Target]:
    """The one of the two that is given; PagealignError unless exactly one is."""
    check_given(base_url, pinned)
    if pinned is not None:
        with started(pinned) as target:
            yield target
    else:
        assert base_url is not None
        yield connect(base_url, model)


def parse_concurrency(text: str) -> tuple[int, ...]:
    """``1,4,16`` -> (1, 4, 16); PagealignError for anything else."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) != len(found):
        raise PagealignError(f"--concurrency {text}: give different numbers from 1, such as 1,4,16")
    return found


def _software(client: httpx.Client, root: str) -> str:
    """What the server says of itself; SGLang's own endpoint, nothing where there is none."""
    try:
        answer = client.get(f"{root}/server_info")
        version = answer.json()["version"] if answer.status_code == 200 else ""
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""
    return f"SGLang {version}" if version else ""


def _check_url(url: str) -> None:
    try:
        # the two parsers refuse different things: a port of letters, a bracket left open
        parts, _ = urlsplit(url), httpx.URL(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good:
        raise PagealignError(f"--base-url {url} isn't a URL: give http://HOST:PORT")


def _api_key() -> str:
    return os.environ.get("OPENAI_API_KEY") or "none"


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")

"""Accuracy of whole models: logits, tokens and word error rate, against transformers.

Each tree runs its own scheduler on ``intel_xpu`` at page size 64, one recording or image at a
time, each on fresh pages (what the stock allocator does with pages that it got back twice is
not a matter of accuracy, see ``fragmentation``). The truth is Hugging Face transformers with
the same weights in float64, given the text that the tree chose, so that every step compares;
beside it stand transformers' own errors in the dtype that the tree ran in. Whisper-base is asked
all six recordings in float32, every other one in bfloat16.

In full mode a real server per tree answers the recordings too, all three at the same time; of
its answers the tokens and their log-probabilities can be seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pagealign.assets import clips, whisper_base
from pagealign.client import Client, Generation, at_once, explained
from pagealign.compare.accuracy_row import Row, errors
from pagealign.compare.approaches import APPROACHES
from pagealign.evals.scores import count_errors
from pagealign.hf_reference import MAX_NEW_TOKENS, SAMPLE_RATE, prompt
from pagealign.server import PoolChecks, Server, ServerSpec
from pagealign.trees import build_tree

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 64
DTYPES = ("float32", "bfloat16")
SERVER_BYTES = 4 << 30  # of memory: all processes of one take 3.3 GB at their most
SLOTS_PER_REQUEST = 2048  # more than a recording's 1500 + 448 tokens take, in whole pages
IMAGES = (1, 2)  # per request to the tiny Mllama: E = 68 and 136
IMAGE_TOKENS = 8


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked.

    ``requests`` are the fields of ``pagealign.bed.Request`` by name of case. ``logits_in``
    loads transformers' model in a dtype; what it returns gives, for features, prompt and
    tokens, the logits ``(len(tokens), vocabulary)`` that each token was chosen from.
    ``words_of`` gives a ``Row``'s ``words`` and ``word_errors`` for a case's tokens, where its
    words are known.
    """

    name: str
    folder: Path
    requests: dict[str, dict[str, Any]]
    logits_in: Callable[[torch.dtype], Callable[..., torch.Tensor]]
    words_of: Callable[[str, Sequence[int]], dict[str, int]] = lambda _case, _tokens: {}
    # what ``logits`` knows; a copy by ``dataclasses.replace`` shares it
    _models: dict[torch.dtype, Callable[..., torch.Tensor]] = field(
        default_factory=dict, repr=False
    )
    _known: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    def logits(self, dtype: torch.dtype, case: str, tokens: Sequence[int]) -> torch.Tensor:
        """Transformers' for a case's request, each worked out once: trees and dtypes mostly
        choose the same tokens."""
        key = dtype, case, tuple(tokens)
        if key not in self._known:
            if dtype not in self._models:
                self._models[dtype] = self.logits_in(dtype)
            asked = self.requests[case]
            self._known[key] = self._models[dtype](asked["features"], asked["input_ids"], tokens)
        return self._known[key]


@dataclass(frozen=True)
class Job:
    """A subject in a dtype; ``requests`` is the file that a tree's process reads."""

    subject: Subject
    dtype: str
    requests: Path

    def arguments(self, outputs: Path) -> dict[str, str]:
        """For ``answers``, as JSON can carry them."""
        return {
            "model": str(self.subject.folder),
            "dtype": self.dtype,
            "requests": str(self.requests),
            "outputs": str(outputs),
        }


def jobs(quick: bool, out: Path) -> list[Job]:
    """What each tree is asked; models and requests that are made for it go to ``out``."""
    import torch

    mllama = tiny_mllama_subject(out)
    asked = [(mllama, dtype) for dtype in DTYPES]
    if not quick:
        whisper = whisper_subject()
        every_other = dict(list(whisper.requests.items())[1::2])
        asked += [
            (whisper, "float32"),
            # Without bf16 arithmetic a processor takes 20 seconds over a recording.
            (dataclasses.replace(whisper, requests=every_other), "bfloat16"),
        ]
    found = []
    for n, (subject, dtype) in enumerate(asked):
        requests = out / f"requests-{n}.pt"
        torch.save(list(subject.requests.values()), requests)
        found.append(Job(subject, dtype, requests))
    return found


def answers(job: dict[str, str]) -> list[dict[str, Any]]:
    """In a tree: its answers to a job's requests, each a dict of ``tokens`` and ``logits``
    (a row per token)."""
    import torch

    from pagealign.bed import Bed, Request

    requests = torch.load(job["requests"])
    bed = Bed(
        Path(job["model"]),
        "intel_xpu",
        PAGE_SIZE,
        dtype=job["dtype"],
        max_total_tokens=SLOTS_PER_REQUEST * len(requests),
        poison=False,
    )
    steps: list[torch.Tensor] = []
    bed.model.logits_processor.register_forward_hook(
        lambda _module, _args, out: steps.append(out.next_token_logits.clone())
    )
    found = []
    for request in requests:
        steps.clear()
        tokens = bed.run_one(Request(**request)).output_ids
        found.append({"tokens": tokens, "logits": torch.cat(steps)[: len(tokens)]})
    bed.close()
    return found


def rows(subject: Subject, dtype: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[Row]:
    """The rows of a subject in a dtype, from each approach's ``answers``."""
    import torch

    for n, case in enumerate(subject.requests):
        for name, cases in found.items():
            tokens = cases[n]["tokens"]
            truth = subject.logits(torch.float64, case, tokens)
            plain = subject.logits(getattr(torch, dtype), case, tokens)
            yield Row(
                level="model",
                approach=name,
                subject=f"{subject.name}, logits",
                dtype=dtype,
                **_of_tokens(subject, case, tokens, truth),
                **errors(cases[n]["logits"], truth, plain),
            )


@contextlib.contextmanager
def servers(out: Path) -> Iterator[dict[str, Server]]:
    """A server of Whisper-base per tree, in float32, by the approach's name. As many as the memory
    has room for are started, but not waited for: a start takes a core most of a minute. Logs go
    to the folder ``out``."""
    slots = SLOTS_PER_REQUEST * (len(clips()) + 1)  # fresh pages for each recording
    room = max(1, psutil.virtual_memory().available // SERVER_BYTES)
    found = {}
    with contextlib.ExitStack() as stack:
        for one in APPROACHES:
            spec = ServerSpec(
                build_tree(one.tree),
                whisper_base(),
                page_size=PAGE_SIZE,
                kernels=one.kernels,
                pool_checks=PoolChecks.OFF,
                concurrency=1,
                slots=slots,
            )
            found[one.name] = server = Server(spec, out / f"server-{one.name}.log")
            stack.callback(server.stop)
            if len(found) <= room:
                server.start()
        yield found


def server_rows(started: dict[str, Server]) -> Iterator[Row]:
    """The recordings of ``whisper_subject`` through each of the ``servers``, one at a time:
    the errors are those of the log-probabilities of the tokens that it chose. Those that are
    not started yet are, each where another has ended."""
    import torch

    subject, recordings = whisper_subject(), clips()

    def ask(server: Server) -> list[Generation]:
        server.start()  # and stop: it would end with this thread
        server.wait_ready()
        with Client(server.url) as client, explained(server):
            answers = [client.transcribe_tokens(clip.path) for clip in recordings]
        server.stop()
        return answers

    limit = sum(server.started for server in started.values())
    answered = at_once(ask, list(started.values()), limit)
    for (name, server), found in zip(started.items(), answered, strict=True):
        dtype = server.spec.dtype
        for clip, answer in zip(recordings, found, strict=True):
            truth, plain = (
                subject.logits(d, clip.name, answer.tokens)
                for d in (torch.float64, getattr(torch, dtype))
            )
            chosen = torch.tensor(answer.tokens).unsqueeze(1)
            yield Row(
                level="server",
                approach=name,
                subject=f"{subject.name}, log-probabilities",
                dtype=dtype,
                **_of_tokens(subject, clip.name, answer.tokens, truth),
                **errors(
                    torch.tensor(answer.logprobs, dtype=torch.float64),
                    truth.log_softmax(-1).gather(1, chosen).flatten(),
                    plain.log_softmax(-1).gather(1, chosen).flatten(),
                ),
            )


def _of_tokens(
    subject: Subject, case: str, tokens: Sequence[int], truth: torch.Tensor
) -> dict[str, Any]:
    """What a ``Row`` says of a case's tokens, given the logits in float64."""
    import torch

    return {
        "case": case,
        "page_size": PAGE_SIZE,
        "tokens": len(tokens),
        "tokens_same": int((truth.argmax(-1) == torch.tensor(tokens)).sum()),
        **subject.words_of(case, tokens),
    }


@functools.cache
def whisper_subject() -> Subject:
    """Whisper-base and the six recordings, fetched at first use."""
    import soundfile
    from transformers import WhisperProcessor

    folder, recordings = whisper_base(), clips()
    processor = WhisperProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    start = tuple(tokenizer.convert_tokens_to_ids(list(prompt())))
    spoken = {clip.name: clip.transcript for clip in recordings}

    def request(path: Path) -> dict[str, Any]:
        samples, _ = soundfile.read(path, dtype="float32")  # mono, 16 kHz
        features = processor.feature_extractor(
            samples, sampling_rate=SAMPLE_RATE, padding="max_length", return_tensors="pt"
        ).input_features
        asked = {"input_ids": start, "features": features}
        return asked | {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": False}

    def words_of(case: str, tokens: Sequence[int]) -> dict[str, int]:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        counted = count_errors(spoken[case], text)
        return {"words": counted.words, "word_errors": counted.word_errors}

    def logits_in(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return _whisper_logits(folder, dtype)

    requests = {clip.name: request(clip.path) for clip in recordings}
    return Subject("Whisper-base", folder, requests, logits_in, words_of)


def _whisper_logits(folder: Path, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    import torch
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def logits(features, start, tokens):
        text = torch.tensor([[*start, *tokens[:-1]]])
        found = model(input_features=features.to(dtype), decoder_input_ids=text).logits
        return found[0, len(start) - 1 :]

    return logits


def tiny_mllama_subject(out: Path) -> Subject:
    """The tiny random Mllama, made in ``out``, and random images."""
    import torch

    from pagealign.tiny_models import tiny_mllama

    folder = out / "tiny-mllama"
    folder.mkdir(parents=True, exist_ok=True)
    tiny_mllama(folder)
    generator = torch.Generator().manual_seed(0)
    requests = {
        f"{count} image{'s' * (count > 1)}": {
            "input_ids": (2, *[5] * count, 10, 11),  # 5 stands for an image
            "features": torch.randn(1, count, 4, 3, 56, 56, generator=generator),
            "max_new_tokens": IMAGE_TOKENS,
        }
        for count in IMAGES
    }
    return Subject(
        "tiny Mllama",
        folder,
        requests,
        lambda dtype: _mllama_logits(folder, dtype),
    )


def _mllama_logits(folder: Path, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    import torch
    from transformers import MllamaForConditionalGeneration

    model = MllamaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    # The intermediate states are the inputs of the indexed layers, in Meta's model and in
    # SGLang; transformers 5.19 takes their outputs.
    vision = model.model.vision_model
    vision.intermediate_layers_indices = [i - 1 for i in vision.intermediate_layers_indices]

    @torch.inference_mode()
    def logits(features, start, tokens):
        text = torch.tensor([[*start, *tokens[:-1]]])
        count, tiles = features.shape[1:3]
        found = model(
            input_ids=text,
            pixel_values=features.to(dtype),
            aspect_ratio_ids=torch.full((1, count), tiles),  # 1 x 4 tiles is number 4
            aspect_ratio_mask=torch.ones(1, count, tiles, dtype=torch.long),
            # every token sees every tile, as in SGLang; without a mask transformers 5.19
            # makes cross-attention causal
            cross_attention_mask=torch.ones(1, text.shape[1], count, tiles),
            use_cache=False,
        ).logits
        return found[0, len(start) - 1 :]

    return logits

"""Accuracy of whole models: logits, tokens and word error rate, against transformers.

Each tree runs its own scheduler on ``intel_xpu`` at page size 64, one recording or image at a
time, each on fresh pages (what the stock allocator does with pages that it got back twice is
not a matter of accuracy, see ``fragmentation``). The truth is Hugging Face transformers with
the same weights in float64, given the text that the tree chose, so that every step compares;
beside it stand transformers' own errors in the dtype that the tree ran in.

In full mode a real server per tree answers the recordings too; of its answers the tokens and
their log-probabilities can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagealign import wer
from pagealign.assets import clips, whisper_base
from pagealign.client import Client, explained
from pagealign.compare.accuracy_row import Row, errors
from pagealign.compare.approaches import APPROACHES
from pagealign.hf_reference import MAX_NEW_TOKENS, SAMPLE_RATE, prompt
from pagealign.server import PoolChecks, Server, ServerSpec, terminable
from pagealign.trees import build_tree

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 64
DTYPES = ("float32", "bfloat16")
SLOTS_PER_REQUEST = 2048  # more than a recording's 1500 + 448 tokens take, in whole pages
IMAGES = (1, 2)  # per request to the tiny Mllama: E = 68 and 136
IMAGE_TOKENS = 8


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked.

    ``requests`` are the fields of ``pagealign.bed.Request`` by name of case. ``logits_in``
    loads transformers' model in a dtype; what it returns gives, for features, prompt and
    tokens, the logits ``(len(tokens), vocabulary)`` that each token was chosen from.
    ``wer_of`` is the word error rate of a case's tokens, where its words are known.
    """

    name: str
    folder: Path
    requests: dict[str, dict[str, Any]]
    logits_in: Callable[[torch.dtype], Callable[..., torch.Tensor]]
    wer_of: Callable[[str, Sequence[int]], float | None]


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

    found = []
    for n, subject in enumerate(
        [tiny_mllama_subject(out)] + ([] if quick else [whisper_subject()])
    ):
        requests = out / f"requests-{n}.pt"
        torch.save(list(subject.requests.values()), requests)
        found += [Job(subject, dtype, requests) for dtype in DTYPES]
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

    truth_of = _once(subject.logits_in(torch.float64))
    plain_of = _once(subject.logits_in(getattr(torch, dtype)))
    for n, (case, request) in enumerate(subject.requests.items()):
        for name, cases in found.items():
            tokens = tuple(cases[n]["tokens"])
            truth = truth_of(request, tokens)
            yield Row(
                level="model",
                approach=name,
                subject=f"{subject.name}, logits",
                case=case,
                dtype=dtype,
                page_size=PAGE_SIZE,
                tokens=len(tokens),
                tokens_same=int((truth.argmax(-1) == torch.tensor(tokens)).sum()),
                wer=subject.wer_of(case, tokens),
                **errors(cases[n]["logits"], truth, plain_of(request, tokens)),
            )


def server_rows(out: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """Whisper-base's recordings through a real server per tree, float32: the errors are
    those of the log-probabilities of the tokens that it chose."""
    import torch

    subject, recordings = whisper_subject(), clips()
    truth_of, plain_of = (_once(subject.logits_in(d)) for d in (torch.float64, torch.float32))
    for one in APPROACHES:
        say(f"accuracy: a server, {one.title}")
        spec = ServerSpec(
            build_tree(one.tree),
            subject.folder,
            page_size=PAGE_SIZE,
            kernels=one.kernels,
            pool_checks=PoolChecks.OFF,
            concurrency=1,
            slots=SLOTS_PER_REQUEST * (len(recordings) + 1),
        )
        log = out / f"server-{one.name}.log"
        with (
            terminable(),
            Server(spec, log) as server,
            Client(server.url) as client,
            explained(server),
        ):
            found = [client.transcribe_tokens(clip.path) for clip in recordings]
        for clip, answer in zip(recordings, found, strict=True):
            request = subject.requests[clip.name]
            truth, plain = (f(request, answer.tokens) for f in (truth_of, plain_of))
            chosen = torch.tensor(answer.tokens).unsqueeze(1)
            yield Row(
                level="server",
                approach=one.name,
                subject=f"{subject.name}, log-probabilities",
                case=clip.name,
                dtype=spec.dtype,
                page_size=PAGE_SIZE,
                tokens=len(answer.tokens),
                tokens_same=int((truth.argmax(-1) == chosen.flatten()).sum()),
                wer=subject.wer_of(clip.name, answer.tokens),
                **errors(
                    torch.tensor(answer.logprobs, dtype=torch.float64),
                    truth.log_softmax(-1).gather(1, chosen).flatten(),
                    plain.log_softmax(-1).gather(1, chosen).flatten(),
                ),
            )


def _once(logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``logits`` of a request and tokens, worked out once: approaches mostly agree."""
    known: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def of(request: dict[str, Any], tokens: tuple[int, ...]) -> torch.Tensor:
        key = id(request), tokens
        if key not in known:
            known[key] = logits(request["features"], request["input_ids"], tokens)
        return known[key]

    return of


def whisper_subject() -> Subject:
    """Whisper-base and the six recordings, fetched at first use."""
    import soundfile
    from transformers import WhisperProcessor

    folder, recordings = whisper_base(), clips()
    processor = WhisperProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    start = tuple(tokenizer.convert_tokens_to_ids(list(prompt())))
    words = {clip.name: clip.transcript for clip in recordings}

    def request(path: Path) -> dict[str, Any]:
        samples, _ = soundfile.read(path, dtype="float32")  # mono, 16 kHz
        features = processor.feature_extractor(
            samples, sampling_rate=SAMPLE_RATE, padding="max_length", return_tensors="pt"
        ).input_features
        asked = {"input_ids": start, "features": features}
        return asked | {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": False}

    def wer_of(case: str, tokens: Sequence[int]) -> float:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return wer.word_error_rate(words[case], text)

    def logits_in(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return _whisper_logits(folder, dtype)

    requests = {clip.name: request(clip.path) for clip in recordings}
    return Subject("Whisper-base", folder, requests, logits_in, wer_of)


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
        lambda _case, _tokens: None,
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

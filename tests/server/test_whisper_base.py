"""The real server, Whisper-base and recorded speech; the demo runs the rest of it."""

import dataclasses
from pathlib import Path

import pytest

from pagealign.assets import clips, whisper_base
from pagealign.client import Client, explained
from pagealign.demo import CASES, Expect, run_case
from pagealign.hf_reference import references
from pagealign.server import PoolChecks, Server, ServerSpec
from pagealign.trees import build_tree

pytestmark = pytest.mark.server


def spec(tree: str, backend: str, page_size: int, **settings) -> ServerSpec:
    return ServerSpec(
        tree=build_tree(tree),
        model=whisper_base(),
        backend=backend,
        page_size=page_size,
        device="cpu",
        **settings,
    )


def test_aligned_at_64_equals_transformers(tmp_path: Path) -> None:
    """Two recordings alone and at once, poisoned pool, text beside them, and the pool back."""
    case = dataclasses.replace(
        next(c for c in CASES if c.name == "aligned-intel_xpu-64"),
        clips=("austen-0880", "austen-0930"),
    )
    assert case.expect is Expect.EXACT and case.poison and case.beside
    spoken = [clip for clip in clips() if clip.name in case.clips]
    assert len(spoken) == 2
    answers = references(whisper_base(), [clip.path for clip in spoken])
    want = {clip.name: answer for clip, answer in zip(spoken, answers, strict=True)}
    row = run_case(
        case,
        spec("aligned", "intel_xpu", 64, pool_checks=case.checks, poison=True),
        tmp_path / "server.log",
        spoken,
        want,
    )
    assert row.problems == ()
    assert row.died is None
    assert (row.alone, row.together) == (2, 2)
    assert row.text_beside


def test_page_size_1_is_the_stock_answer(tmp_path: Path) -> None:
    """Six recordings on stock and aligned, torch_native: ids, log-probabilities and counts
    are equal to the last bit."""
    answers = {}
    for tree in ("stock", "aligned"):
        server = Server(
            spec(tree, "torch_native", 1, pool_checks=PoolChecks.BUSY), tmp_path / f"{tree}.log"
        )
        with server, explained(server), Client(server.url) as client:
            answers[tree] = [client.transcribe_tokens(clip.path) for clip in clips()]
    assert len(answers["stock"]) == 6
    for stock, aligned in zip(answers["stock"], answers["aligned"], strict=True):
        assert len(stock.tokens) > 5
        assert (aligned.tokens, aligned.logprobs) == (stock.tokens, stock.logprobs)
        for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            assert aligned.meta[count] == stock.meta[count]


@pytest.mark.slow
def test_flashinfer_on_a_cpu(tmp_path: Path) -> None:
    """The real FlashInfer backend on the stand-in for its wrappers: transformers' tokens, at
    page size 1 on both trees and at 64 on the aligned one."""
    clip = min(clips(), key=lambda clip: clip.seconds)
    [want] = references(whisper_base(), [clip.path])
    for tree, page_size in (("stock", 1), ("aligned", 1), ("aligned", 64)):
        server = Server(spec(tree, "flashinfer", page_size), tmp_path / f"{tree}-{page_size}.log")
        with server, explained(server), Client(server.url) as client:
            assert client.transcribe_tokens(clip.path).tokens == want.tokens

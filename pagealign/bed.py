"""The test bed: SGLang's whole ``Scheduler`` in this process, on a CPU.

SGLang is imported from ``PYTHONPATH``, once per process, so a process tests one tree.
Requests enter where the tokenizer's would and results are read off what the scheduler
sends to the detokenizer; in between everything is SGLang's own: its event loops, its
pools, its models, its backends (``intel_xpu`` on the stand-in for the kernels).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pagealign.server import POOL_CHECKS

if TYPE_CHECKING:
    from pagealign.moss_vl import Media

# SGLang reads these when it is imported.
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    **dict.fromkeys(POOL_CHECKS, "1"),
    # Triton's kernels (FlashInfer's indices, FA3's graph metadata) in the interpreter
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
os.environ.update({k: v for k, v in ENV.items() if k not in os.environ})

import torch  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as a client's tokenizer would send it.

    ``input_ids``: the decoder's prompt. ``features``: float32 ``[1, 80, 2E]`` for
    Whisper, ``[1, images, 4, 3, 56, 56]`` for Mllama, a ``moss_vl.Media`` for MossVL,
    None for text only. ``tiles``: how many of each image's four tiles are real (Mllama's
    processor pads to four).
    ``arrive_at``: the scheduler's loop iteration at which it arrives; ``abort_at``:
    the one at which its client goes away.
    """

    input_ids: tuple[int, ...]
    features: torch.Tensor | Media | None = None
    tiles: int = 4
    max_new_tokens: int = 8
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    return_logprob: bool = True
    logprob_start_len: int = -1
    beam_width: int | None = None
    arrive_at: int = 0
    abort_at: int | None = None


@dataclasses.dataclass
class Result:
    """What the scheduler sent for one request; log-probabilities are natural logs."""

    output_ids: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)
    input_logprobs: list[float | None] = dataclasses.field(default_factory=list)
    finish: dict | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    retractions: int = 0


class _Receiver:
    """SGLang's request receiver with the bed's queue in place of the socket."""

    def __init__(self, real, recv_requests):
        self._real = real
        self.recv_requests = recv_requests

    def __getattr__(self, name):
        return getattr(self._real, name)


@functools.cache
def _freeze_modules() -> None:
    """Once, before there is a bed: what is alive then, 900,000 objects of SGLang's modules, is
    left out of later collections, which take most of a second otherwise, two for each bed."""
    gc.freeze()


class Bed:
    """A scheduler with its pools; ``close`` it before the next one is made."""

    def __init__(
        self,
        model: Path,
        backend: str,
        page_size: int,
        *,
        overlap: bool = False,
        radix: bool = False,
        max_total_tokens: int = 8192,
        max_running_requests: int = 8,
        poison: bool = True,
        overcommit: bool = False,
        retract_every: int | None = None,
        **server_args,
    ):
        """``overcommit``: admit requests as if each wrote 8 more tokens, so that those of
        a small pool are retracted (SGLang's SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, which
        it reads once, when it is imported). ``retract_every``: every so many steps retract
        a request whether or not the pool is full (its SGLANG_TEST_RETRACT).
        """
        from sglang.srt.server_args import ServerArgs

        args = dict(
            model_path=str(model),
            device="cpu",
            dtype="float32",
            attention_backend=backend,
            page_size=page_size,
            disable_cuda_graph=True,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            skip_tokenizer_init=True,
            disable_overlap_schedule=not overlap,
            disable_radix_cache=not radix,
            random_seed=0,
            log_level="error",
        )
        if overcommit:
            args["schedule_conservativeness"] = 0.01
        self.server_args = ServerArgs(**(args | server_args))
        self.server_args.resolve_once()
        self.server_args.check_server_args()
        self._publish()
        from sglang.srt.managers import schedule_policy
        from sglang.srt.managers import scheduler as scheduler_module
        from sglang.srt.managers.scheduler import Scheduler

        _freeze_modules()
        schedule_policy.CLIP_MAX_NEW_TOKENS = 8 if overcommit else 4096
        # Its thread would outlive the bed, and keep the scheduler and its pools alive.
        scheduler_module.create_scheduler_watchdog = lambda *args, **kwargs: None
        scheduler_module.TEST_RETRACT = retract_every is not None
        scheduler_module.TEST_RETRACT_INTERVAL = retract_every or 1
        self.scheduler = self._start(Scheduler)
        self.page_size = self.scheduler.page_size
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        self.req_to_token_pool = self.scheduler.req_to_token_pool
        self.start = self.free()
        self.results: dict[str, Result] = {}
        self.poison = poison
        # Called before every iteration with its number; tests look inside here.
        self.probe: Callable[[int], None] = lambda step: None
        # Called with every batch before its forward.
        self.on_batch: Callable[[object], None] = lambda batch: None
        self.steps = 0
        self._one_step = False
        self._todo: list[tuple[int, object]] = []
        self.scheduler.request_receiver = _Receiver(self.scheduler.request_receiver, self._receive)
        run_batch = self.scheduler.run_batch

        def observed(batch, *args, **kwargs):
            self.on_batch(batch)
            return run_batch(batch, *args, **kwargs)

        self.scheduler.run_batch = observed
        for sender in (
            self.scheduler.output_streamer.send_to_detokenizer,
            self.scheduler.ipc_channels.send_to_tokenizer,
        ):
            sender.send_output = self._collect

    def _start(self, scheduler_class):
        """A free port may be taken before it is listened on; try another then."""
        from sglang.srt.server_args import PortArgs

        for tries_left in (2, 1, 0):
            try:
                return scheduler_class(self.server_args, PortArgs.init_new(self.server_args))
            except BaseException as fault:
                self.close()
                if not (isinstance(fault, torch.distributed.DistNetworkError) and tries_left):
                    raise
                self._publish()  # what close has taken away

    def _publish(self) -> None:
        """The process-wide configuration that SGLang's classes ask for."""
        from sglang.srt.runtime_context import SpawnRanks, publish

        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        publish(self.server_args, role="scheduler", ranks=ranks)

    def free(self) -> tuple[int, int]:
        """Free KV slots and free request rows."""
        return self.allocator.available_size(), self.req_to_token_pool.available_size()

    def evict_cached(self) -> None:
        """Evict all that the prefix cache holds; what is not free then has an owner."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tree = self.scheduler.tree_cache
        if not tree.disable:
            tree.evict(EvictParams(num_tokens=tree.evictable_size()))

    @property
    def model(self) -> torch.nn.Module:
        """SGLang's model."""
        return self.scheduler.tp_worker.model_runner.model

    def poison_free_slots(self) -> None:
        """Fill every slot that no request owns with NaN, as a bad request may leave it.

        Done before each iteration, so what a request is given is poisoned until it is
        written, or until the backend zeroes it: the XPU kernel multiplies the values
        behind a length by zero, which a NaN survives.
        """
        pages = self.allocator.get_all_free_pages()
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
            k[slots.flatten()] = float("nan")
            v[slots.flatten()] = float("nan")

    def run(self, requests: Iterable[Request], max_steps: int = 5000) -> list[Result]:
        """Serve ``requests`` through SGLang's own event loop until it is idle."""
        from sglang.srt.managers.io_struct import AbortReq

        first = self.steps
        rids = []
        for request in requests:
            rid = f"r{len(self.results):06}"  # SGLang aborts by prefix: one length for all
            self.results[rid] = Result()
            rids.append(rid)
            self._todo.append((first + request.arrive_at, self._tokenized(rid, request)))
            if request.abort_at is not None:
                self._todo.append((first + request.abort_at, AbortReq(rid=rid)))
        self._todo.sort(key=lambda item: item[0])
        self._last_step = first + max_steps
        self._serve()
        return [self.results[rid] for rid in rids]

    def step(self) -> None:
        """One iteration of SGLang's loop, without overlap."""
        self._last_step = self.steps + 1
        self._one_step = True
        try:
            self._serve()
        finally:
            self._one_step = False

    def _serve(self) -> None:
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()

    def run_one(self, request: Request) -> Result:
        return self.run([request])[0]

    def close(self) -> None:
        """Tear down the process groups, so that another scheduler can be made."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()
        if scheduler := getattr(self, "scheduler", None):
            scheduler.ipc_channels.recv_from_tokenizer.context.destroy(linger=0)
            del self.scheduler
        gc.collect()

    def _receive(self, local_reqs=None):
        if self.poison:
            self.poison_free_slots()
        self.probe(self.steps)
        due = [item for at, item in self._todo if at <= self.steps]
        self._todo = [(at, item) for at, item in self._todo if at > self.steps]
        if self._one_step or (not due and not self._todo and self.scheduler.is_fully_idle()):
            self.scheduler.gracefully_exit = True  # after this iteration
        if self.steps >= self._last_step:
            raise TimeoutError(f"not idle after {self.steps} steps")
        self.steps += 1
        return list(local_reqs or []) + due

    def _tokenized(self, rid: str, request: Request):
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.managers.schedule_batch import (
            Modality,
            MultimodalDataItem,
            MultimodalProcessorOutput,
        )
        from sglang.srt.sampling.sampling_params import SamplingParams

        mm_inputs = None
        config = self.scheduler.model_config.hf_config
        if config.model_type == "moss_vl":  # SGLang runs its processor for text too
            from pagealign.moss_vl import processor_output

            mm_inputs = processor_output(config, request.input_ids, request.features)
        elif request.features is not None:
            is_image = request.features.ndim == 6
            item = MultimodalDataItem(
                modality=Modality.IMAGE if is_image else Modality.AUDIO,
                feature=request.features.clone(),
            )
            if is_image:
                _, images, tiles = request.features.shape[:3]
                # transformers numbers the aspect ratios 1x1, 1x2, 1x3, 1x4 from 1
                item.set("aspect_ratio_ids", torch.full((1, images), request.tiles))
                real = torch.arange(tiles) < request.tiles
                item.set("aspect_ratio_mask", real.long().expand(1, images, tiles).clone())
            mm_inputs = MultimodalProcessorOutput(mm_items=[item])
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=request.max_new_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=list(request.stop_token_ids),
            beam_width=request.beam_width,
        )
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", request.input_ids),
            input_embeds=None,
            mm_inputs=mm_inputs,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=request.return_logprob,
            logprob_start_len=request.logprob_start_len,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def _collect(self, output, recv=None) -> None:
        rids = getattr(output, "rids", None) or [getattr(output, "rid", None)]
        for i, rid in enumerate(rids):
            result = self.results.get(rid)
            if result is None:
                continue
            if not hasattr(output, "output_ids"):  # AbortReq of a request never run
                result.finish = output.finished_reason or {"type": "abort"}
                continue
            result.output_ids += list(output.output_ids[i])
            result.finish = output.finished_reasons[i]
            result.prompt_tokens = output.prompt_tokens[i]
            result.completion_tokens = output.completion_tokens[i]
            result.cached_tokens = output.cached_tokens[i]
            if output.retraction_counts:
                result.retractions = output.retraction_counts[i]
            for name in ("output", "input"):
                values = getattr(output, f"{name}_token_logprobs_val", None)
                if values and values[i] is not None:
                    getattr(result, f"{name}_logprobs").extend(values[i])

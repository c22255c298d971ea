"""The engine's public face inside an asyncio application; `EngineCore` does the work.

One event loop: every method is called on the loop that ran `start`. It installs no signal handler,
starts no process unless `data_parallel_size` or ranks that share the model ask for several, and
after `aclose` leaves no process, no thread and no device memory. No `__main__` guard is needed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.engine.arrival import Arrival, Arrivals, Submission
from asyncllm.engine.core import Core, Replica
from asyncllm.engine.core_loader import CoreLoader
from asyncllm.engine.data_parallel.links import EngineLink
from asyncllm.engine.data_parallel.loader import make_loader
from asyncllm.engine.generation import Generation
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.recorder import TIMELINE_STEPS, Recorder
from asyncllm.engine.snapshot import Snapshot, take_snapshot
from asyncllm.engine.stats import AbortCause, SchedulerStats, StatLogger
from asyncllm.engine.text.prompt import ParsedPrompt, PromptInput
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import EngineDeadError, EngineNotStartedError
from asyncllm.lora import LoRARequest
from asyncllm.sampling_params import BeamSearchParams, SamplingParams, check_sampling_params


class AsyncLLMEngine:
    """An inference engine inside an asyncio application.

    `AsyncLLMEngine(model, **fields of EngineArgs)`, then `await start()` or `async with engine`;
    `generate` starts it on first use. Raises `ValueError` or `ModelLoadError` for what cannot run.

    Neither steps nor requests leave anything for the garbage collector, but they set it off, and a
    full collection walks over all that torch and transformers made, 0.1 s and more between two
    tokens: `gc.collect(); gc.freeze()` after `start()` spares that, `gc.set_threshold` most others;
    both are the application's to decide. `asyncllm serve` does so in `server/serve.py`.
    """

    def __init__(self, model: str = "tiny", **engine_args: Any) -> None:
        args = EngineArgs(model=model, **engine_args)
        self.config: EngineConfig = args.create_engine_config()
        self.recorder = Recorder()
        self.stat_loggers: list[StatLogger] = []
        self.show_progress = False
        self._request_ids = itertools.count()
        self._arrivals: Arrivals = Arrivals()
        self._starting = asyncio.Lock()
        self._loader = make_loader(args, self.config, self.recorder, self.stat_loggers)
        self._core: Core | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that starts, runs or closes the core
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        return cls(**vars(args))

    def share_experts(self, link: EngineLink) -> None:
        """Before the start: be one of `data_parallel_size` engines, each in a process of its own,
        that share the experts of their model."""
        mesh = replace(self.config.mesh, engine=link.place.number)
        self.config = replace(self.config, mesh=mesh)
        self._loader = CoreLoader(self.config, self.recorder, self.stat_loggers, link)

    async def start(self) -> None:
        """Load the model, size its memory, capture its graphs. A second call does nothing.

        Cancelled, it ends at once; what it was loading is closed as soon as it is loaded, before
        another start loads anything and before `aclose` returns.
        Raises `RuntimeError` where it starts or runs on another event loop.
        """
        if not self._has_a_loop():
            self._loop = asyncio.get_running_loop()
        self._check_loop()
        async with self._starting:
            if self._closed:
                raise EngineDeadError("the engine is closed")
            if self._core is None:
                self._core = await self._loader.load(progress=self.show_progress)

    async def aclose(self) -> None:
        """End all requests with an error, stop the engine and give its memory back. Idempotent.

        Cancelled, it goes on by itself; another call waits for its end.
        """
        if self._closing is None:
            if self._has_a_loop():
                self._check_loop()
            self._closing = asyncio.create_task(self._close(), name="asyncllm close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._starting:
            self._closed = True
            core, self._core = self._core, None
            if core is not None:
                await core.close()
            await self._loader.join()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """Await the result for the final output, or iterate over it for the outputs until then.

        prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or chat messages.
        Without `sampling_params` the model's defaults (generation_config.json) apply. Lower
        `priority` values run first under --scheduling-policy priority. `lora_request`: the adapter
        to use, which is loaded where it is not.
        Raises, when awaited or iterated, `InvalidRequestError` (a ValueError naming the field),
        `QueueFullError`, `EngineDeadError`, `RequestFailedError`; at once `InvalidRequestError` for
        a field of `sampling_params` that was set out of range after they were made.
        """
        if sampling_params is not None:
            check_sampling_params(sampling_params)
            sampling_params = sampling_params.checked_copy()  # the engine may be long in starting
        name = request_id if request_id is not None else f"gen-{next(self._request_ids)}"
        arrival = self._arrivals.setdefault(name, Arrival(name, self._arrivals))
        kind = (sampling_params or SamplingParams()).output_kind

        async def submit(sink: Sink) -> None:
            given = Submission(
                arrival, prompt, sampling_params, sink, None, priority, cache_salt, lora_request,
                adds_lora=True,
            )  # fmt: skip
            await given.run(self._start_and_submit(given))

        return Generation(submit, partial(self.abort, name), kind)

    def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """As `generate`; there is one output, the final one, with `beam_width` completions.

        The best is first, by cumulative_logprob / number of tokens ** length_penalty; a stop token
        that ended one counts, and is in its `token_ids`. Raises `InvalidRequestError` at once for
        what no model could search.
        """
        return self.generate(
            prompt, params.sampling_params(), request_id, priority,
            cache_salt=cache_salt, lora_request=lora_request,
        )  # fmt: skip

    async def add_request(
        self,
        request_id: str,
        prompt: PromptInput | ParsedPrompt,
        params: SamplingParams,
        sink: Sink,
        *,
        text_sink: TextSink | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Validate, tokenise and queue a request; its deltas go to `sink`, at most one per step.

        The sink is called on the loop and must not block; one that raises ends its request with an
        error. The last delta is `finished`. A step between the first and the last that brings text
        and nothing else is told to `text_sink`, if there is one, as (text, number of tokens).
        Raises as `generate`; a refused request owns nothing.
        """
        arrival = self._arrivals.setdefault(request_id, Arrival(request_id, self._arrivals))
        given = Submission(
            arrival, prompt, params, sink, text_sink, priority, cache_salt, lora_request
        )
        await given.run(self._on_its_loop().submit(given))

    async def _start_and_submit(self, given: Submission) -> None:
        await self.start()
        await self._on_its_loop().submit(given)

    def abort(self, request_id: str | Iterable[str], cause: AbortCause = "application") -> None:
        """End requests at once, wherever they are; unknown ids are ignored. Counted by `cause`."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if (arrival := self._arrivals.pop(name, None)) is not None:
                arrival.abort()
                self.recorder.aborts[cause] += 1
            if self._core is not None:
                self._core.abort(name, cause)

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Read an adapter's files, so that requests may name it; again, and in place of those of
        the same name and path, with `load_inplace`. Raises `LoRALoadError` naming the tensor or the
        setting that is not served; the engine is as before then."""
        await self._running().lora.add(lora_request, reload=load_inplace)

    def remove_lora(self, lora_name: str) -> bool:
        """Requests that use it go on to their end. Whether it was there."""
        return self._running().lora.remove(lora_name)

    def pin_lora(self, lora_name: str) -> None:
        """Let no other adapter take its memory. Raises `LoRALoadError` where it is not loaded."""
        self._running().lora.pin(lora_name)

    def list_loras(self) -> list[LoRARequest]:
        adapters = self._running().adapters
        return [] if adapters is None else adapters.requests

    def lora_activity(self) -> tuple[list[str], list[str]]:
        """Names of the adapters that requests have, and of those that requests wait for."""
        adapters = self._running().adapters
        return ([], []) if adapters is None else (adapters.running, adapters.waiting)

    def find_lora(self, lora_name: str) -> LoRARequest | None:
        adapters = self._running().adapters
        return None if adapters is None else adapters.find(lora_name)

    # --- views -------------------------------------------------------------------------------

    @property
    def input_processor(self) -> InputProcessor:
        return self._running().input_processor

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.input_processor.tokenizer
        if tokenizer is None:
            raise ValueError("the engine was started with skip_tokenizer_init")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """The context window in tokens, settled by `start`."""
        return self.input_processor.max_model_len

    @property
    def startup(self) -> dict[str, Any]:
        """The settings that the start found, and its phases in seconds."""
        return self._running().startup

    def health(self) -> str | None:
        """None when requests are served, else why not."""
        if self._core is None:
            return "closed" if self._closed else "loading"
        return self._core.health()

    async def wait_failed(self) -> str:
        """Until the engine, once started, has failed for good; why."""
        return await asyncio.shield(self._running().failed)

    def stats(self) -> SchedulerStats:
        return self._running().stats()

    def snapshot(self, last_steps: int = TIMELINE_STEPS) -> Snapshot:
        """Queues, pages, rates, latencies and the last steps, for a live view. Cheap; no HTTP.

        Call it on the loop. Raises `EngineDeadError` before the start and after the end.
        """
        return take_snapshot(self.replicas, last_steps)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines behind this one, in the order of their ranks: itself, or several."""
        return self._running().replicas

    def check_integrity(self) -> None:
        """Assert the invariants of pages, slots and queues; for tests and debugging."""
        self._running().check_integrity()

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        assert not self._arrivals, "a request is on its way"
        self._running().check_idle()

    def reset_prefix_cache(self) -> None:
        self._running().reset_prefix_cache()

    def _on_its_loop(self) -> Core:
        core = self._core or self._running()
        if asyncio.get_running_loop() is not self._loop:  # one call less for each request
            self._check_loop()
        return core

    def _has_a_loop(self) -> bool:
        """Whether it starts, runs or closes: on another loop its futures would never be done."""
        return self._core is not None or self._starting.locked()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "the engine runs on another event loop: from this thread call "
                "asyncio.run_coroutine_threadsafe(coroutine, the loop that ran start)"
            )

    def _running(self) -> Core:
        if self._core is not None:
            return self._core
        if self._closed:
            raise EngineDeadError("the engine is closed")
        raise EngineNotStartedError("the engine is not started")

"""The engine's API for asyncio applications; `EngineCore` does the work.

All methods must be called on the event loop that ran `start`. The engine installs no signal handler
and starts no process, unless several ranks or engines (`data_parallel_size`) are asked for. After
`aclose` it leaves no process, thread or device memory. No `__main__` guard is needed.
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
from asyncllm.engine.text.prompt_encoder import NO_TOKENIZER
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import EngineDeadError, EngineNotStartedError, InvalidRequestError
from asyncllm.lora import LoRARequest
from asyncllm.sampling_params import BeamSearchParams, SamplingParams, check_sampling_params


class AsyncLLMEngine:
    """An inference engine inside an asyncio application.

    Create it with `AsyncLLMEngine(model, **fields of EngineArgs)`, then `await start()` or use
    `async with engine`; `generate` starts it on first use. Raises `ValueError` or `ModelLoadError`
    if the configuration cannot run.

    Steps and requests leave no reference cycles, but their allocations trigger the garbage
    collector, and a full collection over all objects of torch and transformers takes 0.1 s or more
    between two tokens. `gc.collect(); gc.freeze()` after `start()` avoids that, and
    `gc.set_threshold` most other collections. That is for the application to decide;
    `asyncllm serve` does both in `server/serve.py`.
    """

    def __init__(self, model: str = "tiny", **engine_args: Any) -> None:
        args = EngineArgs(model=model, **engine_args)
        self.config: EngineConfig = args.create_engine_config()
        self.stat_loggers: list[StatLogger] = []
        self.recorder = Recorder(self.stat_loggers)
        self.show_progress = False
        self._request_ids = itertools.count()
        self._arrivals: Arrivals = Arrivals()
        self._starting = asyncio.Lock()
        self._loader = make_loader(args, self.config, self.recorder)
        self._core: Core | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that the core runs on
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
        self._loader = CoreLoader(self.config, self.recorder, link)

    async def start(self) -> None:
        """Load the model, size its memory, capture graphs. A second call does nothing.

        If it is cancelled it returns at once, and the worker is closed when its loading ends:
        before another start loads one, and before `aclose` returns.
        Raises `RuntimeError` if the engine starts or runs on another event loop.
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
        """End all requests with an error, stop the engine and free its memory. Idempotent.

        If it is cancelled it continues in the background; another call waits for it.
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
        """Generate text: `await` the result for the final output, or iterate it for all outputs.

        prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or chat messages.
        sampling_params: default: the model's (generation_config.json).
        priority: lower values run first with --scheduling-policy priority.
        lora_request: the adapter to use; it is loaded if necessary.
        Awaiting or iterating raises `InvalidRequestError` (a `ValueError` naming the field),
        `QueueFullError`, `EngineDeadError` or `RequestFailedError`. Calling it raises
        `InvalidRequestError` if a field of `sampling_params` has been set out of range.
        """
        if sampling_params is not None:
            check_sampling_params(sampling_params)
            sampling_params = sampling_params.checked_copy()  # the caller may change it later
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
        """As `generate`, but with a single output of `beam_width` completions.

        Completions are ordered by cumulative_logprob / number of tokens ** length_penalty, the best
        first. A final stop token counts and is in `token_ids`. Raises `InvalidRequestError` for
        invalid parameters.
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
        """Validate, tokenise and queue a request. `sink` gets its deltas, at most one per step.

        Sinks are called on the event loop and must not block; if one raises, its request ends with
        an error. The last delta is `finished`. If there is a `text_sink`, it gets (text, number of
        tokens) of the steps between the first and the last that produce nothing but text.
        Raises as `generate`; a refused request holds nothing.
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
        """End requests at once; unknown ids are ignored. Aborts are counted by `cause`."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if (arrival := self._arrivals.pop(name, None)) is not None:
                arrival.abort()
                self.recorder.aborts[cause] += 1
            if self._core is not None:
                self._core.abort(name, cause)

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> bool:
        """Load an adapter, so that requests may name it; True, as vLLM. load_inplace: load it
        again, in place of the adapter of this name and path. Raises `LoRALoadError` naming the
        tensor or setting that is not supported, and changes nothing then."""
        await self._running().lora.add(lora_request, reload=load_inplace)
        return True

    async def remove_lora(self, lora_name: str) -> bool:
        """Unload an adapter; requests that use it run to their end. Whether it was loaded."""
        return self._running().lora.remove(lora_name)

    async def pin_lora(self, lora_name: str) -> bool:
        """Keep an adapter in memory; True, as vLLM. Raises `LoRALoadError` if it is not loaded."""
        self._running().lora.pin(lora_name)
        return True

    async def list_loras(self) -> list[LoRARequest]:
        adapters = self._running().adapters
        return [] if adapters is None else adapters.requests

    def lora_activity(self) -> tuple[list[str], list[str]]:
        """Names of the adapters that running requests use, and of those that requests wait for."""
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
            raise InvalidRequestError(NO_TOKENIZER)
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """The context window in tokens, known after `start`."""
        return self.input_processor.max_model_len

    @property
    def startup(self) -> dict[str, Any]:
        """The settings that the start chose, and the seconds of its phases."""
        return self._running().startup

    def health(self) -> str | None:
        """None if requests are served, else the reason why not."""
        if self._core is None:
            return "closed" if self._closed else "loading"
        return self._core.health()

    async def wait_failed(self) -> str:
        """Wait until the engine has failed for good; returns the reason."""
        return await asyncio.shield(self._running().failed)

    def stats(self) -> SchedulerStats:
        return self._running().stats()

    def snapshot(self, last_steps: int = TIMELINE_STEPS) -> Snapshot:
        """Queues, pages, rates, latencies and the last steps, for a live view. It is cheap.

        Raises `EngineDeadError` before the start and after the end.
        """
        return take_snapshot(self.replicas, last_steps)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The data-parallel engines, by rank; usually one."""
        return self._running().replicas

    def check_integrity(self) -> None:
        """Assert the invariants of pages, slots and queues; for tests and debugging."""
        self._running().check_integrity()

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        assert not self._arrivals, "a request is being prepared"
        self._running().check_idle()

    def reset_prefix_cache(self) -> None:
        self._running().reset_prefix_cache()

    def _on_its_loop(self) -> Core:
        core = self._core or self._running()
        if asyncio.get_running_loop() is not self._loop:  # saves a call per request
            self._check_loop()
        return core

    def _has_a_loop(self) -> bool:
        """Whether it is bound to a loop: on another one its futures would never resolve."""
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

"""How a request comes to the scheduler: validated, tokenised, with its adapter in a device slot."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from itertools import islice

from asyncllm.config import EngineConfig
from asyncllm.engine.adapter import Adapter
from asyncllm.engine.adapters import AdapterManager
from asyncllm.engine.arrival import Submission
from asyncllm.engine.beam_search import BeamSearchClient
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.errors import EngineDeadError, InvalidRequestError, LoRALoadError, QueueFullError
from asyncllm.lora import LoRARequest
from asyncllm.types import Request


class Admission:
    """`dead`: why no request is served, for good or until a restart, which replaces `adapters`."""

    def __init__(
        self,
        config: EngineConfig,
        input_processor: InputProcessor,
        live: LiveRequests,
        steps: EngineSteps,
        adapters: AdapterManager | None,
    ) -> None:
        self.dead: str | None = None
        self.adapters = adapters
        self._config, self._input_processor = config, input_processor
        self._live, self._steps = live, steps

    @property
    def lora(self) -> AdapterManager:
        """Raises `InvalidRequestError` where the engine serves no adapters."""
        if self.adapters is None:
            raise InvalidRequestError("this engine was started without enable_lora", "lora_request")
        return self.adapters

    async def submit(self, given: Submission) -> None:
        """Validate, tokenise and queue a request, unless it is aborted meanwhile. A refused request
        holds nothing. Raises `InvalidRequestError`, `QueueFullError`, `EngineDeadError`."""
        request_id = given.arrival.request_id
        self._check_open(request_id)
        request = await self._input_processor.process(
            request_id,
            given.prompt,
            given.params or self._input_processor.default_params({}),
            time.monotonic(),
            given.priority,
            given.cache_salt,
        )
        adapter, receive = None, given.sink
        if given.lora_request is not None:
            adapter = await self._acquire_adapter(request, given.lora_request, adds=given.adds_lora)
            request.use_adapter(adapter.slot, adapter.content)
            receive = self.lora.releasing(adapter, given.sink)
        try:
            if not given.arrival.is_aborted:
                self._check_open(request_id, len(request.prompt_token_ids))  # may have changed
                self._add(request, receive, given.text_sink)
                adapter = None  # the request's end releases it
        finally:
            if adapter is not None:
                self.lora.release(adapter)

    def _check_open(self, request_id: str, num_tokens: int = 0) -> None:
        """Raises `EngineDeadError`, `QueueFullError`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self._live.check_room(request_id, num_tokens)

    def _add(self, request: Request, sink: Sink, text_sink: TextSink | None) -> None:
        """Raises `InvalidRequestError`, also if a request with this id is live."""
        params = request.sampling_params
        if self._config.logits_processors:
            request.batch_processors = self._steps.worker.processors.needed_by(params)
        if params.use_beam_search:
            seq_ids = list(islice(self._input_processor.seq_ids, params.num_sequences))
            record = partial(self._steps.record, None)
            search = BeamSearchClient(request, seq_ids, self._live, sink, record)
            self._live.add(request, search.receive, None)
            search.ask()
        else:
            self._live.add(request, sink, text_sink)
        self._steps.wake()

    async def _acquire_adapter(
        self, request: Request, wanted: LoRARequest, *, adds: bool
    ) -> Adapter:
        """Load an adapter into a device slot, until it is released. adds: register it if unknown.

        A request that waits for a slot is counted, and times out, as if it waited for its first
        step. Raises `InvalidRequestError`, `QueueFullError`.
        """
        limit = self._config.max_queue_seconds
        try:
            with self._live.waiting(request):
                async with asyncio.timeout(limit if limit < math.inf else None):
                    return await self.lora.acquire(wanted, adds=adds)
        except TimeoutError:
            raise QueueFullError(
                f"request {request.request_id}: waited for a slot of its adapter over "
                f"max_queue_seconds ({limit:g})"
            ) from None
        except LoRALoadError as error:
            raise InvalidRequestError(str(error), "lora_request") from error

"""A started engine: its parts, the task that runs the steps, and how it is loaded.

    AsyncLLMEngine -> InputProcessor -> Scheduler -> Worker -> Scheduler -> OutputProcessor -> sink

Who is live, and how each request ends, is in `LiveRequests`. A step that fails ends the requests
that had begun, each with an error, and the engine goes on; if the device is lost with it, the
engine is dead and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice

from asyncllm.config import EngineConfig
from asyncllm.engine.adapters import Adapter, AdapterManager
from asyncllm.engine.beam_search import BeamSearchClient
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.pipeline import run_ahead, run_synchronous
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.stats import SchedulerStats, StatLogger
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import InvalidRequestError, LoRALoadError, ModelLoadError
from asyncllm.host import in_own_thread
from asyncllm.lora import LoRARequest
from asyncllm.models.registry import settle
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")


class EngineCore:
    """Made on the loop that it runs on."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        input_processor: InputProcessor,
        recorder: Recorder,
        stat_loggers: list[StatLogger],
    ) -> None:
        self.worker = worker
        self.input_processor = input_processor
        self._config = config
        self.chunk_policy = ChunkPolicy.choose(
            config.chunked_prefill_size, worker.step_cost, worker.prefill_graph_sizes
        )
        self.live = LiveRequests(
            self._new_scheduler(SchedulerStats()),
            input_processor.tokenizer,
            recorder.aborts,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            max_queue_seconds=config.max_queue_seconds,
        )
        self.watchdog = Watchdog(
            config.watchdog_timeout,
            lambda: self.live.scheduler.num_requests,
            lambda: str(self.live.scheduler.stats()),
        )
        self.adapters = None if worker.adapters is None else AdapterManager(worker.adapters)
        self.steps = EngineSteps(
            worker,
            self.live,
            self.watchdog,
            recorder,
            stat_loggers,
            later=[input_processor.grammars.prepare] * 2,
        )
        self.dead: str | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="asyncllm engine")
        if worker.group is not None:
            loop = asyncio.get_running_loop()
            worker.group.on_failure(lambda why: loop.call_soon_threadsafe(self._lose_rank, why))

    # --- requests ----------------------------------------------------------------------------

    def add(self, request: Request, sink: Sink, text_sink: TextSink | None) -> None:
        """Raises `InvalidRequestError`, also for the id of one that is live."""
        params = request.sampling_params
        if self._config.logits_processors:
            request.batch_processors = self._processors_for(params)
        if params.use_beam_search:
            seq_ids = list(islice(self.input_processor.seq_ids, params.num_sequences))
            record = partial(self.steps.record, None)
            search = BeamSearchClient(request, seq_ids, self.live, sink, record)
            self.live.add(request, search.receive, None)
            search.ask()
        else:
            self.live.add(request, sink, text_sink)
        self.steps.wake()

    def _processors_for(self, params: SamplingParams) -> tuple[int, ...]:
        """Raises `InvalidRequestError` where one of the engine's refuses the request."""
        try:
            found = self.worker.processors_for(params)
        except ValueError as error:
            raise InvalidRequestError(
                f"a logits processor: {error}", "logits_processors"
            ) from error
        if found and params.use_beam_search:  # its scores are those of the model
            raise InvalidRequestError(
                "this server's logits processors do not work with beam search", "use_beam_search"
            )
        return found

    async def acquire_adapter(self, wanted: LoRARequest) -> Adapter:
        """In a slot of the model, until it is released. Raises `InvalidRequestError`."""
        try:
            return await self.lora.acquire(wanted)
        except LoRALoadError as error:
            raise InvalidRequestError(str(error), "lora_request") from error

    @property
    def lora(self) -> AdapterManager:
        """Raises `InvalidRequestError` where the engine serves no adapters."""
        if self.adapters is None:
            raise InvalidRequestError("this engine was started without enable_lora", "lora_request")
        return self.adapters

    # --- its task ----------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = run_ahead if self._config.async_scheduling else run_synchronous
        while self.dead is None:
            try:
                await loop(self.steps)
            except Exception as error:
                logger.exception("a step failed; the requests that had begun end with an error")
                await self._recover(error)

    async def _recover(self, error: Exception) -> None:
        """End the requests that the step may have hurt; go on if the device answers, else be dead.

        Those that still wait for their first step are kept, unless it was planning that failed: the
        first of them may be the reason.
        """
        self.steps.reset()
        self.live.restart(
            self._new_scheduler(self.live.scheduler.stats()),
            f"the engine failed in a step: {error}",
            keep_queued=not self.steps.is_planning,
        )
        self.steps.record(None)
        try:
            await in_own_thread(self.worker.drain)
        except Exception as lost:
            self._die(f"the device is lost: {lost}")

    def _lose_rank(self, reason: str) -> None:
        """The rank's part of every page is gone. No step may wait for it any more."""
        self._task.cancel()
        self._die(reason)

    def _die(self, reason: str) -> None:
        if self.dead is None:
            logger.critical("%s", reason)
            self.dead = reason
            self.live.fail_all(reason)
            self.failed.set_result(reason)

    def _new_scheduler(self, totals: SchedulerStats) -> Scheduler:
        config, memory = self._config, self.worker.memory
        blocks = BlockManager(
            memory.num_pages,
            config.block_size,
            memory.num_host_pages,
            config.enable_prefix_caching,
            memory.groups,
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_policy=self.chunk_policy,
            policy=config.scheduling_policy,
            preemption_mode=config.preemption_mode,
            swap_cost=self.worker.swap_cost,
            totals=totals,
        )

    async def close(self) -> None:
        self.dead = "the engine is closed"
        self._task.cancel()
        await asyncio.wait([self._task])
        self.live.fail_all(self.dead)
        self.steps.record(None)
        self.input_processor.close()
        self.watchdog.close()
        await self.steps.close()
        await in_own_thread(self.worker.close)


class CoreLoader:
    """Starts a worker and a tokenizer, side by side in threads, and the core over both.

    Imports and tokenizers both keep the GIL, and the worker takes longer: the tokenizer waits for
    its imports, and loads while it waits for the device, the disk and compilers.

    A model cannot be stopped while it loads. Where the caller is cancelled, the thread goes on to
    the end and then closes the worker itself, so that its threads and its device memory are given
    back even if the loop has ended by then. One load at a time; the caller sees to that.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._thread: ThreadPoolExecutor | None = None  # of the last worker

    async def load(
        self, recorder: Recorder, stat_loggers: list[StatLogger], *, progress: bool
    ) -> EngineCore:
        """Raises `ValueError` or `ModelLoadError` for what cannot run."""
        config = self._config
        imported: Future[None] = Future()
        text = asyncio.create_task(in_own_thread(_load_text, config, imported))
        try:
            worker = await self._load_worker(progress, imported)
        except BaseException:
            imported.cancel()
            text.cancel()
            await asyncio.gather(text, return_exceptions=True)
            raise
        try:
            inputs = InputProcessor(config, await text, worker.memory.max_model_len)
            return EngineCore(config, worker, inputs, recorder, stat_loggers)
        except BaseException:
            worker.close()
            raise

    async def join(self) -> None:
        """Until no thread is left, nor a worker that nobody waited for."""
        if self._thread is not None:
            await in_own_thread(self._thread.shutdown)
            self._thread = None

    async def _load_worker(self, progress: bool, imported: Future[None]) -> Worker:
        await self.join()  # the memory need not hold two
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-load")
        told = partial(_tell, imported)
        make = partial(_start_worker, self._config, progress=progress, imported=told)
        loading = self._thread.submit(make)
        self._thread.shutdown(wait=False)  # it ends with this load
        try:
            return await asyncio.wrap_future(loading)
        except BaseException:
            loading.add_done_callback(_close)
            raise


def _start_worker(
    config: EngineConfig, *, progress: bool, imported: Callable[[], object]
) -> Worker:
    """Rank 0's worker, and where ranks share the model their processes. Raises as `Worker`."""
    if config.mesh.tp == 1:
        return Worker(config, progress=progress, imported=imported)
    config, _ = settle(config)  # what no rank can do is said before there are processes
    group = WorkerGroup(config)
    try:
        return Worker(
            config, progress=progress, imported=imported, connect=group.connect, group=group
        )
    except BaseException as error:
        failure = group.failure
        group.close()
        if failure is not None and isinstance(error, Exception):
            raise ModelLoadError(failure) from error
        raise


def _tell(imported: Future[None]) -> None:
    with suppress(InvalidStateError):  # the load was cancelled
        imported.set_result(None)


def _close(loading: Future[Worker]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


def _load_text(config: EngineConfig, imported: Future[None]) -> Tokenizer | None:
    imported.result()
    if config.tokenizer_path is None:
        return None
    return Tokenizer.from_folder(
        config.tokenizer_path, config.chat_template, config.chat_template_content_format
    )

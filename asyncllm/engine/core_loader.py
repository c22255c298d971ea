"""How an engine starts: a worker and a tokenizer, side by side in threads, and a core over both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from asyncllm.config import EngineConfig
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import StatLogger
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import ModelLoadError
from asyncllm.host import in_own_thread
from asyncllm.models.registry import settle
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.worker import Worker


class CoreLoader:
    """Starts a worker and a tokenizer, side by side in threads, and the core over both.

    Imports and tokenizers both keep the GIL, and the worker takes longer: the tokenizer waits for
    its imports, and loads while it waits for the device, the disk and compilers.

    A model cannot be stopped while it loads. Where the caller is cancelled, the thread goes on to
    the end and then closes the worker itself, so that its threads and its device memory are given
    back even if the loop has ended by then. One load at a time; the caller sees to that.
    """

    def __init__(
        self, config: EngineConfig, recorder: Recorder, stat_loggers: list[StatLogger]
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._stat_loggers = stat_loggers
        self._thread: ThreadPoolExecutor | None = None  # of the last worker
        self._is_cancelled = threading.Event()  # that worker's load

    async def load(self, *, progress: bool) -> EngineCore:
        """Raises `ValueError` or `ModelLoadError` for what cannot run."""
        config = self._config
        imported: Future[None] = Future()
        text = asyncio.create_task(in_own_thread(load_text, config, imported))
        try:
            worker = await self._load_worker(progress, imported)
        except BaseException:
            imported.cancel()
            text.cancel()
            await asyncio.gather(text, return_exceptions=True)
            raise
        try:
            inputs = InputProcessor(config, await text, worker.memory.max_model_len)
            # Ranks that others have started do not come back by our doing.
            is_ours = config.cluster.nnodes == 1 and config.cluster.backend == "mp"
            reload = self._reload if worker.group is not None and is_ours else None
            return EngineCore(config, worker, inputs, self._recorder, self._stat_loggers, reload)
        except BaseException:
            worker.close()
            raise

    async def _reload(self) -> Worker:
        """In place of one that has lost a rank."""
        return await self._load_worker(False, Future())

    async def join(self) -> None:
        """Until no thread is left, nor a worker that nobody waited for."""
        if self._thread is not None:
            await in_own_thread(self._thread.shutdown)
            self._thread = None

    async def _load_worker(self, progress: bool, imported: Future[None]) -> Worker:
        await self.join()  # the memory need not hold two
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-load")
        told, self._is_cancelled = partial(_tell, imported), threading.Event()
        make = partial(
            _start_worker, self._config, self._is_cancelled.is_set, progress=progress, imported=told
        )
        loading = self._thread.submit(make)
        self._thread.shutdown(wait=False)  # it ends with this load
        try:
            return await asyncio.wrap_future(loading)
        except BaseException:
            self._is_cancelled.set()
            loading.add_done_callback(_close)
            raise


def _start_worker(
    config: EngineConfig,
    is_cancelled: Callable[[], bool],
    *,
    progress: bool,
    imported: Callable[[], object],
) -> Worker:
    """Rank 0's worker, and where ranks share the model their processes. Raises as `Worker`."""
    if config.mesh.size == 1:
        return Worker(config, progress=progress, imported=imported)
    config, _ = settle(config)  # what no rank can do is said before there are processes
    group = WorkerGroup(config, is_cancelled)
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


def load_text(config: EngineConfig, imported: Future[None]) -> Tokenizer | None:
    imported.result()
    if config.tokenizer_path is None:
        return None
    return Tokenizer.from_folder(
        config.tokenizer_path, config.chat_template, config.chat_template_content_format
    )

"""Starts an engine: loads worker and tokenizer in parallel threads, then makes the core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from asyncllm.config import EngineConfig
from asyncllm.engine.data_parallel.links import EngineLink
from asyncllm.engine.data_parallel.peers import Peers
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import ModelLoadError
from asyncllm.host import in_own_thread
from asyncllm.models.parallel.stores import EngineStore, find_store, open_store
from asyncllm.models.registry import settle
from asyncllm.worker.kernels import make_mesh
from asyncllm.worker.memory import free_memory
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.worker import Worker


class CoreLoader:
    """Loads a worker and a tokenizer in parallel threads, and makes the core of them.

    Imports and tokenizers both hold the GIL, and the worker takes longer. So the tokenizer loads
    after the worker's imports, while the worker waits for the device, the disk and compilers.

    Loading a model cannot be interrupted. If the caller is cancelled, the thread continues and then
    closes the worker, so that its threads and device memory are freed even if the loop has ended.
    The caller must not start two loads at a time.
    """

    def __init__(
        self,
        config: EngineConfig,
        recorder: Recorder,
        link: EngineLink | None = None,
    ) -> None:
        """link: to the other engines, where they share experts."""
        self._config, self._link = config, link
        self._recorder = recorder
        self._thread: ThreadPoolExecutor | None = None  # loads the last worker
        self._is_cancelled = threading.Event()  # of that load

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
            peers = None
            if self._link is not None:
                peers = Peers(self._link.place.number, self._link.peers, worker.adapters)
                await peers.connect()
            inputs = InputProcessor(config, await text, worker.memory.max_model_len)
            # Only ranks that we have started can be restarted, and engines that share experts only
            # together.
            is_ours = config.cluster.nnodes == 1 and config.cluster.backend == "mp"
            is_ours = is_ours and worker.group is not None and self._link is None
            return EngineCore(
                config,
                worker,
                inputs,
                self._recorder,
                self._reload if is_ours else None,
                peers,
            )
        except BaseException:
            worker.close()
            raise

    async def _reload(self) -> Worker:
        """Load another worker after a rank was lost; free what a failed load has left."""
        await in_own_thread(free_memory, self._config.device)
        return await self._load_worker(False, Future())

    async def join(self) -> None:
        """Wait until the loading thread has ended, and a cancelled load is closed."""
        if self._thread is not None:
            await in_own_thread(self._thread.shutdown)
            self._thread = None

    async def _load_worker(self, progress: bool, imported: Future[None]) -> Worker:
        await self.join()  # two workers may not fit in memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-load")
        on_imported, self._is_cancelled = partial(_resolve, imported), threading.Event()
        start = partial(_start_worker, self._config, self._is_cancelled.is_set, self._link)
        loading = self._thread.submit(start, progress=progress, imported=on_imported)
        self._thread.shutdown(wait=False)  # ends after this load
        try:
            return await asyncio.wrap_future(loading)
        except BaseException:
            self._is_cancelled.set()
            loading.add_done_callback(_close)
            raise


def _start_worker(
    config: EngineConfig,
    is_cancelled: Callable[[], bool],
    link: EngineLink | None,
    *,
    progress: bool,
    imported: Callable[[], object],
) -> Worker:
    """Start rank 0's worker, and the processes of other ranks, if any. Raises as `Worker`."""
    if config.mesh.is_alone:
        return Worker(config, progress=progress, imported=imported)
    config, model = settle(config)  # refuses an unsupported model before it starts processes
    engines = None
    if link is not None:
        if model.full_read_tokens == 1:
            raise ModelLoadError(
                f"enable_expert_parallel: {config.model.architecture} has no experts for engines "
                f"to share: without it, data_parallel_size {config.mesh.dp} makes engines that "
                "share nothing"
            )
        engines = _find_engines(config, link)
    if config.mesh.size == 1:
        assert engines is not None
        connect = partial(make_mesh, config, None, engines.address[0], engines)
        return Worker(config, progress=progress, imported=imported, connect=connect)
    group = WorkerGroup(config, is_cancelled, engines)
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


def _find_engines(config: EngineConfig, link: EngineLink) -> EngineStore:
    """Waits for the first engine, which has the store."""
    num_ranks = config.mesh.dp * config.mesh.size
    if link.listener is not None:
        return EngineStore(open_store(num_ranks, link.listener), link.address)
    return EngineStore(find_store(num_ranks, *link.address), link.address)


def _resolve(imported: Future[None]) -> None:
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

"""How an engine starts: a worker and a tokenizer, side by side in threads, and a core over both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.data_parallel.links import EngineLink
from asyncllm.engine.data_parallel.peers import Peers
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import StatLogger
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import ModelLoadError
from asyncllm.host import in_own_thread
from asyncllm.models.parallel.collectives import (
    CollectiveMesh,
    EngineStore,
    find_store,
    open_store,
)
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
        self,
        config: EngineConfig,
        recorder: Recorder,
        stat_loggers: list[StatLogger],
        link: EngineLink | None = None,
    ) -> None:
        """link: to the other engines, where they share experts."""
        self._config, self._link = config, link
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
            peers = None
            if self._link is not None:
                peers = Peers(self._link.place.number, self._link.peers, worker.adapters)
                await peers.connect()
            inputs = InputProcessor(config, await text, worker.memory.max_model_len)
            # Ranks that others have started do not come back by our doing, nor engines' alone.
            is_ours = config.cluster.nnodes == 1 and config.cluster.backend == "mp"
            is_ours = is_ours and worker.group is not None and self._link is None
            return EngineCore(
                config,
                worker,
                inputs,
                self._recorder,
                self._stat_loggers,
                self._reload if is_ours else None,
                peers,
            )
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
            _start_worker,
            self._config,
            self._is_cancelled.is_set,
            self._link,
            progress=progress,
            imported=told,
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
    link: EngineLink | None,
    *,
    progress: bool,
    imported: Callable[[], object],
) -> Worker:
    """Rank 0's worker, and where ranks share the model their processes. Raises as `Worker`."""
    if config.mesh.is_alone:
        return Worker(config, progress=progress, imported=imported)
    config, model = settle(config)  # what no rank can do is said before there are processes
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
        device, (store, (host, _)) = torch.device(config.device), engines
        connect = partial(CollectiveMesh, config.mesh, None, host, device, store)
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

"""Starts an engine: its worker and its tokenizer, side by side in threads, and the core over both.

A model cannot be stopped while it loads. Where the caller is cancelled, the thread goes on to the
end and then closes the worker itself, so that its threads and its device memory are given back even
if the loop has ended by then.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from asyncllm.config import EngineConfig
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.input_processor import InputProcessor, end_of_text_ids
from asyncllm.engine.own_thread import in_own_thread
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import StatLogger
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.worker.worker import Worker


class CoreLoader:
    """One load at a time; the caller sees to that."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._thread: ThreadPoolExecutor | None = None  # of the last worker

    async def load(
        self, recorder: Recorder, stat_loggers: list[StatLogger], *, progress: bool
    ) -> EngineCore:
        """Raises `ValueError` or `ModelLoadError` for what cannot run."""
        config = self._config
        text = asyncio.create_task(in_own_thread(_load_text, config))
        try:
            worker = await self._load_worker(progress)
        except BaseException:
            text.cancel()
            await asyncio.gather(text, return_exceptions=True)
            raise
        try:
            tokenizer, vocabulary = await text
            inputs = InputProcessor(config, tokenizer, worker.memory.max_model_len)
            inputs.grammars.vocabulary = vocabulary
            return EngineCore(config, worker, inputs, recorder, stat_loggers)
        except BaseException:
            worker.close()
            raise

    async def join(self) -> None:
        """Until no thread is left, nor a worker that nobody waited for."""
        if self._thread is not None:
            await in_own_thread(self._thread.shutdown)
            self._thread = None

    async def _load_worker(self, progress: bool) -> Worker:
        await self.join()  # the memory need not hold two
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-load")
        loading = self._thread.submit(partial(Worker, self._config, progress=progress))
        self._thread.shutdown(wait=False)  # it ends with this load
        try:
            return await asyncio.wrap_future(loading)
        except BaseException:
            loading.add_done_callback(_close)
            raise


def _close(loading: Future[Worker]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


def _load_text(config: EngineConfig) -> tuple[Tokenizer | None, Vocabulary | None]:
    """The tokenizer, and what grammars need of it, which is no work for the first request."""
    if config.tokenizer_path is None:
        return None, None
    tokenizer = Tokenizer.from_folder(
        config.tokenizer_path, config.chat_template, config.chat_template_content_format
    )
    try:
        ends = end_of_text_ids(config, tokenizer)
        return tokenizer, Vocabulary(tokenizer, config.model.vocab_size, ends)
    except ValueError:  # said to the requests that ask for a grammar
        return tokenizer, None

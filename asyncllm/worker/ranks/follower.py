"""A rank beyond the first: a process that does what rank 0 tells it, and ends with its connection.

reading thread   cuts the socket into messages, answers PING, ends the process at the socket's
                 end, whatever the main thread waits for
main thread      does the messages in their order: it is the device's thread, too
adapters thread  reads their files, while the steps of others go on
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from asyncllm.child_process import given_socket
from asyncllm.config import EngineConfig
from asyncllm.errors import LoRALoadError
from asyncllm.frames import Frames
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.parallel.stores import EngineStore, find_store
from asyncllm.worker.adapters import AdapterStore
from asyncllm.worker.kernels import make_mesh
from asyncllm.worker.ranks.connection import READ_BYTES
from asyncllm.worker.ranks.messages import (
    Kind,
    Message,
    decode,
    decode_config,
    decode_step,
    encode,
)
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")


class Follower:
    """`run` returns when it has failed; the process ends by itself when rank 0 is gone."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._num_begun = self._num_done = 0  # messages that have a place
        self._begun: deque[Callable[[bool], object]] = deque()  # what ends each step, once sampled
        self._mesh: CollectiveMesh | None = None
        self._sending = threading.Lock()
        self._adapters_thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-adapters")
        threading.Thread(target=self._read, name="asyncllm-rank-0", daemon=True).start()

    def run(self) -> None:
        """Raises whatever ended it."""
        try:
            worker = self._start(self._messages.get())
            self._send(Kind.READY, worker.memory.num_pages)
            while True:
                self._do(worker, self._next())
                self._num_done += 1
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._send(Kind.FAILED, f"{type(error).__name__}: {error}")

    def _next(self) -> Message:
        """A message that has a place, without it. Raises `ValueError` for another's."""
        kind, place, *content = self._messages.get()
        if place != self._num_begun:
            raise ValueError(f"message {place} of rank 0, where {self._num_begun} was due")
        self._num_begun += 1
        return kind, *content

    def _start(self, message: Message) -> Worker:
        kind, settings, rank, addresses, version, level = message
        assert kind is Kind.START
        logging.basicConfig(level=level, format=f"%(levelname)s rank {rank}: %(message)s")
        if version != torch.__version__:
            raise ValueError(f"rank 0 has torch {version}, this rank {torch.__version__}")
        config = decode_config(settings, rank)
        return Worker(config, connect=lambda: self._connect(config, *addresses))

    def _connect(
        self, config: EngineConfig, address: tuple[str, int], of_engines: tuple[str, int] | None
    ) -> Mesh:
        mesh = config.mesh
        store, engines = find_store(mesh.size, *address), None
        if of_engines is not None:
            found = find_store(mesh.dp * mesh.size, *of_engines)
            engines = EngineStore(found, of_engines)
        self._send(Kind.JOINS)
        own = address[0]  # on the host of rank 0, which reaches itself by it
        if self._socket.family != socket.AF_UNIX:
            own = self._socket.getsockname()[0]
        self._mesh = make_mesh(config, store, own, engines)
        return self._mesh

    def _do(self, worker: Worker, message: Message) -> None:
        match message:
            case (Kind.STEP, *content):
                if (end := worker.runner.follow(decode_step(content))) is not None:
                    self._begun.append(end)
            case (Kind.SAMPLE, bool(is_masked)) if self._begun:
                self._begun.popleft()(is_masked)
            case (Kind.CLEAR_PAGES, page_ids):
                worker.clear_pages(page_ids)
            case (Kind.CAPTURE_GRAPH,):
                worker.capture_graph()
            case (Kind.READ_ADAPTER, str(folder), int(place)):
                assert worker.adapters is not None
                self._adapters_thread.submit(
                    self._read_adapter, worker.adapters, Path(folder), place, self._num_begun - 1
                )
            case (Kind.LOAD_ADAPTER, int(place), int(slot)):
                assert worker.adapters is not None
                asyncio.run(worker.adapters.load(place, slot))
                self._send(Kind.DONE, self._num_begun - 1, "")
            case (Kind.SYNC, int(num_calls)):
                worker.drain()
                own = 0 if self._mesh is None else self._mesh.num_common_calls
                same = own == num_calls
                error = "" if same else f"{own} calls of the mesh, not {num_calls}"
                self._send(Kind.DONE, self._num_begun - 1, error)
            case _:
                raise ValueError(f"rank 0 said {message!r:.100}")

    def _read_adapter(
        self, adapters: AdapterStore, folder: Path, place: int, question: int
    ) -> None:
        try:
            adapters.read(folder, place)
            self._send(Kind.DONE, question, "")
        except LoRALoadError as error:
            self._send(Kind.DONE, question, str(error))
        except BaseException as error:
            self._fail(error)
            raise

    # --- the connection ----------------------------------------------------------------------

    def _send(self, kind: Kind, *content: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # whose end ends this process
            self._socket.sendall(encode(kind, *content))

    def _read(self) -> None:
        frames = Frames()
        try:
            while received := self._socket.recv(READ_BYTES):
                for message in map(decode, frames.feed(received)):
                    if message == (Kind.PING,):
                        calls = 0 if self._mesh is None else self._mesh.num_calls
                        self._send(Kind.PONG, self._num_done, calls)
                    else:
                        self._messages.put(message)
        except (OSError, ValueError) as error:
            logger.critical("the connection to rank 0: %s", error)
        finally:
            os._exit(0)


if __name__ == "__main__":
    Follower(given_socket()).run()

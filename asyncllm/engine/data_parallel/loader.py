"""How several engines start: in this process one after the other, or each in its own process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.engine.core import Core
from asyncllm.engine.core_loader import CoreLoader, load_text
from asyncllm.engine.data_parallel.group import EngineGroup
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.engine.data_parallel.supervisor import Supervisor
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.host import in_own_thread, num_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


class LocalGroupLoader:
    """As `CoreLoader`, of `data_parallel_size` engines. `recorder`: the first engine's."""

    def __init__(self, config: EngineConfig, recorder: Recorder) -> None:
        self._config = config
        first = config.data_parallel_rank
        self._loaders = [
            CoreLoader(replace(config, data_parallel_rank=first + i), each)
            for i, each in enumerate(_recorders(recorder, config.data_parallel_size))
        ]

    async def load(self, *, progress: bool) -> EngineGroup:
        """One after the other: each sizes its memory by what the others have left."""
        members: list[Core] = []
        try:
            for loader in self._loaders:
                members += [await loader.load(progress=progress)]
        except BaseException:
            await _close(members)
            raise
        # What the smallest window takes, all take.
        inputs = [member.input_processor for member in members]
        least = min(inputs, key=lambda processor: processor.max_model_len)
        return EngineGroup(members, least, self._config.block_size)

    async def join(self) -> None:
        for loader in self._loaders:
            await loader.join()


class ProcessGroupLoader:
    """The same, in processes that this one starts; it keeps the tokenizer. `args`: of all."""

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        recorder: Recorder,
    ) -> None:
        self._args = args
        self._config = config
        self._recorder = recorder

    async def load(self, *, progress: bool) -> EngineGroup:
        """Raises `ValueError` or `ModelLoadError` for what cannot run, and leaves no process."""
        config, size = self._config, self._config.data_parallel_size
        shares_experts = config.mesh.dp > 1
        environments = _environments(config.device, size, config.mesh.size, shares_experts)
        members = [
            RemoteCore(rank, _engine_args(self._args, rank), environment, each)
            for rank, (environment, each) in enumerate(
                zip(environments, _recorders(self._recorder, size), strict=True)
            )
        ]
        together = [members] if shares_experts else [[member] for member in members]
        supervisors = [Supervisor(each) for each in together]
        imported: Future[None] = Future()
        imported.set_result(None)
        text = asyncio.create_task(in_own_thread(load_text, config, imported))
        starts = [asyncio.create_task(supervisor.start()) for supervisor in supervisors]
        try:
            await asyncio.gather(text, *starts)
        except BaseException:
            for task in (text, *starts):
                task.cancel()
            await asyncio.gather(text, *starts, return_exceptions=True)
            for supervisor in supervisors:
                await supervisor.close()
            await _close(members)
            raise
        max_model_len = min(member.ready.max_model_len for member in members)
        inputs = InputProcessor(config, text.result(), max_model_len)
        for member in members:
            member.input_processor = inputs
        return EngineGroup(members, inputs, config.block_size, supervisors)

    async def join(self) -> None:
        """Nothing outlives a cancelled load."""


def _recorders(first: Recorder, count: int) -> list[Recorder]:
    return [first, *(Recorder(first.observers) for _ in range(count - 1))]


async def _close(members: Sequence[Core]) -> None:
    await asyncio.gather(*(member.close() for member in members))


def _engine_args(args: EngineArgs, rank: int) -> dict[str, Any]:
    """One engine's arguments as plain values. Raises `ValueError` for a class that has no name."""
    given = {**vars(args)}
    if not args.enable_expert_parallel:  # else it is one of so many
        given["data_parallel_size"] = 1
    given["data_parallel_rank"] = args.data_parallel_rank + rank
    if args.logits_processors:
        given["logits_processors"] = [*map(_name_of, args.logits_processors)]
    paths = {name: os.fspath(v) for name, v in given.items() if isinstance(v, os.PathLike)}
    return given | paths


def _name_of(processor: str | type) -> str:
    if isinstance(processor, str):
        return processor
    if processor.__module__ == "__main__" or "." in processor.__qualname__:
        raise ValueError(
            f"logits_processors {processor.__qualname__}: an engine's process imports it by name; "
            "put it into a module, or use data_parallel_backend uni"
        )
    return f"{processor.__module__}:{processor.__qualname__}"


def _environments(
    device: str, count: int, ranks: int, shares_experts: bool
) -> list[dict[str, str]]:
    """Give each engine's process `ranks` GPUs, or a share of the cores; engines that share experts
    see all of the GPUs, their own first, as NCCL asks for. Raises `ValueError`."""
    if device == "cpu":
        threads = os.environ.get(THREADS, str(max(num_cores() // count, 1)))
        return [{THREADS: threads}] * count
    import torch  # the one question that only torch can answer

    visible = os.environ.get(VISIBLE)
    devices = [*map(str, range(torch.cuda.device_count()))]
    if visible is not None:
        devices = [name.strip() for name in visible.split(",") if name.strip()][: len(devices)]
    if len(devices) < count * ranks:
        raise ValueError(
            f"data_parallel_size {count} times {ranks} GPUs for each engine is over the "
            f"{len(devices)} CUDA devices"
        )
    own = [devices[i * ranks : (i + 1) * ranks] for i in range(count)]
    if shares_experts:
        own = [[*each, *(name for name in devices if name not in each)] for each in own]
    return [{VISIBLE: ",".join(each)} for each in own]


def make_loader(
    args: EngineArgs, config: EngineConfig, recorder: Recorder
) -> CoreLoader | LocalGroupLoader | ProcessGroupLoader:
    if config.data_parallel_size == 1:
        return CoreLoader(config, recorder)
    if config.data_parallel_backend == "uni":
        return LocalGroupLoader(config, recorder)
    return ProcessGroupLoader(args, config, recorder)

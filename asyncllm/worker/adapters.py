"""LoRA adapters on their way: from files to host memory, from there to the model's slots.

Host memory for `num_places` adapters is taken at the start, pinned where the device is CUDA,
because pinning later would hold up the steps. The engine decides which adapter has which place and
slot (engine/adapters.py); here bytes are copied. No running stream waits long: files are read by
one thread, on one core, that often leaves the GIL to the loop, and a copy goes in pieces between
steps, in their order; a slot that is written is read by no step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asyncllm.errors import LoRALoadError
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.lora_adapter import AdapterInfo, read_adapter
from asyncllm.step_plan import StepKind, StepShape
from asyncllm.types import LaunchedStep, StepResult
from asyncllm.worker.executor import Collect, Executor
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.ranks.messages import Kind

PIECE_BYTES = 32 << 20  # 1.5 ms over PCIe 5
# Of no step: how long a piece takes says nothing of how long steps take.
PIECE_SHAPE = StepShape(StepKind.PREFILL, 0)


class AdapterStore:
    def __init__(
        self,
        layers: LoRALayers,
        num_places: int,
        executor: Executor,
        group: WorkerGroup | None = None,
    ) -> None:
        """group: the other ranks, of rank 0; each has its own part of every adapter."""
        self.num_places, self.num_slots = num_places, len(layers.slots) - 1  # without slot 0
        self.first_slot = layers.first_slot
        self._group = group
        self._executor = executor
        self._parts = [(layers, _host_memory(layers, num_places))]
        if layers.of_experts is not layers:  # one more place, for adapters of other engines
            self._parts.append((layers.of_experts, _host_memory(layers.of_experts, num_places + 1)))
        self._visiting = asyncio.Lock()
        self._thread = serial_thread()

    def close(self) -> None:
        """Give back the memory of places and slots, although the engine still knows this store."""
        self._parts.clear()
        self._thread.shutdown()

    def read(self, folder: Path, place: int) -> AdapterInfo:
        """Fill a place from files, in any thread. Blocks for as long as the disk takes.

        Raises `LoRALoadError`; the place then holds anything.
        """
        answers = []
        if self._group is not None:
            answers = self._group.ask(Kind.READ_ADAPTER, str(folder.resolve()), place)
        infos = self._thread.submit(self._read_parts, folder, place).result()
        for answer in answers:
            if error := answer.result():
                raise LoRALoadError(error)
        return replace(infos[0], rank=max(info.rank for info in infos))

    @torch.inference_mode()
    def _read_parts(self, folder: Path, place: int) -> list[AdapterInfo]:
        return [
            read_adapter(folder, part, places[place], experts_alone=number > 0)
            for number, (part, places) in enumerate(self._parts)
            if place < len(places)
        ]

    async def load(self, place: int, slot: int) -> None:
        """Copy a place to a slot, which no launched step reads. Until it is there."""
        answers = []
        if self._group is not None:
            answers = self._group.ask(Kind.LOAD_ADAPTER, place, slot)
        is_own = place < self.num_places
        for number, (part, places) in enumerate(self._parts):
            if place < len(places):
                own = slot + (self.first_slot if is_own and number > 0 else 0)
                await self._copy_whole(part.slots[own], places[place])
                await self._submit(partial(part.copy_behind, own)).wait()
        for answer in answers:
            await asyncio.wrap_future(answer)

    async def load_visiting(self, folder: Path, slot: int) -> None:
        """Load the expert part of another engine's adapter into that engine's slot. Raises
        `LoRALoadError`."""
        async with self._visiting:
            await asyncio.to_thread(self.read, folder, self.num_places)
            await self.load(self.num_places, slot)

    async def _copy_whole(self, target: torch.Tensor, source: torch.Tensor) -> None:
        num_pieces = max(1, -(-source.nbytes // PIECE_BYTES))
        pieces = (tensor.chunk(num_pieces) for tensor in (target, source))
        for piece in zip(*pieces, strict=True):
            await self._submit(partial(_copy, *piece)).wait()

    def _submit(self, enqueue: Callable[[], None]) -> LaunchedStep:
        def work() -> Collect:
            enqueue()
            return lambda: StepResult([])

        return self._executor.submit(work, PIECE_SHAPE)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _host_memory(layers: LoRALayers, num_places: int) -> torch.Tensor:
    slots = layers.slots
    shape = num_places, slots.shape[1]
    return torch.zeros(shape, dtype=slots.dtype, pin_memory=slots.is_cuda)


def serial_thread() -> ThreadPoolExecutor:
    """A thread whose torch operations have no other threads. On all cores, they would take them
    from the loop's thread, in a read as often as there are operations."""
    num_threads = torch.get_num_threads()

    def begin() -> None:
        torch.get_num_threads()  # else this thread's first operation sets its number anew
        torch.set_num_threads(1)  # this thread's, and that of threads to come

    thread = ThreadPoolExecutor(1, "asyncllm-adapter", initializer=begin)
    thread.submit(int).result()
    torch.set_num_threads(num_threads)
    return thread

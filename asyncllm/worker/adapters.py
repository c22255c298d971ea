"""LoRA adapters on their way: from files to host memory, from there to the model's slots.

Host memory for `num_places` adapters is taken at the start, pinned where the device is CUDA,
because pinning later would hold up the steps. The engine decides which adapter has which place and
slot (engine/adapters.py); here bytes are copied. A copy goes in pieces between steps, in their
order, so that no running stream waits long; a slot that is written is read by no step.
"""

from __future__ import annotations

import asyncio
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
        self._group = group
        self._layers = layers
        self._executor = executor
        slots = layers.slots
        shape = num_places, slots.shape[1]
        self._places = torch.zeros(shape, dtype=slots.dtype, pin_memory=slots.is_cuda)
        num_bytes = shape[1] * slots.element_size()
        self._num_pieces = max(1, -(-num_bytes // PIECE_BYTES))

    @property
    def num_places(self) -> int:
        return len(self._places)

    @property
    def num_slots(self) -> int:
        """Slot 0, of no adapter, not counted."""
        return len(self._layers.slots) - 1

    @torch.inference_mode()
    def read(self, folder: Path, place: int) -> AdapterInfo:
        """Fill a place from files, in any thread. Blocks for as long as the disk takes.

        Raises `LoRALoadError`; the place then holds anything.
        """
        answers = []
        if self._group is not None:
            answers = self._group.ask(Kind.READ_ADAPTER, str(folder.resolve()), place)
        info = read_adapter(folder, self._layers, self._places[place])
        for answer in answers:
            if error := answer.result():
                raise LoRALoadError(error)
        return info

    async def load(self, place: int, slot: int) -> None:
        """Copy a place to a slot, which no launched step reads. Until it is there."""
        answers = []
        if self._group is not None:
            answers = self._group.ask(Kind.LOAD_ADAPTER, place, slot)
        target, source = self._layers.slots[slot], self._places[place]
        pieces = (tensor.chunk(self._num_pieces) for tensor in (target, source))
        for piece in zip(*pieces, strict=True):
            await self._copy(*piece).wait()
        for answer in answers:
            await asyncio.wrap_future(answer)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> LaunchedStep:
        def work() -> Collect:
            target.copy_(source, non_blocking=True)
            return lambda: StepResult([])

        return self._executor.submit(work, PIECE_SHAPE)

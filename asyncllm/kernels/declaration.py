"""The declaration of a hand-written kernel, and what it is asked about.

A kernel is a folder with its source, its Python and one declaration, which registry.py lists. From
that a start knows what to compile and to launch before it has weights; it knows no kernel by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from asyncllm.kernels.nvcc import Library
from asyncllm.kernels.records import AttentionLayer, SlotState
from asyncllm.model_config import ModelConfig

# (arguments, blocks, stream) -> cudaError_t
Launch = Callable[[object, int, int], int]
Definitions = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Sizes of a dense decoder, whose layers differ in nothing but their weights."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(cls, model: ModelConfig) -> DenseShape:
        hf = model.hf_config
        size = getattr(hf, "intermediate_size", 0)  # not of every model, nor one number
        return cls(model.num_layers, hf.hidden_size, size, model.vocab_size)


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the engine on a CUDA device, before there are weights."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    layers: Sequence[AttentionLayer]  # their norms' weights may be without memory
    sizes: DenseShape
    is_dense: bool  # False: `sizes` do not say all
    attention_backend: str
    has_fast_ops: bool  # the model runs by our kernels, not by torch's
    captures_prefills: bool
    autotuned_sizes: Sequence[int]  # rows of the decode steps whose implementation is measured
    new_state: Callable[[int, int], SlotState]  # of one slot, by its pages and the vocabulary

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """Kernels of one folder in Triton, which compiles a variant at its first launch.

    `is_prewarmed`: `prewarm(start)` of its kernel.py yields launches, on tensors that nobody reads,
    of the variants that steps will ask for; else the padding steps of a start launch them.
    """

    name: str
    is_prewarmed: bool = True

    def prewarm(self, start: Start) -> list[Callable[[], object]]:
        """Imports Triton, which is slow."""
        if not self.is_prewarmed:
            return []
        return list(import_module(f"asyncllm.kernels.{self.name}.kernel").prewarm(start))


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A source compiled by nvcc, `asyncllm_{name}` its function.

    `structs`: mirrors of its structs, which a library is compared with when it is loaded.
    `capabilities`: the devices' that it is written for. `definitions_for`: what a start compiles it
    with; None where that start does not use it.
    """

    name: str
    falls_back_to: str
    source: Path
    structs: tuple[type[ctypes.Structure], ...]
    capabilities: tuple[tuple[int, int], ...]
    definitions_for: Callable[[Start], Definitions | None]

    def supports(self, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        return torch.cuda.get_device_capability(device) in self.capabilities

    def library(self, start: Start) -> Library | None:
        """The one that this start uses."""
        definitions = self._definitions(start)
        return None if definitions is None else self._library(start.device, definitions)

    def begin_loading_for(self, start: Start) -> Callable[[], Launch | None]:
        """`begin_loading`; None also where this start does not use it."""
        return self.begin_loading(start.device, self._definitions(start))

    def begin_loading(
        self, device: torch.device, definitions: Definitions | None = ()
    ) -> Callable[[], Launch | None]:
        """Its function, compiled in the background where no start did it before; the result waits
        for that. None where device or compiler do not do it, or there are no definitions."""
        if definitions is None or not self.supports(device):
            return lambda: None
        loading = self._library(device, definitions).begin_loading()

        def wait() -> Launch | None:
            library = loading()
            return None if library is None else self.function_of(library)

        return wait

    def function_of(self, library: ctypes.CDLL) -> Launch:
        """Raises `TypeError` where a struct of the library is not as its mirror."""
        for struct in self.structs:
            _check_layout(library, struct)
        function = getattr(library, f"asyncllm_{self.name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        return function

    def launch(self, launch: Launch, args: ctypes.Structure, num_blocks: int, stream: int) -> None:
        """Raises `RuntimeError` where the device refuses it."""
        if error := launch(ctypes.byref(args), num_blocks, stream):
            raise RuntimeError(f"{self.name}: CUDA error {error}")

    def _definitions(self, start: Start) -> Definitions | None:
        return self.definitions_for(start) if self.supports(start.device) else None

    def _library(self, device: torch.device, definitions: Definitions) -> Library:
        capability = torch.cuda.get_device_capability(device)
        return Library(self.source, capability, definitions, self.falls_back_to)


class _Field(ctypes.Structure):
    """One entry of EXPORT_LAYOUT (include/layout.cuh); the last one has no name, and the size."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


Layout = dict[str, tuple[int, int]]  # field -> offset, size


def _check_layout(library: ctypes.CDLL, struct: type[ctypes.Structure]) -> None:
    describe = getattr(library, f"asyncllm_layout_{struct.__name__}")
    describe.restype = ctypes.POINTER(_Field)
    entries, theirs = describe(), Layout()
    place = 0
    while entries[place].name is not None:
        theirs[entries[place].name.decode()] = (entries[place].offset, entries[place].size)
        place += 1
    theirs["sizeof"] = (entries[place].offset, 0)
    ours = {name: _place_of(struct, name) for name, *_ in struct._fields_}
    ours["sizeof"] = (ctypes.sizeof(struct), 0)
    if ours != theirs:
        wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise TypeError(f"{struct.__module__}.{struct.__name__} is not the source's: {wrong}")


def _place_of(struct: type[ctypes.Structure], name: str) -> tuple[int, int]:
    field = getattr(struct, name)
    return field.offset, field.size

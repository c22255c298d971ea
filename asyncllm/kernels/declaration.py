"""The declaration of a CUDA kernel, and the start that it is asked about.

A kernel is a folder with its source, its Python and one declaration, which registry.py lists. From
that a start knows what to compile before it has weights; it knows no kernel by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from asyncllm.kernels.nvcc import Library
from asyncllm.kernels.records import AttentionLayer, SlotState
from asyncllm.model_config import ModelConfig

# (arguments, blocks, stream) -> cudaError_t
Launch = Callable[[object, int, int], int]
Definitions = tuple[str, ...]
DIVISOR = 16  # of integer arguments: what Triton compiles variants for


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
        # Not of every model, nor one number.
        size = getattr(hf, "intermediate_size", 0)
        hidden_size = getattr(hf, "hidden_size", 0)
        return cls(model.num_layers, hidden_size, size, model.vocab_size)

    def share(self, num_ranks: int) -> DenseShape:
        """The sizes of one of `num_ranks` ranks, which divide each layer and the vocabulary."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // num_ranks,
            vocab_size=-(-self.vocab_size // num_ranks),
        )


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A GEMV of one row, by what its kernel's variant depends on.

    squares: parts of the factor that comes with the row (`Normed`), 0: none. norm_dtype: of the
    weight of the norm behind it, where the product is added to a residual; else None.
    """

    in_features: int
    out_features: int
    has_bias: bool
    gated: bool
    squares: int
    norm_dtype: torch.dtype | None

    def with_few_features(self) -> RowProduct:
        """The same variant: of the outputs Triton asks only whether 16 divides their number."""
        is_aligned = self.out_features % DIVISOR == 0
        return replace(self, out_features=DIVISOR) if is_aligned else self


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the engine on a CUDA device, before there are weights."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    layers: Sequence[AttentionLayer]  # this rank's; their norms' weights may be without memory
    sizes: DenseShape  # the whole model's
    dense_weights: str | None  # as persistent_decode has them; None: `sizes` do not say all
    attention_backend: str
    has_fast_ops: bool  # the model runs by our kernels, not by torch's
    captures_prefills: bool
    free_decode_sizes: Sequence[int]  # rows of captured decode steps whose kernels we may choose
    new_state: Callable[[int, int], SlotState]  # of one slot, by its pages and the vocabulary
    row_products: Sequence[RowProduct] = ()  # that a step of one row makes by the GEMV
    num_ranks: int = 1  # that divide each layer among them

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current_stream(tensor: torch.Tensor) -> int:
    """Address of the tensor's device's; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


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

    def definitions(self, start: Start) -> Definitions | None:
        """`definitions_for`; None also on a device that it is not written for."""
        return self.definitions_for(start) if self.supports(start.device) else None

    def library(self, device: torch.device, definitions: Definitions) -> Library:
        capability = torch.cuda.get_device_capability(device)
        return Library(self.source, capability, definitions, self.falls_back_to)

    def begin_loading(
        self, device: torch.device, definitions: Definitions | None = ()
    ) -> Callable[[], Launch | None]:
        """Its function, compiled in the background where no start did it before; the result waits
        for that. None where device or compiler do not do it, or there are no definitions."""
        if definitions is None or not self.supports(device):
            return lambda: None
        loading = self.library(device, definitions).begin_loading()
        return lambda: None if (library := loading()) is None else self.function_of(library)

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


class _Field(ctypes.Structure):
    """One entry of EXPORT_LAYOUT (include/layout.cuh); the last one is `sizeof`, the struct's."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def _check_layout(library: ctypes.CDLL, struct: type[ctypes.Structure]) -> None:
    describe = getattr(library, f"asyncllm_layout_{struct.__name__}")
    describe.restype = ctypes.POINTER(_Field)
    theirs: dict[str, tuple[int, int]] = {}  # field -> offset, size
    for entry in describe():  # a pointer, which has no end
        theirs[entry.name.decode()] = entry.offset, entry.size
        if entry.name == b"sizeof":
            break
    fields = [(name, getattr(struct, name)) for name, *_ in struct._fields_]
    ours = {name: (field.offset, field.size) for name, field in fields}
    ours["sizeof"] = 0, ctypes.sizeof(struct)
    if wrong := sorted({name for name, _ in ours.items() ^ theirs.items()}):
        raise TypeError(f"{struct.__module__}.{struct.__name__} is not the source's: {wrong}")

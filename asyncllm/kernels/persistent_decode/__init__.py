"""A decode step of up to 8 rows in one kernel, from the embeddings to the logits.

A step of a few rows is a read of the weights, and launched kernel by kernel it stops reading five
times a layer: until a kernel's last block has ended, until the next one's first weights come. Here
one block per SM stays for the whole step and asks for weights and old keys far ahead, across every
point where blocks wait for each other. The kernel, persistent_decode.cu, is compiled for the
model's heads. It knows the layout of the KV cache, and does what the layers of a dense decoder do,
in the same roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import (
    CudaKernel,
    Definitions,
    DenseShape,
    Launch,
    Start,
    current_stream,
    num_sms,
)
from asyncllm.kernels.records import AttentionLayer, DecodeRows, HeadNorm, Norm, Rotation

MAX_ROWS = 8
MAX_GROUP = 8  # query heads of one KV head
MAX_LAYERS = 96
HEAD_DIMS = (64, 128)
COLUMNS = 256  # of a product's columns a multiple
FEATURES = 8  # of its outputs
TOKENS = 8  # of a page
MAX_BLOCK_SPLITS = 8  # of rows and KV heads, that a block has

_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Layer(ctypes.Structure):
    """The kernel's, field by field; null for what there is not."""

    _fields_ = (
        *((name, _pointer * 4) for name in ("weights", "biases", "norms")),
        *((name, _pointer) for name in ("q_norm", "k_norm", "cache")),
    )


class Args(ctypes.Structure):
    """The kernel's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("layers", "final_norm", "head", "embeddings", "logits")),
        *((name, _pointer) for name in ("exchange", "phase", "stuck", "block_tables", "positions")),
        *((name, _pointer) for name in ("rotary_rows", "cos_sin")),
        *((name, _int64) for name in ("table_stride", "page_stride", "kv_stride", "layer_bytes")),
        *((name, _int32) for name in ("num_layers", "rows", "hidden", "heads", "kv_heads")),
        *((name, _int32) for name in ("intermediate", "vocab")),
        *((name, _float) for name in ("eps", "head_eps", "scale")),
    )


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's, as `Layer` has them."""

    weights: Sequence[torch.Tensor]  # of the four products, in the order of `Kind`
    biases: Sequence[torch.Tensor | None]
    norms: Sequence[torch.Tensor | None]  # of their inputs
    head_norm: HeadNorm | None


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """A dense decoder's but the embeddings. `attention`: the constants of all layers."""

    layers: Sequence[LayerTensors]
    attention: AttentionLayer
    sizes: DenseShape
    final_norm: Norm
    head: torch.Tensor  # [vocab, hidden]


def definitions(
    sizes: DenseShape,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    block_size: int,
    num_blocks: int,
) -> Definitions | None:
    """To compile the source with, for a dense decoder; None where it does not support it: by
    sizes that the kernel divides, and layers that see their whole context."""
    layer, widths = layers[0], (sizes.hidden_size, sizes.intermediate_size)
    is_supported = (
        dtype is torch.bfloat16
        and sizes.num_layers <= MAX_LAYERS
        and layer.head_dim in HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads <= MAX_GROUP
        and all(other.window is None for other in layers)
        and all(width % COLUMNS == 0 for width in widths)
        and layer.num_heads * layer.head_dim % COLUMNS == 0
        and sizes.vocab_size % FEATURES == 0
        # Every block writes logits, and says by them that it waited in vain.
        and sizes.vocab_size >= FEATURES * num_blocks
        and block_size % TOKENS == 0
        and _splits_fit(layer, num_blocks)
    )
    return shape_definitions(layer, block_size) if is_supported else None


def _splits_fit(layer: AttentionLayer, num_blocks: int) -> bool:
    """Each row and KV head is one block's, which has room for so many."""
    return MAX_ROWS * layer.num_kv_heads <= MAX_BLOCK_SPLITS * num_blocks


def _definitions_for(start: Start) -> Definitions | None:
    if not start.is_dense or min(start.autotuned_sizes, default=MAX_ROWS + 1) > MAX_ROWS:
        return None
    return definitions(
        start.sizes, start.layers, start.dtype, start.block_size, num_sms(start.device)
    )


KERNEL = CudaKernel(
    name="persistent_decode",
    falls_back_to="the model's layers",
    source=Path(__file__).with_name("persistent_decode.cu"),
    structs=(Args, Layer),
    capabilities=((9, 0), (10, 0)),  # with 227 KiB of shared memory for a block
    definitions_for=_definitions_for,
)


class PersistentDecode:
    """For one model, and its KV cache. Steps must not overlap."""

    def __init__(
        self,
        model: DecoderTensors,
        pages: Sequence[torch.Tensor],
        launch: Launch,
        num_blocks: int,
    ) -> None:
        """`pages`: of each layer. `launch`: the compiled kernel's; `num_blocks`: that are on the
        device at once."""
        assert _splits_fit(model.attention, num_blocks)
        self._model = model  # keeps its tensors' memory
        self._launch = launch
        self._num_blocks = num_blocks
        device = pages[0].device
        # What blocks pass to each other, of this step and of the next; all bits of a word: empty.
        num_words = _exchange_words(model, num_blocks)
        shape = (2, len(model.layers), num_words)
        self._exchange = torch.full(shape, -1, dtype=torch.int32, device=device)
        # Which of these two is next; then whether a step got stuck.
        self._words = torch.zeros(2, dtype=torch.int32, device=device)
        words = self._words.data_ptr()
        self._layers = _layer_table(model, pages)
        self._constants = {
            **_sizes(model, pages[0]),
            "layers": self._layers.data_ptr(),
            "final_norm": model.final_norm.weight.data_ptr(),
            "head": model.head.data_ptr(),
            "exchange": self._exchange.data_ptr(),
            "layer_bytes": 4 * num_words,
            "phase": words,
            "stuck": words + 4,
        }

    @property
    def is_stuck(self) -> bool:
        """Whether any step so far waited in vain for a block. Waits for the device."""
        return bool(self._words[-1])

    def forward(
        self, embeddings: torch.Tensor, rotation: Rotation, rows: DecodeRows
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of embeddings [rows, hidden_size] at `rows.positions`, whose
        keys and values are written to their pages. Capturable. For at most MAX_ROWS rows. Each row
        has a NaN where a block waited in vain for another.
        """
        num_rows = len(embeddings)
        assert num_rows <= MAX_ROWS
        for indices in (rows.positions, rows.block_tables, rotation.rows):
            assert indices.dtype is torch.int32 and indices.stride(-1) == 1
        logits = embeddings.new_empty((num_rows, len(self._model.head)))
        args = Args(
            **self._constants,
            embeddings=embeddings.data_ptr(),
            logits=logits.data_ptr(),
            block_tables=rows.block_tables.data_ptr(),
            positions=rows.positions.data_ptr(),
            rotary_rows=rotation.rows.data_ptr(),
            cos_sin=rotation.cos_sin.data_ptr(),
            table_stride=rows.block_tables.stride(0),
            rows=num_rows,
        )
        KERNEL.launch(self._launch, args, self._num_blocks, current_stream(logits))
        return logits


def _sizes(model: DecoderTensors, pages: torch.Tensor) -> dict[str, int | float]:
    """The numbers among the kernel's arguments that no step changes."""
    layer, sizes, norm = model.attention, model.sizes, model.attention.head_norm
    return {
        "page_stride": pages.stride(0),
        "kv_stride": pages.stride(1),
        "num_layers": sizes.num_layers,
        "hidden": sizes.hidden_size,
        "heads": layer.num_heads,
        "kv_heads": layer.num_kv_heads,
        "intermediate": sizes.intermediate_size,
        "vocab": sizes.vocab_size,
        "eps": model.final_norm.eps,
        "head_eps": norm.eps if norm is not None else 0.0,
        "scale": layer.scale,
    }


def _exchange_words(model: DecoderTensors, num_blocks: int) -> int:
    """Words of 4 bytes that one layer has: exchange.cuh. A multiple of 4."""
    layer, sizes = model.attention, model.sizes
    group = layer.num_heads // layer.num_kv_heads
    # q, k, v; attention's result
    heads = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    widths = 2 * sizes.hidden_size + sizes.intermediate_size + heads
    splits = num_blocks * group * (layer.head_dim + 1)
    return -(-(MAX_ROWS * widths // 2 + splits) // 4) * 4


def _layer_table(model: DecoderTensors, pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The kernel's `Layer`s: uint8, on the pages' device."""
    layers = (Layer * len(model.layers))(
        *(_layer_of(layer, cache) for layer, cache in zip(model.layers, pages, strict=True))
    )
    return torch.frombuffer(bytearray(layers), dtype=torch.uint8).to(pages[0].device)


def _layer_of(layer: LayerTensors, cache: torch.Tensor) -> Layer:
    norm = layer.head_norm
    q_norm, k_norm = (None, None) if norm is None else _addresses([norm.q_weight, norm.k_weight])
    return Layer(
        weights=(_pointer * 4)(*_addresses(layer.weights)),
        biases=(_pointer * 4)(*_addresses(layer.biases)),
        norms=(_pointer * 4)(*_addresses(layer.norms)),
        q_norm=q_norm,
        k_norm=k_norm,
        cache=cache.data_ptr(),
    )


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]

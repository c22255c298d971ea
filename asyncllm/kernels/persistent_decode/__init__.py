"""A decode step of up to 8 rows in one kernel, from the embeddings to the logits.

A step of a few rows is a read of the weights, and launched kernel by kernel it stops reading five
times a layer: until a kernel's last block has ended, until the next one's first weights come. Here
one block per SM stays for the whole step and asks for weights and old keys far ahead, across every
point where blocks wait for each other. The kernel, persistent_decode.cu, is compiled for the
model's heads and the format of its layers' weights. It knows the layout of the KV cache, and does
what the layers of a dense decoder do, in the same roundings. models/persistent_decode.py launches
it.

On tensor-parallel ranks each rank's GPU runs the kernel with its share of the weights, and all of
them together: blocks send each other their summands of a product's outputs (ranks.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncllm.kernels.all_reduce import RANKS
from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import CudaKernel, Definitions, DenseShape, Start, num_sms
from asyncllm.kernels.records import AttentionLayer

MAX_ROWS = 8
MAX_GROUP = 8  # query heads of one KV head
HEAD_DIMS = (64, 128)
COLUMNS = 256  # of a product's columns a multiple
FEATURES = 8  # of its outputs
TOKENS = 8  # of a page
MAX_RANKS = 8
MAX_BLOCK_SPLITS = 8  # of rows and KV heads, that a block has
# Columns that a warp takes at a time of quantised weights, where all warps then have some of each
# product: longer copies are quicker.
WIDE, LEAST_WIDTH = 512, 2048
PLAIN = "PLAIN"
# Quantised weights, by their kind, the columns that share a scale, and whether there are offsets ->
# in the source.
FORMATS = {
    ("fp8", None, False): "FP8",
    ("int8", None, False): "INT8",
    ("int4", 128, False): "INT4",
    ("int4", 128, True): (INT4_OFFSETS := "INT4_OFFSETS"),
}
MOST_LAYERS = {INT4_OFFSETS: 56}  # whose pointers have room beside the rest, else
MAX_LAYERS = 80

_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Layer(ctypes.Structure):
    """The kernel's, field by field; null for what there is not."""

    _fields_ = (
        *((name, _pointer * 4) for name in ("weights", "scales", "biases", "norms")),
        *((name, _pointer) for name in ("q_norm", "k_norm", "cache")),
    )


class Args(ctypes.Structure):
    """The kernel's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("layers", "final_norm", "head", "offsets")),
        *((name, _pointer) for name in ("embeddings", "logits")),
        *((name, _pointer) for name in ("exchange", "phase", "stuck", "block_tables", "positions")),
        *((name, _pointer) for name in ("rotary_rows", "cos_sin")),
        *((name, _int64) for name in ("table_stride", "page_stride", "kv_stride", "layer_bytes")),
        *((name, _int32) for name in ("num_layers", "rows", "hidden", "heads", "kv_heads")),
        *((name, _int32) for name in ("intermediate", "vocab")),
        *((name, _float) for name in ("eps", "head_eps", "scale")),
        ("rank", _int32),
        ("peers", _pointer * MAX_RANKS),
        *((name, _pointer) for name in ("received", "closed")),
    )


def definitions(
    sizes: DenseShape,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    block_size: int,
    num_blocks: int,
    weights: str = PLAIN,
    num_ranks: int = 1,
) -> Definitions | None:
    """To compile the source with, for a dense decoder whose layers' weights are in this format;
    None where it does not support it: by sizes that the kernel divides, and layers that see their
    whole context. sizes, layers: a rank's."""
    layer = layers[0]
    widths = sizes.hidden_size, sizes.intermediate_size, layer.num_heads * layer.head_dim
    is_supported = (
        dtype is torch.bfloat16
        and sizes.num_layers <= MOST_LAYERS.get(weights, MAX_LAYERS)
        and num_ranks in (1, *RANKS)
        and layer.head_dim in HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads <= MAX_GROUP
        and all(other.window is None for other in layers)
        and all(width % COLUMNS == 0 for width in widths)
        and sizes.vocab_size % FEATURES == 0
        # Every block writes logits, and says by them that it waited in vain.
        and sizes.vocab_size >= FEATURES * num_blocks
        and block_size % TOKENS == 0
        and _splits_fit(layer, num_blocks)
    )
    if not is_supported:
        return None
    shape = shape_definitions(layer, block_size)
    if num_ranks > 1:
        shape += (f"-DRANKS={num_ranks}",)
    if weights == PLAIN:
        return shape
    is_wide = all(width % WIDE == 0 and width >= LEAST_WIDTH for width in widths)
    return *shape, f"-DWEIGHTS={weights}", f"-DCOLUMNS={WIDE if is_wide else COLUMNS}"


def _splits_fit(layer: AttentionLayer, num_blocks: int) -> bool:
    """Each row and KV head is one block's, which has room for so many."""
    return MAX_ROWS * layer.num_kv_heads <= MAX_BLOCK_SPLITS * num_blocks


def _definitions_for(start: Start) -> Definitions | None:
    is_asked = min(start.free_decode_sizes, default=MAX_ROWS + 1) <= MAX_ROWS
    if start.dense_weights is None or not is_asked:
        return None
    sizes, num_ranks = start.sizes.share(start.num_ranks), start.num_ranks
    shape = sizes, start.layers, start.kv_dtype, start.block_size
    return definitions(*shape, num_sms(start.device), start.dense_weights, num_ranks)


KERNEL = CudaKernel(
    name="persistent_decode",
    falls_back_to="the model's layers",
    source=Path(__file__).with_name("persistent_decode.cu"),
    structs=(Args, Layer),
    capabilities=((9, 0), (10, 0)),  # with 227 KiB of shared memory for a block
    definitions_for=_definitions_for,
)


def exchange_words(sizes: DenseShape, layer: AttentionLayer, num_blocks: int) -> int:
    """Words of 4 bytes that one layer has: exchange.cuh. A multiple of 4."""
    assert _splits_fit(layer, num_blocks)
    group = layer.num_heads // layer.num_kv_heads
    # q, k, v; attention's result
    heads = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    widths = 2 * sizes.hidden_size + sizes.intermediate_size + heads
    splits = num_blocks * group * (layer.head_dim + 1)
    return -(-(MAX_ROWS * widths // 2 + splits) // 4) * 4


def received_bytes(num_layers: int, hidden_size: int, num_ranks: int) -> int:
    """Memory of each rank for what ranks send it: ranks.cuh."""
    num_sets, num_products, number_bytes = 2, 2, 2
    num_numbers = num_sets * num_layers * num_products * num_ranks * MAX_ROWS * hidden_size
    return num_numbers * number_bytes

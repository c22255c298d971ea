"""A decode step of up to 8 rows in one kernel, from the embeddings to the logits.

A step of a few rows is a read of the weights, and launched kernel by kernel it stops reading five
times a layer: until a kernel's last block has ended, until the next one's first weights come. Here
one block per multiprocessor stays for the whole step and asks for weights and old keys far ahead,
across every point where blocks wait for each other. The kernel, persistent_decode.cu, is compiled
for the model's heads. It knows the layout of the KV cache, and does what the layers of decoder.py
do, in the same roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from asyncllm.attention import cuda_source
from asyncllm.attention.balanced_decode import definitions
from asyncllm.attention.base import AttentionLayer, DecodeRows
from asyncllm.attention.cuda_source import Launch
from asyncllm.attention.kv_cache import KVCache
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DecoderLayer, DenseDecoder
from asyncllm.models.layers.linear import Linear

SOURCE = Path(__file__).parent / "cuda" / "persistent_decode.cu"
MAX_ROWS = 8
MAX_GROUP = 8  # query heads of one KV head
MAX_LAYERS = 96
HEAD_DIMS = (64, 128)
CAPABILITIES = ((9, 0), (10, 0))  # with 227 KiB of shared memory for a block
COLUMNS = 256  # of a product's columns a multiple
FEATURES = 8  # of its outputs
TOKENS = 8  # of a page
MAX_SHARES = 8  # of rows and KV heads, that a block has

POINTERS_OF_LAYER = 15
_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Args(ctypes.Structure):
    """The kernel's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("layers", "final_norm", "head", "embeddings", "logits")),
        *((name, _pointer) for name in ("exchange", "turn", "stuck", "block_tables", "positions")),
        *((name, _pointer) for name in ("rotary_rows", "cos_sin")),
        *((name, _int64) for name in ("table_stride", "page_stride", "kv_stride", "layer_bytes")),
        *((name, _int32) for name in ("num_layers", "rows", "hidden", "heads", "kv_heads")),
        *((name, _int32) for name in ("intermediate", "vocab")),
        *((name, _float) for name in ("eps", "head_eps", "scale")),
    )


def supports(model: DenseDecoder) -> bool:
    """By the model's shapes: sizes the kernel divides, and layers that see their whole context."""
    layer, weight = model.attention_layers[0], model.embed_tokens.weight
    widths = (weight.shape[1], _features(model.layers[0].mlp.gate_up_proj) // 2)
    return (
        weight.dtype is torch.bfloat16
        and len(model.layers) <= MAX_LAYERS
        and layer.head_dim in HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads <= MAX_GROUP
        and all(other.window is None for other in model.attention_layers)
        and all(width % COLUMNS == 0 for width in widths)
        and layer.num_heads * layer.head_dim % COLUMNS == 0
        and weight.shape[0] % FEATURES == 0
    )


def flags_for(model: CausalLM, block_size: int, device: torch.device) -> tuple[str, ...] | None:
    """What the source is compiled with; None where it is of no use to such a model or device."""
    if device.type != "cuda" or not isinstance(model, DenseDecoder) or block_size % TOKENS:
        return None
    if torch.cuda.get_device_capability(device) not in CAPABILITIES or not supports(model):
        return None
    # Every block writes logits, and says by them that it waited in vain.
    num_blocks, layer = num_blocks_on(device), model.attention_layers[0]
    if len(model.embed_tokens.weight) < FEATURES * num_blocks:
        return None
    if not _shares_fit(layer, num_blocks):
        return None
    return definitions(layer, block_size)


def _shares_fit(layer: AttentionLayer, num_blocks: int) -> bool:
    """Each row and KV head is one block's, which has room for so many."""
    return MAX_ROWS * layer.num_kv_heads <= MAX_SHARES * num_blocks


def num_blocks_on(device: torch.device) -> int:
    """That run at once: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def begin_loading(
    model: CausalLM, block_size: int, device: torch.device
) -> Callable[[], Launch | None]:
    """The kernel for a model that may still be without its weights, compiled meanwhile where no
    start did it before; the result waits for that. None where model, device or compiler do not do
    it.
    """
    flags = flags_for(model, block_size, device)
    if flags is None:
        return lambda: None
    capability = torch.cuda.get_device_capability(device)
    function = "asyncllm_persistent_decode"
    return cuda_source.begin_loading_launch(SOURCE, function, capability, flags)


class PersistentDecode:
    """For one model, which it `supports`, and its KV cache. Steps must not overlap."""

    def __init__(self, model: CausalLM, cache: KVCache, launch: Launch, num_blocks: int) -> None:
        """`launch`: the compiled kernel's; `num_blocks`: that are on the device at once."""
        assert isinstance(model, DenseDecoder)
        assert _shares_fit(model.attention_layers[0], num_blocks)
        self._model = model
        self._launch = launch
        self._num_blocks = num_blocks
        device = cache.layers[0].device
        # What blocks pass to each other, of this step and of the next; all bits of a word: empty.
        num_words = _exchange_words(model, num_blocks)
        shape = (2, len(model.layers), num_words)
        self._exchange = torch.full(shape, -1, dtype=torch.int32, device=device)
        # Whose turn it is of these two; then whether a step got stuck.
        self._words = torch.zeros(2, dtype=torch.int32, device=device)
        words = self._words.data_ptr()
        self._layers = _layer_table(model, cache)
        self._constants = {
            **_sizes(model, cache),
            "layers": self._layers.data_ptr(),
            "final_norm": model.norm.constants.weight.data_ptr(),
            "head": model.lm_head.weight.data_ptr(),
            "exchange": self._exchange.data_ptr(),
            "layer_bytes": 4 * num_words,
            "turn": words,
            "stuck": words + 4,
        }

    @property
    def is_stuck(self) -> bool:
        """Whether any step so far waited in vain for a block. Waits for the device."""
        return bool(self._words[-1])

    def forward(
        self, token_ids: torch.Tensor, rows: DecodeRows, prompt_lens: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of int32 token_ids [rows] at `rows.positions`, whose keys and
        values are written to their pages. Capturable. For at most MAX_ROWS rows. Each row has a
        NaN where a block waited in vain for another.
        """
        num_rows = len(token_ids)
        assert num_rows <= MAX_ROWS
        embeddings = self._model.embed_tokens(token_ids)
        rotation = self._model.rotary.rotation(rows.positions, prompt_lens)
        for indices in (rows.positions, rows.block_tables, rotation.rows):
            assert indices.dtype is torch.int32 and indices.stride(-1) == 1
        logits = embeddings.new_empty((num_rows, len(self._model.lm_head.weight)))
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
        stream = torch.cuda.current_stream().cuda_stream if logits.is_cuda else 0
        if error := self._launch(ctypes.byref(args), self._num_blocks, stream):
            raise RuntimeError(f"persistent_decode: CUDA error {error}")
        return logits


def _sizes(model: DenseDecoder, cache: KVCache) -> dict[str, int | float]:
    """The numbers among the kernel's arguments that no step changes."""
    layer, pages = model.attention_layers[0], cache.layers[0]
    vocab_size, hidden_size = model.lm_head.weight.shape
    norm = layer.head_norm
    return {
        "page_stride": pages.stride(0),
        "kv_stride": pages.stride(1),
        "num_layers": len(model.layers),
        "hidden": hidden_size,
        "heads": layer.num_heads,
        "kv_heads": layer.num_kv_heads,
        "intermediate": _features(model.layers[0].mlp.gate_up_proj) // 2,
        "vocab": vocab_size,
        "eps": model.norm.constants.eps,
        "head_eps": norm.eps if norm is not None else 0.0,
        "scale": layer.scale,
    }


def _exchange_words(model: DenseDecoder, num_blocks: int) -> int:
    """Of 4 bytes, that one layer has: exchange.cuh. A multiple of 4."""
    layer, hidden_size = model.attention_layers[0], model.embed_tokens.weight.shape[1]
    group = layer.num_heads // layer.num_kv_heads
    heads = (
        2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    )  # q, k, v; attention's result
    widths = 2 * hidden_size + _features(model.layers[0].mlp.gate_up_proj) // 2 + heads
    shares = num_blocks * group * (layer.head_dim + 1)
    return -(-(MAX_ROWS * widths // 2 + shares) // 4) * 4


def _layer_table(model: DenseDecoder, cache: KVCache) -> torch.Tensor:
    """The kernel's `Layer`s: int64 [layers, POINTERS_OF_LAYER] on the cache's device."""
    pointers = [
        [*_pointers(layer), pages.data_ptr()]
        for layer, pages in zip(model.layers, cache.layers, strict=True)
    ]
    table = torch.tensor(pointers, dtype=torch.int64, device=cache.layers[0].device)
    assert table.shape[1] == POINTERS_OF_LAYER
    return table


def _pointers(layer: DecoderLayer) -> list[int]:
    """In the order of the kernel's `Layer`, all but its pages; 0 for what there is not."""
    attention, mlp, norm = layer.attention, layer.mlp, layer.attention.layer.head_norm
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    tensors = [
        *(linear.weights["weight"] for linear in linears),
        *(linear.weights.get("bias") for linear in linears),
        layer.input_norm.constants.weight,
        None,
        layer.post_attention_norm.constants.weight,
        None,
        norm.q_weight if norm is not None else None,
        norm.k_weight if norm is not None else None,
    ]
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _features(linear: Linear) -> int:
    return linear.weights["weight"].shape[0]

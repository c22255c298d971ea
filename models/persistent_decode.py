"""Decode steps of a dense decoder by the persistent kernel, which runs a whole step.

On tensor-parallel ranks all run it for the same steps: it waits for the other ranks' kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from asyncllm.attention.base import DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.kernels.all_reduce import RANKS, PeerWords
from asyncllm.kernels.declaration import DenseShape, Launch, current_stream
from asyncllm.kernels.persistent_decode import (
    FORMATS,
    KERNEL,
    MAX_RANKS,
    MAX_ROWS,
    PLAIN,
    Args,
    Layer,
    exchange_words,
    received_bytes,
)
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DecoderLayer, DenseDecoder
from asyncllm.models.layers.linear_method import LinearMethod
from asyncllm.models.quantization.method import QuantizedLinearMethod


def weight_format(model: CausalLM) -> str | None:
    """How all layers of a decoder store their weights, in the kernel's words; None where it has
    none for them, for layers that differ in it, or for another model."""
    if not isinstance(model, DenseDecoder) or not model.is_plain:
        return None
    formats = {_format_of(linear.method) for layer in model.layers for linear in layer.linears}
    return formats.pop() if len(formats) == 1 else None


def _format_of(method: LinearMethod) -> str | None:
    if not isinstance(method, QuantizedLinearMethod):
        return PLAIN
    scheme = method.scheme  # its activations do not matter: of few rows they stay in 16 bits
    if scheme.has_order:
        return None
    return FORMATS.get((scheme.kind, scheme.group, scheme.has_offset))


class PersistentDecode:
    """Runs steps of a model that the kernel supports. Steps must not overlap."""

    def __init__(
        self,
        model: DenseDecoder,
        cache: KVCache,
        launch: Launch,
        num_blocks: int,
        words: PeerWords | None = None,
    ) -> None:
        """launch: the compiled kernel. num_blocks: resident on the device at the same time. words:
        `shared_bytes` of each of several ranks."""
        self._model = model  # keeps its tensors alive
        self._launch = launch
        self._num_blocks = num_blocks
        sizes, device = _sizes_of(model), cache.layers[0].device
        # Words that blocks exchange, of this step and the next; empty words have all bits set.
        num_words = exchange_words(sizes, model.attention_layers[0], num_blocks)
        shape = (2, sizes.num_layers, num_words)
        self._exchange = torch.full(shape, -1, dtype=torch.int32, device=device)
        # Which of the two is next; whether a step got stuck.
        self._words = torch.zeros(2, dtype=torch.int32, device=device)
        flags = self._words.data_ptr()
        self._layers = _layer_table(model, cache.layers)
        self._offsets = _offset_table(model, device)
        self._constants = {
            **_numbers(model, sizes, cache.layers[0]),
            "layers": self._layers.data_ptr(),
            "final_norm": model.norm.constants.weight.data_ptr(),
            "head": model.lm_head.weight.data_ptr(),
            "offsets": self._offsets.data_ptr(),
            "exchange": self._exchange.data_ptr(),
            "layer_bytes": 4 * num_words,
            "phase": flags,
            "stuck": flags + 4,
            **_ranks(words),
        }

    def forward(
        self, token_ids: torch.Tensor, rows: DecodeRows, prompt_lens: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of token_ids, int32 [rows], at `rows.positions`. Writes keys
        and values to their pages. Capturable. Takes up to MAX_ROWS rows. If a block times out
        waiting for another, each row has a NaN.
        """
        embeddings = self._model.embed_tokens(token_ids)
        rotation = self._model.rotaries[0].rotation(rows.positions, prompt_lens)
        num_rows, (block_tables,) = len(embeddings), rows.block_tables
        assert num_rows <= MAX_ROWS
        for indices in (rows.positions, block_tables, rotation.rows):
            assert indices.dtype is torch.int32 and indices.stride(-1) == 1
        logits = embeddings.new_empty((num_rows, len(self._model.lm_head.weight)))
        args = Args(
            **self._constants,
            embeddings=embeddings.data_ptr(),
            logits=logits.data_ptr(),
            block_tables=block_tables.data_ptr(),
            positions=rows.positions.data_ptr(),
            rotary_rows=rotation.rows.data_ptr(),
            cos_sin=rotation.cos_sin.data_ptr(),
            table_stride=block_tables.stride(0),
            rows=num_rows,
        )
        KERNEL.launch(self._launch, args, self._num_blocks, current_stream(logits))
        # It has to follow: no rank begins another step before all have ended this one (ranks.cuh).
        return self._model.lm_head.gathered(logits)


def shared_bytes(model: CausalLM, mesh: MeshConfig) -> int:
    """Memory of each rank for what others send it in such steps of the model."""
    is_divided = mesh.only_divides_layers and mesh.tp in RANKS
    if not is_divided or weight_format(model) is None:
        return 0
    assert isinstance(model, DenseDecoder)
    return received_bytes(len(model.layers), len(model.norm.constants.weight), mesh.tp)


def _ranks(words: PeerWords | None) -> dict[str, Any]:
    """The kernel's arguments that only several ranks need."""
    if words is None:
        return {}
    return {
        "rank": words.rank,
        "peers": (ctypes.c_void_p * MAX_RANKS)(*words.addresses),
        "received": words.addresses[words.rank],
        "closed": words.closed,
    }


def _sizes_of(model: DenseDecoder) -> DenseShape:
    """The sizes of the model's weights, a rank's."""
    vocab_size, hidden_size = model.lm_head.weight.shape
    _, _, gate_up, _ = model.layers[0].linears
    intermediate_size = gate_up.weights["weight"].shape[0] // 2
    return DenseShape(len(model.layers), hidden_size, intermediate_size, vocab_size)


def _numbers(model: DenseDecoder, sizes: DenseShape, pages: torch.Tensor) -> dict[str, int | float]:
    """The kernel's numeric arguments that are the same in all steps."""
    layer, head_norm = model.attention_layers[0], model.attention_layers[0].head_norm
    return {
        "page_stride": pages.stride(0),
        "kv_stride": pages.stride(1),
        "num_layers": sizes.num_layers,
        "hidden": sizes.hidden_size,
        "heads": layer.num_heads,
        "kv_heads": layer.num_kv_heads,
        "intermediate": sizes.intermediate_size,
        "vocab": sizes.vocab_size,
        "eps": model.norm.constants.eps,
        "head_eps": head_norm.eps if head_norm is not None else 0.0,
        "scale": layer.scale,
    }


def _layer_table(model: DenseDecoder, pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The kernel's `Layer`s: uint8, on the pages' device."""
    layers = (Layer * len(model.layers))(
        *(_layer_of(layer, cache) for layer, cache in zip(model.layers, pages, strict=True))
    )
    return torch.frombuffer(bytearray(layers), dtype=torch.uint8).to(pages[0].device)


def _offset_table(model: DenseDecoder, device: torch.device) -> torch.Tensor:
    """Addresses, 0 where there are none: int64 [num_layers, 4]."""
    offsets = [[one.weights.get("offset") for one in layer.linears] for layer in model.layers]
    addresses = [[address or 0 for address in _addresses(each)] for each in offsets]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _layer_of(layer: DecoderLayer, pages: torch.Tensor) -> Layer:
    norms = layer.before_attention, layer.before_feed_forward
    first, second = (None if norm is None else norm.constants.weight for norm in norms)
    norm = layer.attention.layer.head_norm
    q_norm, k_norm = _addresses([None, None] if norm is None else [norm.q_weight, norm.k_weight])
    return Layer(
        weights=_addresses([linear.weights["weight"] for linear in layer.linears]),
        scales=_addresses([linear.weights.get("scale") for linear in layer.linears]),
        biases=_addresses([linear.weights.get("bias") for linear in layer.linears]),
        norms=_addresses([first, None, second, None]),  # of the four products' inputs
        q_norm=q_norm,
        k_norm=k_norm,
        cache=pages.data_ptr(),
    )


def _addresses(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """The tensors' addresses, null for None."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(tensors))(*addresses)

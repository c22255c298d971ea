"""A dense decoder's tensors for the kernel that runs its decode steps whole."""

from __future__ import annotations

import torch

from asyncllm.attention.base import DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.kernels import persistent_decode
from asyncllm.kernels.declaration import DenseShape, Launch
from asyncllm.kernels.persistent_decode import DecoderTensors, LayerTensors
from asyncllm.models.decoder import DecoderLayer, DenseDecoder


class PersistentDecode:
    """Decode steps of `model`, which the kernel supports, over its KV cache."""

    def __init__(
        self, model: DenseDecoder, cache: KVCache, launch: Launch, num_blocks: int
    ) -> None:
        """`launch`: the compiled kernel's; `num_blocks`: that are on the device at once."""
        self._model = model
        tensors = _decoder_tensors(model)
        self.kernel = persistent_decode.PersistentDecode(tensors, cache.layers, launch, num_blocks)

    def forward(
        self, token_ids: torch.Tensor, rows: DecodeRows, prompt_lens: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of int32 token_ids [rows]; see the kernel's `forward`."""
        embeddings = self._model.embed_tokens(token_ids)
        rotation = self._model.rotary.rotation(rows.positions, prompt_lens)
        return self.kernel.forward(embeddings, rotation, rows)


def _decoder_tensors(model: DenseDecoder) -> DecoderTensors:
    layers = [_layer_tensors(layer) for layer in model.layers]
    vocab_size, hidden_size = model.lm_head.weight.shape
    intermediate_size = layers[0].weights[2].shape[0] // 2
    return DecoderTensors(
        layers=layers,
        attention=model.attention_layers[0],
        sizes=DenseShape(len(layers), hidden_size, intermediate_size, vocab_size),
        final_norm=model.norm.constants,
        head=model.lm_head.weight,
    )


def _layer_tensors(layer: DecoderLayer) -> LayerTensors:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = (layer.input_norm.constants.weight, layer.post_attention_norm.constants.weight)
    return LayerTensors(
        weights=[linear.weights["weight"] for linear in linears],
        biases=[linear.weights.get("bias") for linear in linears],
        norms=(norms[0], None, norms[1], None),
        head_norm=attention.layer.head_norm,
    )

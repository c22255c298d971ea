"""The weights of a GGUF file, with the names and the layout of a Hugging Face checkpoint.

The gguf package dequantises them while they are read, one tensor at a time. In memory they are in
the model's dtype, or as `--quantization` says.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

import numpy as np
import torch

from asyncllm.errors import ModelLoadError
from asyncllm.gguf_file import ROPE_DIVISORS, GGUFHeader, GGUFTensor

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PERMUTED = {"attn_q": "head_count", "attn_k": "head_count_kv"}  # their rows, with llama only


class GGUFCheckpoint:
    """The part of `Checkpoint` that reading needs. Raises `ModelLoadError` naming the file."""

    def __init__(self, file: Path) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        self.source = file
        self._header = header = GGUFHeader(file)
        self._architecture = header.architecture
        self._dequantize = dequantize
        self._types = GGMLQuantizationType
        self._sizes = GGML_QUANT_SIZES
        self._names = {self._name(name): name for name in header.tensors if name != ROPE_DIVISORS}
        for name in header.tensors:
            self._num_bytes(name)
        for name in {tensor.type: name for name, tensor in header.tensors.items()}.values():
            self._check_type(name)

    @property
    def names(self) -> Set[str]:
        return self._names.keys()

    def file(self, name: str) -> Path:
        return self.source

    def header(self, name: str) -> tuple[list[int], str]:
        """Shape and dtype; always float32, as `read` dequantises."""
        return list(self._header.tensors[self._names[name]].shape), "F32"

    def read(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        tensor = self._header.tensors[stored]
        content = np.memmap(self.source, np.uint8, "r", tensor.start, (self._num_bytes(stored),))
        rows = content.reshape(int(np.prod(tensor.shape[:-1])), -1)
        values = self._dequantize(rows, self._types(tensor.type))
        matrix = torch.from_numpy(np.array(values, np.float32)).view(tensor.shape)
        return self._unpermuted(stored, matrix)

    def _check_type(self, name: str) -> None:
        kind = self._types(self._header.tensors[name].type)
        try:
            self._dequantize(np.zeros((1, self._sizes[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.source}: {name} has type {kind.name}, which the gguf package does not read"
            ) from error

    def _num_bytes(self, name: str) -> int:
        tensor: GGUFTensor = self._header.tensors[name]
        try:
            kind = self._types(tensor.type)
            block, block_bytes = self._sizes[kind]
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"{self.source}: {name} has type {tensor.type}") from error
        count = int(np.prod([int(size) for size in tensor.shape], dtype=object))
        if tensor.shape[-1] % block:
            raise ModelLoadError(
                f"{self.source}: {name}: {kind.name} has blocks of {block}, its rows "
                f"{tensor.shape[-1]} numbers"
            )
        num_bytes = count // block * block_bytes
        if tensor.start + num_bytes > self.source.stat().st_size:
            raise ModelLoadError(f"{self.source}: {name} ends behind the file's end")
        return int(num_bytes)

    @staticmethod
    def _name(name: str) -> str:
        """The Hugging Face name. Unknown names stay as they are, and the loader refuses them."""
        if (found := BLOCK.fullmatch(name)) is None:
            return NAMES.get(name, name)
        part = PARTS.get(found[2], found[2])
        return f"model.layers.{found[1]}.{part}.{found[3]}"

    def _unpermuted(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Reorder rows: llama.cpp uses interleaved RoPE, this model NeoX-style RoPE."""
        found = BLOCK.fullmatch(name)
        if self._architecture != "llama" or found is None or found[2] not in PERMUTED:
            return matrix
        key = f"llama.attention.{PERMUTED[found[2]]}"
        metadata = self._header.metadata
        heads = metadata.get(key, metadata.get("llama.attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or len(matrix) % (2 * heads):
            raise ModelLoadError(f"{self.source}: {key} {heads!r} does not fit {name}")
        return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

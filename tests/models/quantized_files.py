"""Checkpoints in every quantised format that is served, written by each format's documented layout.

A writer takes a matrix [rows, columns] and gives its tensors, by suffix, and the matrix that they
mean. Nothing of asyncllm's is used, so that a mistake cannot be made twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.models.tiny_checkpoints import SHAPE, random_reference

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
FP8 = torch.float8_e4m3fn
GROUP = 32
BLOCK = 32
INPUT_SCALE = 12.0 / 448
CONFIG = LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 128})
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """bound: of the difference in log-probabilities to transformers' model of the dequantised
    weights, of which the quantised layers see `activations` of their inputs."""

    write: Writer
    quantization_config: Mapping[str, Any]
    activations: Callable[[torch.Tensor], torch.Tensor] | None = None
    bound: float = 2e-3
    ignored: tuple[str, ...] = ()
    extra: Callable[[], Tensors] = field(default=dict)


def write_checkpoint(form: Format, folder: Path) -> tuple[Path, Any]:
    """The folder of a random model in this format, and transformers' of the dequantised weights."""
    reference = random_reference(CONFIG)
    reference.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    state = reference.state_dict()
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        layer = key.removesuffix(".weight")
        if any(part in layer for part in form.ignored):
            continue
        written, meant = form.write(tensors.pop(key))
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in written.items()}
        state[key].copy_(meant)
        if form.activations is not None:
            see(reference.get_submodule(layer), form.activations)
    save_file({k: v.contiguous() for k, v in (tensors | form.extra()).items()},
              folder / "model.safetensors")  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(form.quantization_config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, reference


def see(layer: torch.nn.Module, activations: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer.register_forward_pre_hook(lambda _, inputs: activations(inputs[0]))


def fp8_tokens(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(FP8).float() * scale


def fp8_all(x: torch.Tensor) -> torch.Tensor:
    return (x / INPUT_SCALE).clamp(-448, 448).to(FP8).float() * INPUT_SCALE


def int8_tokens(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def pack_words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned [a, b] -> int32 [a, b * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        words |= codes[:, i::per_word].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


def _groups(w: torch.Tensor, group: int | None) -> torch.Tensor:
    return w.reshape(w.shape[0], -1, group or w.shape[1])


def _integers(
    w: torch.Tensor, bits: int, group: int | None, sym: bool
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [rows, columns], float16 scales and zero points by group, what they mean."""
    grouped = _groups(w, group)
    top = 2**bits - 1
    if sym:
        scale = (grouped.abs().amax(2) / (top // 2)).half()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((high - low) / top).half()
        zero = (-low / scale).round().clamp(0, top)
    codes = (grouped / scale[..., None].float()).round() + zero[..., None].float()
    codes = codes.clamp(0, top)
    meant = (codes - zero[..., None].float()) * scale[..., None].float()
    return codes.reshape(w.shape).numpy().astype(np.uint8), scale, zero.float(), meant.view(w.shape)


# --- fp8 --------------------------------------------------------------------------------------


def fp8_tensor(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().max() / 448
    q = (w / scale).to(FP8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def fp8_static(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, meant = fp8_tensor(w)
    return tensors | {"input_scale": torch.tensor(INPUT_SCALE)}, meant


def fp8_channel(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
    q = (w / scale.float()).to(FP8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale.float()


def fp8_block(suffix: str) -> Writer:
    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = (-(-size // BLOCK) for size in w.shape)
        scale = torch.empty(rows, columns)
        q, meant = torch.empty(w.shape, dtype=FP8), torch.empty(w.shape)
        for i in range(rows):
            for j in range(columns):
                at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scale[i, j] = w[at].abs().max() / 448
                q[at] = (w[at] / scale[i, j]).to(FP8)
                meant[at] = q[at].float() * scale[i, j]
        return {"weight": q, suffix: scale}, meant

    return write


# --- integers ---------------------------------------------------------------------------------


def gptq(bits: int, sym: bool, group: int | None = GROUP, v2: bool = False,
         order: str = "none") -> Writer:  # fmt: skip
    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = w.shape[1]
        groups = np.arange(columns) // (group or columns)
        permutation = np.arange(columns)
        if order == "act":  # columns of a group lie anywhere, the same way in all of a product
            permutation = np.random.default_rng(columns).permutation(columns)
        sorted_w = w[:, permutation]
        codes, scale, zero, meant = _integers(sorted_w, bits, group, sym)
        g_idx = np.empty(columns, np.int32)
        g_idx[permutation] = groups
        in_place, back = np.empty_like(codes), torch.empty_like(meant)
        in_place[:, permutation] = codes
        back[:, permutation] = meant
        zeros = zero.numpy().astype(np.int64).T - (0 if v2 else 1)
        return {
            "qweight": pack_words(in_place, bits).T.contiguous(),
            "qzeros": pack_words(zeros & (2**bits - 1), bits),
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(g_idx),
        }, back

    return write


def awq(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero, meant = _integers(w, 4, GROUP, sym=False)

    def pack(numbers: np.ndarray) -> torch.Tensor:
        interleaved = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER]
        return pack_words(interleaved.reshape(numbers.shape), 4)

    zeros = zero.numpy().astype(np.uint8)
    return {
        "qweight": pack(codes.T),
        "qzeros": pack(zeros.T),
        "scales": scale.T.contiguous(),
    }, meant


def packed(bits: int, sym: bool, group: int | None = GROUP, ordered: bool = False) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = w.shape
        permutation = np.arange(columns)
        if ordered:
            permutation = np.random.default_rng(columns).permutation(columns)
        codes, scale, zero, meant = _integers(w[:, permutation], bits, group, sym)
        in_place, back = np.empty_like(codes), torch.empty_like(meant)
        in_place[:, permutation] = codes
        back[:, permutation] = meant
        tensors = {
            "weight_packed": pack_words(in_place, bits),
            "weight_scale": scale.bfloat16() if group is None else scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if group is None:
            back = back / scale.float() * scale.bfloat16().float()
        if not sym:
            zeros = zero.numpy().astype(np.uint8)
            tensors["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
        if ordered:
            g_idx = np.empty(columns, np.int32)
            g_idx[permutation] = np.arange(columns) // GROUP
            tensors["weight_g_idx"] = torch.from_numpy(g_idx)
        return tensors, back

    return write


def int8_rows(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 127
    q = (w / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def mxfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    grouped = _groups(w, 32)
    exponent = (grouped.abs().amax(2) / 6).log2().ceil()
    codes = ((grouped / exponent.exp2()[..., None])[..., None] - table).abs().argmin(-1)
    meant = (table[codes] * exponent.exp2()[..., None]).view(w.shape)
    flat = codes.view(w.shape).to(torch.uint8)
    return {
        "weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4,
        "weight_scale": (exponent + 127).to(torch.uint8),
    }, meant


# --- bitsandbytes -----------------------------------------------------------------------------


def nf4(nested: bool) -> Writer:
    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        table = torch.tensor(NF4)
        blocks = w.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape),
        }  # fmt: skip
        tensors: Tensors = {}
        if nested:
            offset = absmax.mean()
            code = torch.linspace(-1, 1, 256)
            centered = absmax - offset
            size = 256
            padded = torch.nn.functional.pad(centered, (0, -len(centered) % size)).view(-1, size)
            most = padded.abs().amax(1).clamp(min=1e-9)
            ids = ((padded / most[:, None])[..., None] - code).abs().argmin(-1)
            absmax = (code[ids] * most[:, None]).flatten()[: len(absmax)] + offset
            state |= {
                "nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset.item(),
            }  # fmt: skip
            tensors["weight.absmax"] = ids.flatten()[: len(absmax)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": most, "weight.nested_quant_map": code}
        else:
            tensors["weight.absmax"] = absmax
        ids = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        meant = (table[ids] * absmax[:, None]).view(w.shape)
        flat = ids.flatten().to(torch.uint8)
        content = json.dumps(state).encode()
        return tensors | {
            "weight": (flat[0::2] << 4 | flat[1::2]).unsqueeze(1),
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(content), dtype=torch.uint8),
        }, meant

    return write


def bnb_int8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    most = w.abs().amax(1)
    q = (w * (127 / most[:, None])).round().to(torch.int8)
    return {
        "weight": q, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, q.float() * most[:, None] / 127  # fmt: skip


# --- all --------------------------------------------------------------------------------------


def compressed(layout: str, weights: dict[str, Any], activations: Any = None, **rest: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **rest,
    }  # fmt: skip


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT = {"type": "int", "strategy": "group", "group_size": GROUP}
TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq",
}  # fmt: skip
ROUGH = 0.25  # a number between two steps of an activation may go to either
FORMATS: dict[str, Format] = {
    "fp8-tensor": Format(
        fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tokens, ROUGH
    ),
    "fp8-static": Format(
        fp8_static, {"quant_method": "fp8", "activation_scheme": "static"}, fp8_all, ROUGH
    ),
    "fp8-block": Format(
        fp8_block("weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
         "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
        ignored=("layers.1.mlp",),
    ),
    "ct-fp8-channel": Format(
        fp8_channel, compressed("float-quantized", FLOAT | {"strategy": "channel"}, TOKEN),
        fp8_tokens, ROUGH,
    ),
    "ct-fp8-block": Format(
        fp8_block("weight_scale"),
        compressed("float-quantized",
                   FLOAT | {"strategy": "block", "block_structure": [BLOCK, BLOCK]}, TOKEN),
    ),
    "ct-w8a16-fp8": Format(
        fp8_channel, compressed("naive-quantized", FLOAT | {"strategy": "channel"})
    ),
    "ct-int8": Format(
        int8_rows,
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
                   {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}),
        int8_tokens, ROUGH,
    ),
    "ct-pack-4": Format(packed(4, sym=True), compressed("pack-quantized", INT | {"num_bits": 4})),
    "ct-pack-4-zeros": Format(
        packed(4, sym=False),
        compressed("pack-quantized", INT | {"num_bits": 4, "symmetric": False}),
    ),
    "ct-pack-4-order": Format(
        packed(4, sym=True, ordered=True),
        compressed("pack-quantized", INT | {"num_bits": 4, "actorder": "group"}),
    ),
    "ct-pack-8-channel": Format(
        packed(8, sym=True, group=None),
        compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ),
    "ct-mxfp4": Format(
        mxfp4,
        compressed("mxfp4-pack-quantized",
                   {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "gptq": Format(gptq(4, sym=True), GPTQ),
    "gptq-zeros": Format(gptq(4, sym=False), GPTQ | {"sym": False}),
    "gptq-v2-8": Format(
        gptq(8, sym=False, v2=True),
        GPTQ | {"sym": False, "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-order": Format(
        gptq(4, sym=False, order="act"), GPTQ | {"sym": False, "desc_act": True}
    ),
    "gptq-rows": Format(gptq(4, sym=True, group=None), GPTQ | {"group_size": -1}),
    "awq": Format(
        awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": None},
    ),
    "auto-round-gptq": Format(
        gptq(4, sym=True),
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True,
         "packing_format": "auto_round:auto_gptq", "data_type": "int",
         "extra_config": {"model.layers.0.self_attn": {"bits": 16}}},
        ignored=("layers.0.self_attn",),
    ),
    "auto-round-awq": Format(
        awq, {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False,
              "packing_format": "auto_round:auto_awq"},
    ),
    "modelopt-fp8": Format(
        fp8_static,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.2*"]},
        fp8_all, ROUGH, ignored=("layers.2",),
    ),
    "bnb-nf4": Format(
        nf4(nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bnb-nf4-nested": Format(
        nf4(nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True},
    ),
    "bnb-int8": Format(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}  # fmt: skip

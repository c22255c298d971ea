"""The seam for quantization carries a whole model: a weight-only int8 method in plain torch, packed
as checkpoints pack, equals the model of its dequantized weights. Fused kernels are preferred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM, Load
from asyncllm.models.checkpoint import SINGLE_FILE
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear_method import (
    LinearMethod,
    LinearShape,
    UnquantizedLinearMethod,
    Weights,
)
from asyncllm.models.layers.ops import Epilogue, Norm, Normed, Ops, Out
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import decoder_spec
from tests.models.dense_sequence import DenseSequence
from tests.models.tiny_checkpoints import CONFIGS, CPU, VOCAB_SIZE, WINDOW, random_reference

TOLERANCE = 1e-4
PER_WORD = 4  # int8 in an int32
SIGN_BITS = -0x7F7F7F80  # 0x80 in each byte


@dataclass
class Int8:
    """A file has `weight_packed` int32 [out, in / 4], each byte 128 too large, `weight_scale`
    float16 [out, 1], and `bias`. What lies in memory is signed."""

    fused_calls: list[object] = field(default_factory=list)

    def create_weights(self, shape: LinearShape) -> Weights:
        out_features = shape.out_features
        weights = {
            "packed": torch.empty(out_features, shape.in_features // PER_WORD, dtype=torch.int32),
            "scale": torch.empty(out_features),
        }
        return weights | ({"bias": torch.empty(out_features)} if shape.bias else {})

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        splits = (tensor.split(list(shape.parts.values())) for tensor in weights.values())
        for name, packed, scale, *bias in zip(shape.parts, *splits, strict=True):
            yield Load(f"{name}.weight_packed", packed)
            yield Load(
                f"{name}.weight_scale",
                scale,
                transform=lambda column: column.squeeze(1),
                file_shape=(len(scale), 1),
                file_dtype=torch.float16,
            )
            yield from (Load(f"{name}.bias", view) for view in bias)

    def in_bytes(self, weights: Weights) -> torch.dtype | None:
        return None

    def finish(self, weights: Weights) -> None:
        weights["packed"].bitwise_xor_(SIGN_BITS)

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        y = F.linear(x.whole(), weights["packed"].view(torch.int8).float()) * weights["scale"]
        return y + weights["bias"] if "bias" in weights else y

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        self.fused_calls.append(epilogue)
        return None


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed, scale) as a file has them."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).half()
    signed = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return signed.view(torch.int32).bitwise_xor(SIGN_BITS), scale


def write_both(name: str, prefix: str, folder: Path) -> tuple[Path, Path]:
    """Folders of one checkpoint: weights below `prefix` in int8, and the same dequantized."""
    reference = random_reference(CONFIGS[name])
    folders = folder / "int8", folder / "plain"
    for each in folders:
        reference.save_pretrained(each)
    plain = load_file(folders[0] / SINGLE_FILE)
    packed = dict(plain)
    for key in [key for key in plain if key.startswith(prefix) and key.endswith("_proj.weight")]:
        words, scale = quantize(packed.pop(key))
        packed |= {f"{key}_packed": words, f"{key}_scale": scale}
        signed = words.bitwise_xor(SIGN_BITS).view(torch.int8)
        plain[key] = signed.float() * scale.float()
    for each, tensors in zip(folders, (packed, plain), strict=True):
        save_file(tensors, each / SINGLE_FILE)
    return folders


def load(folder: Path, methods: dict[str, LinearMethod], ops: Ops | None = None) -> CausalLM:
    config, ops = ModelConfig.from_folder(folder), ops or TorchOps()
    plain = UnquantizedLinearMethod(torch.float32, CPU, ops)

    def method_for(name: str) -> LinearMethod:
        return next(
            (method for prefix, method in methods.items() if name.startswith(prefix)), plain
        )

    build = Build(torch.float32, CPU, ops, method_for, WINDOW)
    model = DenseDecoder(config, decoder_spec(config, build), build)
    load_weights(model, folder, "auto", seed=0, progress=False)
    return model


def logits_of(model: CausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """A prefill in two pieces, then token by token."""
    sequence = DenseSequence(model, num_prompt_tokens=20)
    pieces = [token_ids[:13], token_ids[13:20], *token_ids[20:].split(1)]
    return torch.cat([sequence.logits(piece) for piece in pieces])


# All layers; those of one block; one matrix, beside others of its block.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "num_matrices"),
    [("model.layers.", 21), ("model.layers.1.", 7), ("model.layers.0.mlp.down_proj", 1)],
)
@pytest.mark.parametrize("name", ["qwen2", "llama-mlp-bias", "qwen3-bias-tied"])
def test_a_quantized_model_is_that_of_its_dequantized_weights(
    name: str, prefix: str, num_matrices: int, tmp_path: Path
) -> None:
    int8, plain = write_both(name, prefix, tmp_path)
    token_ids, method = torch.randint(VOCAB_SIZE, (30,)), Int8()
    expected = logits_of(load(plain, {}), token_ids)
    model = load(int8, {prefix: method})
    assert sum(load.name.endswith("_packed") for load in model.loads()) == num_matrices
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=TOLERANCE, rtol=0)
    assert bool(method.fused_calls) and (expected.std() > 100 * TOLERANCE)


def test_weights_are_repacked_again_after_a_reload(tmp_path: Path) -> None:
    int8, _ = write_both("llama", "model.", tmp_path)
    model, token_ids = load(int8, {"model.": Int8()}), torch.arange(12)
    expected = logits_of(model, token_ids)
    storages = [load.view.data_ptr() for load in model.loads()]
    load_weights(model, int8, "auto", seed=0, progress=False)
    assert storages == [load.view.data_ptr() for load in model.loads()]
    assert torch.equal(logits_of(model, token_ids), expected)


class FusedOps(TorchOps):
    """Fuses every epilogue, and counts; a product without one is still its own."""

    def __init__(self) -> None:
        self.num_fused = self.num_products = 0

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.num_products += 1
        return super().product(x, weight, bias)

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.num_fused += 1
        return self.swiglu(F.linear(x.values, weight, bias))

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        self.num_fused += 1
        return self.add_rms_norm(F.linear(x.values, weight, bias), residual, norm)


def test_a_fused_kernel_is_preferred_and_nothing_is_done_twice(tmp_path: Path) -> None:
    random_reference(CONFIGS["llama"]).save_pretrained(tmp_path)
    ops, token_ids = FusedOps(), torch.arange(12)
    logits = DenseSequence(load(tmp_path, {}, ops), 12).logits(token_ids)
    num_layers = CONFIGS["llama"].num_hidden_layers
    assert ops.num_fused == 3 * num_layers
    assert ops.num_products == num_layers + 1  # q, k, v; the LM head
    assert torch.equal(logits, DenseSequence(load(tmp_path, {}), 12).logits(token_ids))

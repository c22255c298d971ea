"""Mixtures with quantised experts, served: against transformers on the dequantised weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen3MoeConfig

from asyncllm import LLM
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import Quantization
from asyncllm.models.quantization.online import SCHEMES
from asyncllm.models.quantization.scheme import dequantize, quantize
from tests.engine.test_quantized import expect_answers, serve
from tests.engine.test_quantized_online import ACTIVATIONS
from tests.models.quantized_files import FORMATS, Format, mxfp4, see
from tests.models.tiny_checkpoints import LAYER_TYPES, PAD, SHAPE, YARN, random_reference, rope

WIDE = SHAPE | {"hidden_size": 128, "num_hidden_layers": 2}
MIXTURE = Qwen3MoeConfig(
    **WIDE, head_dim=32, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=128
)
GPT_OSS: dict[str, Any] = SHAPE | PAD | rope("yarn", **YARN) | {
    "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": LAYER_TYPES, "swiglu_limit": 0.5,
}  # fmt: skip
SERVED = (
    "fp8-static", "fp8-block", "ct-fp8-channel", "ct-w8a16-fp8", "ct-int8", "ct-pack-4",
    "ct-pack-4-zeros", "ct-mxfp4", "gptq", "gptq-zeros", "gptq-v2-8", "awq", "bnb-nf4", "bnb-int8",
)  # fmt: skip
LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def set_expert(reference: Any, layer: str, meant: torch.Tensor) -> None:
    """`layer`: model.layers.0.mlp.experts.5.gate_proj and so on."""
    experts, number, part = layer.rsplit(".", 2)
    module = reference.get_submodule(experts)
    weight = module.down_proj if part == "down_proj" else module.gate_up_proj
    rows = {"gate_proj": slice(len(meant)), "up_proj": slice(len(meant), None)}
    weight[int(number)][rows.get(part, slice(None))] = meant


def configure(folder: Path, quantization_config: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))


def write_mixture(form: Format, folder: Path) -> Any:
    """All that is multiplied by is in this format. transformers' of the dequantised weights."""
    reference = random_reference(MIXTURE)
    reference.save_pretrained(folder)
    tensors, state = load_file(folder / "model.safetensors"), reference.state_dict()
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        layer = key.removesuffix(".weight")
        if any(part in layer for part in form.ignored):
            continue
        written, meant = form.write(tensors.pop(key))
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in written.items()}
        if ".experts." in layer:
            set_expert(reference, layer, meant)
        else:
            state[key].copy_(meant)
            if form.activations is not None:
                see(reference.get_submodule(layer), form.activations)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    configure(folder, dict(form.quantization_config))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_mixture_answers_as_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        reference = write_mixture(FORMATS[name], tmp_path)
    expect_answers(asyncio.run(serve(tmp_path)), reference, FORMATS[name].bound)


def write_gpt_oss(folder: Path, intermediate_size: int = 96) -> Any:
    """As published: experts in MXFP4, all else in 16 bits."""
    sizes = {"hidden_size": 64, "intermediate_size": intermediate_size}
    reference = random_reference(GptOssConfig(**GPT_OSS | sizes))
    reference.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in reference.named_modules():
        if not name.endswith(".experts"):
            continue
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(module, part)  # [experts, in, out]
            each = [mxfp4(expert.T.contiguous()) for expert in weight]
            weight.copy_(torch.stack([meant.T for _, meant in each]))
            blocks = torch.stack([tensors["weight_packed"] for tensors, _ in each])
            scales = torch.stack([tensors["weight_scale"] for tensors, _ in each])
            del tensors[f"{name}.{part}"]
            tensors[f"{name}.{part}_blocks"] = blocks.unflatten(2, (-1, 16)).contiguous()
            tensors[f"{name}.{part}_scales"] = scales
    save_file(tensors, folder / "model.safetensors")
    configure(folder, {"quant_method": "mxfp4", "modules_to_not_convert": LEFT})
    return reference


def test_gpt_oss_as_it_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asyncllm")
    with torch.inference_mode():
        reference = write_gpt_oss(tmp_path)
    expect_answers(asyncio.run(serve(tmp_path)), reference, 2e-3)
    (line,) = [line for line in caplog.messages if line.startswith("weights are quantised")]
    assert "fp4 in groups of 32; in 16 bits: embeddings" in line
    assert "12 layers: model.layers.0.self_attn.k_proj" in line


def test_a_scale_that_is_none_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        write_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 3, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name} holds 255, which is NaN"):
        LLM(str(tmp_path), skip_tokenizer_init=True, swap_space=0)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", SCHEMES)
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_quantised_while_they_load(
    quantization: Quantization, is_stacked: bool, tmp_path: Path
) -> None:
    """A file for each expert, and all in one tensor, inputs before outputs."""
    config: Any = MIXTURE
    if is_stacked:
        config = GptOssConfig(**GPT_OSS | {"hidden_size": 128, "intermediate_size": 128})
    scheme, activations = SCHEMES[quantization], ACTIVATIONS[quantization]

    def made(weight: torch.Tensor) -> torch.Tensor:
        return dequantize(scheme, *quantize(scheme, weight))

    with torch.inference_mode():
        reference = random_reference(config)
        reference.save_pretrained(tmp_path)
        for name, module in reference.named_modules():
            if name.endswith(".experts"):
                for weight in (module.gate_up_proj, module.down_proj):
                    rows = weight.mT if is_stacked else weight
                    rows.copy_(torch.stack([made(expert) for expert in rows]))
            elif name.endswith("_proj"):
                module.weight.copy_(made(module.weight))
                if activations is not None:
                    see(module, activations)
    bound = 2e-3 if activations is None else 0.25
    expect_answers(asyncio.run(serve(tmp_path, quantization=quantization)), reference, bound)


def test_columns_in_an_order_are_refused(tmp_path: Path) -> None:
    form = FORMATS["gptq-order"]
    with torch.inference_mode():
        write_mixture(form, tmp_path)
    with pytest.raises(ModelLoadError, match=r"layers.0.mlp.experts: desc_act true"):
        LLM(str(tmp_path), skip_tokenizer_init=True, swap_space=0)


def test_experts_that_differ_are_refused(tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    with torch.inference_mode():
        write_mixture(form, tmp_path)
    rules = {r"-:model\.layers\.1\.mlp\.experts\.3\.down_proj": {}}
    configure(tmp_path, dict(form.quantization_config) | {"dynamic": rules})
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.experts: .* not quantised alike"):
        LLM(str(tmp_path), skip_tokenizer_init=True, swap_space=0)

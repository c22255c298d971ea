"""Checkpoints with towers for images: the one that writes is served, the others are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncllm.config import EngineArgs
from asyncllm.models.registry import settle
from tests.script_module import import_script

matrix = import_script(Path(__file__).parents[2] / "scripts" / "model_matrix.py")
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def _qwen() -> Any:
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE},
        vision_config=QWEN_VISION | {"fullatt_block_indexes": [1]},
    )


def _llava() -> Any:
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(text_config=text, vision_config=vision)


def _mistral() -> Any:
    text = transformers.MistralConfig(**TEXT, sliding_window=None)
    vision = transformers.PixtralVisionConfig(**VISION)
    return transformers.Mistral3Config(text_config=text, vision_config=vision)


def _gemma() -> Any:
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=8, query_pre_attn_scalar=8)
    vision = transformers.SiglipVisionConfig(**VISION)
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "make_config", "left_out"),
    [
        ("Qwen2_5_VLForConditionalGeneration", _qwen, ["model.visual"]),
        (
            "LlavaForConditionalGeneration",
            _llava,
            ["model.vision_tower", "model.multi_modal_projector"],
        ),
        (
            "Mistral3ForConditionalGeneration",
            _mistral,
            ["model.vision_tower", "model.multi_modal_projector"],
        ),
        (
            "Gemma3ForConditionalGeneration",
            _gemma,
            ["model.vision_tower", "model.multi_modal_projector"],
        ),
    ],
)
def test_the_text_tower_is_served(
    architecture: str, make_config: Callable[[], Any], left_out: list[str], tmp_path: Path
) -> None:
    difference = matrix.compare(architecture, make_config(), tmp_path)
    assert difference < matrix.TOLERANCE
    args = EngineArgs(str(tmp_path), dtype="float32", max_model_len=60, skip_tokenizer_init=True)
    _, model = settle(args.create_engine_config())
    assert sorted(model.left_out) == sorted(left_out)  # type: ignore[attr-defined]
    names = {load.name for load in model.loads()}
    assert names and not any("vis" in name or "projector" in name for name in names)

"""Which regular expressions of configuration files are matched, and which are refused and how."""

from __future__ import annotations

import pytest

from asyncllm.errors import LoRALoadError
from asyncllm.models.lora_config import PeftConfig
from asyncllm.models.name_pattern import name_pattern


@pytest.mark.parametrize(
    "text",
    [
        r".*\.layers\.([3-9]|[1-5][0-9]|60)\.mlp\.experts\..*\.(gate|up|down)_proj.*",
        r"(?!.*lm_head).*self_attn\.[qkv]_proj(\.lora)?",
        "|".join(f".*{name}.*" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")),
        r"model\.layers\.\d+\.mlp",
        "",
    ],
)
def test_what_files_say(text: str) -> None:
    assert name_pattern(text).pattern == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(", "missing )"),
        ("[a", "unterminated"),
        ("x{9999999999}", "too large"),
        ("(" * 500 + ")" * 500, "recursion"),
        ("(a+)+$", "repeats a group"),
        ("(a|b){30}c", "repeats a group"),
        (".*" * 7, "7 repetitions are more than 6"),
        ("a|" + ".?" * 30 + "x", "30 repetitions"),
        ("(.*|a)" * 7, "7 repetitions"),
        ("x" * 1025, "1025 characters are more than 1024"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"pattern '") as error:
        name_pattern(text)
    assert words in str(error.value)


@pytest.mark.parametrize("pattern", ["(", "(?i)q_proj", "(a+)+", ".*.*.*.*.*.*q_proj"])
def test_patterns_of_adapters(pattern: str) -> None:
    config = PeftConfig(r=2, lora_alpha=4, alpha_pattern={"v_proj": 8, r"layers\.\d+.q_proj": 1})
    assert config.scale("model.layers.12.q_proj", 2) == 0.5
    config.alpha_pattern = {pattern: 1}
    with pytest.raises(LoRALoadError, match=r"adapter_config\.json: pattern '"):
        config.scale("model.layers.12.q_proj", 2)

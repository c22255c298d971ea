"""Reads config.json into transformers' configuration object, mostly without the family's class.

These classes import torch._dynamo, torch.distributed, scikit-learn and more, which takes seconds.
The files of dense families usually have all keys that this engine reads. Then the library's base
class, with the fields declared here, gives the same values (a test compares them for all families).
Files with unusual keys or values are read by AutoConfig, which also reports errors. Importing this
module takes a second (torch, transformers). Annotations are not postponed, because `strict` ignores
strings.
"""

from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PretrainedConfig

# Without one of these keys a family's defaults apply, which only the library knows.
_REQUIRED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "eos_token_id",
}  # fmt: skip
_WINDOW_KEYS = {"sliding_window", "use_sliding_window", "max_window_layers"}
_REQUIRED_BY_FAMILY: dict[tuple[str, str], set[str]] = {  # (model_type, architecture)
    ("llama", "LlamaForCausalLM"): set(),
    ("mistral", "MistralForCausalLM"): {"sliding_window"},
    ("qwen2", "Qwen2ForCausalLM"): _WINDOW_KEYS,
    ("qwen3", "Qwen3ForCausalLM"): _WINDOW_KEYS | {"head_dim"},
}
_WINDOWED = ("qwen2", "qwen3")


@strict
class DenseConfig(PretrainedConfig):
    """The keys of dense families that the engine reads; `strict` checks their types."""

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    max_position_embeddings: int = 0
    rms_norm_eps: float = 0.0
    hidden_act: str = ""
    head_dim: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None


def read_hf_config(
    folder: Path, content: dict[str, Any], own_class: bool = False
) -> PretrainedConfig:
    """content: the parsed config.json of the folder. Raises whatever the library raises.

    own_class: use the family's class, for transformers' own models.
    """
    if not own_class and _is_plain(content):
        try:
            return DenseConfig.from_dict(_completed(content))
        except Exception:  # AutoConfig raises it again with the family's message
            pass
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _is_plain(content: dict[str, Any]) -> bool:
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    family = str(content.get("model_type")), str(architectures[0])
    required = _REQUIRED_BY_FAMILY.get(family)
    if required is None or not (_REQUIRED | required) <= content.keys():
        return False
    size, heads = content["hidden_size"], content["num_attention_heads"]
    return isinstance(size, int) and isinstance(heads, int) and heads > 0 and size % heads == 0


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with the values that families derive from other keys."""
    completed = dict(content)
    if completed.get("head_dim") is None:
        completed["head_dim"] = completed["hidden_size"] // completed["num_attention_heads"]
    if completed["num_key_value_heads"] is None:
        completed["num_key_value_heads"] = completed["num_attention_heads"]
    if completed["model_type"] in _WINDOWED:
        if not completed["use_sliding_window"]:
            completed["sliding_window"] = None
        if completed.get("layer_types") is None:
            first = completed["max_window_layers"]
            has_window = completed["sliding_window"] is not None
            completed["layer_types"] = [
                "sliding_attention" if has_window and index >= first else "full_attention"
                for index in range(completed["num_hidden_layers"])
            ]
    return completed

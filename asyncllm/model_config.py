"""The facts of a Hugging Face model folder that the engine needs.

The folder is not trusted: sizes are checked to be positive integers, and all errors are
`ModelLoadError`s with file and key. transformers is only imported when a folder is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncllm.errors import ModelLoadError, one_line
from asyncllm.gguf_file import SUFFIX, unpack_gguf
from asyncllm.hub.cache import Repo, cache_folder
from asyncllm.hub.download import find_or_download
from asyncllm.hub.files import Part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUILTIN_MODELS = {
    "tiny": Path(__file__).parent / "assets" / "tiny",
    "tiny-draft": Path(__file__).parent / "assets" / "tiny-draft",
}

# Native architectures: the module below asyncllm.models, and its function that makes a
# `DecoderSpec` of a configuration.
ARCHITECTURES = {
    "Cohere2ForCausalLM": ("cohere", "cohere"),
    "CohereForCausalLM": ("cohere", "cohere"),
    "DeepseekV2ForCausalLM": ("deepseek", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ("deepseek", "deepseek_v3"),
    "Gemma2ForCausalLM": ("gemma", "gemma"),
    "Gemma3ForCausalLM": ("gemma", "gemma"),
    "Glm4ForCausalLM": ("glm4", "glm4"),
    "Glm4MoeForCausalLM": ("glm4", "glm4_moe"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss"),
    "GraniteForCausalLM": ("dense", "granite"),
    "LlamaForCausalLM": ("dense", "llama"),
    "MistralForCausalLM": ("dense", "mistral"),
    "MixtralForCausalLM": ("moe", "mixtral"),
    "Olmo2ForCausalLM": ("olmo", "olmo2"),
    "Olmo3ForCausalLM": ("olmo", "olmo3"),
    "OlmoeForCausalLM": ("moe", "olmoe"),
    "Phi3ForCausalLM": ("dense", "phi3"),
    "Qwen2ForCausalLM": ("dense", "qwen2"),
    "Qwen2MoeForCausalLM": ("moe", "qwen2_moe"),
    "Qwen3ForCausalLM": ("dense", "qwen3"),
    "Qwen3MoeForCausalLM": ("moe", "qwen3_moe"),
}
# Classes of transformers' table that paged attention cannot serve, and why.
UNSERVED = {
    "BltForCausalLM": "attends across patches of bytes, which another model cuts",
    "CpmAntForCausalLM": "adds a learned bias of segments to scores, and tokens before each prompt",
    "DogeForCausalLM": "adds to scores what it makes of values, and drops the least",
    "Gemma4AssistantForCausalLM": "attends to keys and values of another model",
    "Gemma4UnifiedAssistantForCausalLM": "attends to keys and values of another model",
    "Inkling2ForCausalLM": "adds to scores what it makes of distances and queries",
    "InklingForCausalLM": "adds to scores what it makes of distances and queries",
    "MusicgenForCausalLM": "takes ids of several codebooks for each token",
    "MusicgenMelodyForCausalLM": "takes ids of several codebooks for each token",
    "ProphetNetForCausalLM": "attends to streams of tokens to come",
    "Qwen4ExpForCausalLM": "attends to blocks that an index chooses, and embeds n-grams",
    "RecurrentGemmaForCausalLM": "has recurrent layers of its own kind",
    "ReformerModelWithLMHead": "attends to buckets of hashes",
    "XLMWithLMHeadModel": "predicts a masked token behind the others, which no later step sees",
    "XLNetLMHeadModel": "predicts a masked token behind the others, which no later step sees",
    "xLSTMForCausalLM": "has recurrent layers of its own kind",
}
ModelImplementation = Literal["auto", "asyncllm", "transformers"]
Quantization = Literal["fp8", "int8", "int4"]
RECURRENT_WINDOW = 32_768  # the default max_model_len of a model without positions
MAX_LAYERS = 10_000  # some of the library's classes allocate a list entry per layer
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Keys of the longest sequence, which models with ALiBi have, too.
POSITION_KEYS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_seq_len",
    "seq_length",
)


@dataclass(frozen=True)
class ModelConfig:
    """The contents of `config.json`. `hf_config` is for the model's code."""

    path: Path
    architecture: str
    hf_config: PretrainedConfig
    vocab_size: int
    max_position_embeddings: int
    context_window: int  # including RoPE scaling
    num_layers: int
    num_kv_heads: int  # of KV pages; some models only know it when they are built
    head_dim: int  # likewise
    dtype_name: str
    eos_token_ids: tuple[int, ...]
    implementation: Literal["asyncllm", "transformers"] = "asyncllm"
    quantization: Quantization | None = None  # of a 16-bit checkpoint while it is loaded
    asked_implementation: ModelImplementation = "auto"
    fallback: str = ""  # why a native architecture runs by transformers' code

    @classmethod
    def from_folder(cls, path: Path, implementation: ModelImplementation = "auto") -> ModelConfig:
        """Read `config.json`. Raises `ModelLoadError` naming the file and the error."""
        file = path / "config.json"
        if not file.is_file():
            raise ModelLoadError(f"{path} is no model folder: it has no config.json")
        content = read_json_object(file)
        chosen = _choose_implementation(file, content.get("architectures"), implementation)
        hf = _parsed(file, content, own_class=chosen == "transformers")
        eos = getattr(hf, "eos_token_id", None)
        text = hf  # of a multimodal model, the language model's
        if chosen == "transformers":
            text = hf.get_text_config(decoder=True)
            if value := getattr(hf, "quantization_config", None):
                raise ModelLoadError(f"{file}: quantization_config {value!r} is not supported")
        is_recurrent = chosen == "transformers" and _is_recurrent(text)
        num_heads = 1 if is_recurrent else _size(file, text, "num_attention_heads")
        hidden_size = _size(file, text, "hidden_size")
        num_kv_heads, head_dim = num_heads, max(1, hidden_size // num_heads)
        if chosen == "asyncllm":
            _size(file, hf, "intermediate_size")  # other models do not have it
            if getattr(hf, "num_key_value_heads", None) is not None:
                num_kv_heads = _size(file, hf, "num_key_value_heads")
            if getattr(hf, "head_dim", None) is not None:
                head_dim = _size(file, hf, "head_dim")
        window = RECURRENT_WINDOW if is_recurrent else _max_positions(file, text)
        return cls(
            path=path,
            architecture=hf.architectures[0],
            hf_config=hf,
            vocab_size=_size(file, text, "vocab_size"),
            max_position_embeddings=window,
            context_window=window if is_recurrent else _context_window(file, text),
            num_layers=_size(file, text, "num_hidden_layers"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_name=str(hf.dtype or "float32").removeprefix("torch."),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            implementation=chosen,
            asked_implementation=implementation,
        )


def hub_repo(name: str, revision: str | None = None) -> Repo | None:
    """The hub's model of this name; None if it is built in, or a folder or file.

    A folder takes precedence over the hub. Raises `ModelLoadError`.
    """
    file = Path(name).expanduser()
    if name in BUILTIN_MODELS or file.is_dir() or (file.suffix == SUFFIX and file.is_file()):
        if revision is not None:
            raise ModelLoadError(f"revision {revision!r}: {name!r} is not on the hub, but here")
        return None
    repo = Repo.parse(str(name), revision)
    if repo is None:
        raise ModelLoadError(
            f"model {name!r} is neither a folder nor built in ({', '.join(BUILTIN_MODELS)}) nor a "
            "GGUF file nor a name on the hub (ORG/NAME or ORG/NAME@REVISION)"
        )
    return repo


def resolve_model_path(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    needs: Collection[Part] = ("config", "tokenizer"),
) -> Path:
    """The absolute folder of a model, with the needed parts, which may be downloaded.

    name: a built-in name, a folder, a GGUF file, or ORG/NAME[@REVISION] on the hub.
    Raises `ModelLoadError`.
    """
    if (file := Path(name).expanduser()).suffix == SUFFIX and file.is_file():
        return unpack_gguf(file)
    repo = hub_repo(name, revision)
    if repo is not None:
        return find_or_download(repo, cache_folder(download_dir), needs).resolve()
    return (BUILTIN_MODELS.get(name) or Path(name).expanduser()).resolve()


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises `ModelLoadError` naming the file."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object, not {type(content).__name__}")
    return content


def _parsed(file: Path, content: dict[str, Any], own_class: bool) -> PretrainedConfig:
    # A slow import, which --help and early errors should not need.
    from asyncllm.hf_config import read_hf_config

    for key in SIZES:  # the library may divide by them
        if isinstance(content.get(key), int) and content[key] < 1:
            raise _bad_size(file, key, content[key])
    num_layers = content.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        raise ModelLoadError(f"{file}: num_hidden_layers {num_layers} is above {MAX_LAYERS}")
    try:
        return read_hf_config(file.parent, content, own_class)
    except Exception as error:  # the library's errors have no common base
        raise ModelLoadError(f"{file}: {one_line(error)}") from error


def _choose_implementation(
    file: Path, architectures: object, asked: ModelImplementation
) -> Literal["asyncllm", "transformers"]:
    """Choose by `architectures`, before the library reads the file."""
    if not architectures:
        raise ModelLoadError(f"{file}: 'architectures' is missing")
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelLoadError(f"{file}: 'architectures' must be a list of names")
    if asked != "transformers" and architectures[0] in ARCHITECTURES:
        return "asyncllm"
    if reason := UNSERVED.get(architectures[0]):
        raise ModelLoadError(f"{file}: architectures {architectures[0]!r} {reason}: not served")
    if asked == "asyncllm" or architectures[0] not in _transformers_classes():
        raise _unsupported(file, architectures[0], "")
    return "transformers"


def _transformers_classes() -> set[str]:
    """Its causal LMs, and multimodal models, whose language model is served."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    tables = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {name for table in tables for name in table.values()}


def _is_recurrent(text: PretrainedConfig) -> bool:
    """Whether the model has no attention layers, and so no positions."""
    return _value(text, "num_attention_heads") is None


def _unsupported(file: Path, architecture: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file}: architectures {architecture!r} is not supported, {reason}only "
        f"{', '.join(ARCHITECTURES)} and most of transformers' causal LMs"
    )


def _value(hf: PretrainedConfig, key: str) -> Any:
    """The value of `key`; if layers differ, the first layer's."""
    layer = hf.per_layer_config[0] if getattr(hf, "is_heterogeneous", False) else hf
    return getattr(layer, key, None)


def _size(file: Path, hf: PretrainedConfig, key: str) -> int:
    """A key that must be a positive integer. Raises `ModelLoadError`."""
    value: Any = _value(hf, key)
    if not isinstance(value, int) or value < 1:
        raise _bad_size(file, key, value)
    return value


def _max_positions(file: Path, hf: PretrainedConfig) -> int:
    """The first of POSITION_KEYS that the configuration has. Raises `ModelLoadError`."""
    found = (key for key in POSITION_KEYS if getattr(hf, key, None) is not None)
    return _size(file, hf, next(found, POSITION_KEYS[0]))


def _bad_size(file: Path, key: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"{file}: {key} must be a positive integer, got {value!r}")


def _context_window(file: Path, hf: PretrainedConfig) -> int:
    """max_position_embeddings, multiplied by the factor of RoPE scaling, as in vLLM."""
    rope = getattr(hf, "rope_parameters", None) or {}
    window = _max_positions(file, hf)
    if rope.get("rope_type") == "yarn":
        window = rope.get("original_max_position_embeddings") or window
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        factor = rope.get("factor", 1)
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ModelLoadError(f"{file}: rope_parameters: factor must be positive: {factor!r}")
        window = int(window * factor)
    return int(window)

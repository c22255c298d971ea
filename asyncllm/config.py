"""`EngineConfig`: what one engine obeys, frozen. `EngineArgs` makes it of what a user typed.

Sizes that need the device (pages, context that fits) are settled by the worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.model_config import ModelConfig, read_json_object
from asyncllm.sampling_params import SamplingParams

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
AttentionBackendName = Literal["auto", "torch", "flashinfer", "flash_attn"]
ContentFormat = Literal["auto", "string", "openai"]
DeviceName = Literal["auto", "cpu", "cuda"]

GIB = 1 << 30
GENERATION_FILE = "generation_config.json"
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The contents of a model's `generation_config.json`.

    As in vLLM `do_sample` is ignored (false does not mean greedy), `max_new_tokens` is the default
    of max_tokens, and the ids that end a text count even where the sampling values are not wanted.
    """

    sampling: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int | None:
        return self.sampling.get("max_tokens")


@dataclass(frozen=True)
class EngineConfig:
    """One engine's settings, validated. Byte sizes are bytes, lengths are tokens."""

    model: ModelConfig
    tokenizer_path: Path | None  # None: prompts and outputs are token ids
    served_model_names: tuple[str, ...]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    load_format: LoadFormat
    seed: int
    max_model_len: int | None  # None: as much as the model and the KV cache allow
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    swap_space_bytes: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None  # None: what the worker measures
    scheduling_policy: SchedulingPolicy
    preemption_mode: PreemptionMode
    async_scheduling: bool
    attention_backend: AttentionBackendName
    enforce_eager: bool
    cuda_graph_sizes: tuple[int, ...]
    prefill_graph_sizes: tuple[int, ...]
    max_logprobs: int
    logits_processors: tuple[Any, ...]  # subclasses of worker.logits_processors.LogitsProcessor
    generation_defaults: GenerationDefaults
    chat_template: str | None
    chat_template_content_format: ContentFormat
    reasoning_parser: str
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_seconds: float
    watchdog_timeout: float

    @cached_property
    def num_slots(self) -> int:
        """Rows of the device state: one per running sequence and the padding slot 0."""
        return self.max_num_seqs + 1


def read_generation_defaults(wanted: str, model: Path) -> GenerationDefaults:
    """wanted: 'auto', 'vllm' or a folder; model: its folder. Raises `ModelLoadError`."""
    if wanted in ("auto", "vllm"):
        file = model / GENERATION_FILE
        if not file.is_file():
            return GenerationDefaults()
    else:
        file = Path(wanted).expanduser() / GENERATION_FILE
    values = read_json_object(file)
    sampling = {
        name: values[key] for key, name in SAMPLING_KEYS.items() if values.get(key) is not None
    }
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return GenerationDefaults(
        {} if wanted == "vllm" else sampling, _eos_ids(values.get("eos_token_id"), file)
    )


def _eos_ids(value: object, file: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelLoadError(f"{file}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(ids)

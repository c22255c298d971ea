"""`EngineConfig`: what one engine obeys, frozen. `EngineArgs` makes it of what a user typed.

Sizes that need the device (pages, context that fits) are settled by the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from asyncllm.generation_defaults import GenerationDefaults
from asyncllm.model_config import ModelConfig

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
AttentionBackendName = Literal["auto", "torch", "flashinfer", "flash_attn"]
ContentFormat = Literal["auto", "string", "openai"]
DeviceName = Literal["auto", "cpu", "cuda"]

GIB = 1 << 30


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

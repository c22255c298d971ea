"""`EngineArgs`: what a user types, as flags or as keyword arguments.

Fields are the command-line flags with underscores, under vLLM's names where they mean the same.
`create_engine_config()` validates once, in one place, and resolves what "auto" and None stand for.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from asyncllm.config import (
    GIB,
    AttentionBackendName,
    ContentFormat,
    DeviceName,
    DType,
    EngineConfig,
    LoadFormat,
    PreemptionMode,
    SchedulingPolicy,
)
from asyncllm.generation_defaults import read_generation_defaults
from asyncllm.model_config import ModelConfig, resolve_model_path

DEFAULT_MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # torch's short ones, as in vLLM
MAX_NUM_SEQS_LIMIT = 4096
# 272 and 528: a few decodes beside half a chunk of prompts, or a chunk, of a large model.
PREFILL_GRAPH_SIZES = tuple(
    sorted({16, *range(32, 257, 32), *range(320, 1089, 64), *range(1152, 2049, 128), 272, 528})
)


@dataclass
class EngineArgs:
    """The engine's flags. `help` in a field's metadata is the flag's help text."""

    model: str = field(default="tiny", metadata={"help": "model folder, or the built-in 'tiny'"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder, default: the model's"})
    skip_tokenizer_init: bool = field(
        default=False, metadata={"help": "no tokenizer: token ids in, token ids out"}
    )
    served_model_name: list[str] | None = field(
        default=None, metadata={"help": "names clients may use, the first is reported"}
    )
    dtype: DType = field(
        default="auto", metadata={"help": "auto: the checkpoint's on CUDA, float32 on CPU"}
    )
    device: DeviceName = field(default="auto", metadata={"help": "auto: CUDA where there is one"})
    load_format: LoadFormat = field(
        default="auto", metadata={"help": "dummy: random weights, for benchmarks"}
    )
    seed: int = field(default=0, metadata={"help": "for requests without a seed of their own"})
    max_model_len: int | None = field(
        default=None,
        metadata={"help": "context window in tokens, default: what model and KV allow"},
    )
    block_size: int = field(default=16, metadata={"help": "tokens per KV page"})
    num_gpu_blocks_override: int | None = field(
        default=None, metadata={"help": "KV pages, instead of profiling"}
    )
    kv_cache_memory_bytes: int | None = field(
        default=None, metadata={"help": "bytes for the KV cache, instead of profiling"}
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={"help": "share of device memory; on a CPU the KV cache takes a tenth"},
    )
    swap_space: float = field(default=4.0, metadata={"help": "CPU memory for swapped pages, GiB"})
    enable_prefix_caching: bool = field(default=True, metadata={"help": "share equal prefixes"})
    max_num_seqs: int = field(default=256, metadata={"help": "sequences that run at once"})
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "tokens per step, default 8192 on CUDA, 2048 on CPU"}
    )
    chunked_prefill_size: int | None = field(
        default=None,
        metadata={
            "help": "prompt tokens per step beside running decodes; on an idle device, of all but "
            "the first prompt; default: measured"
        },
    )
    scheduling_policy: SchedulingPolicy = field(
        default="fcfs", metadata={"help": "priority: lower numbers first"}
    )
    preemption_mode: PreemptionMode = field(
        default="auto", metadata={"help": "auto: what is cheaper for the sequence"}
    )
    async_scheduling: bool = field(
        default=True, metadata={"help": "launch each step before the one before is known"}
    )
    attention_backend: AttentionBackendName = field(
        default="auto",
        metadata={
            "help": "auto: on CUDA FlashInfer, or by measurement our own kernels; torch on a CPU"
        },
    )
    enforce_eager: bool = field(default=False, metadata={"help": "no CUDA graphs"})
    cuda_graph_sizes: list[int] | None = field(
        default=None, metadata={"help": "decode batch sizes to capture"}
    )
    prefill_graph_sizes: list[int] | None = field(
        default=None, metadata={"help": "tokens per step with prefills to capture; 0 for none"}
    )
    max_logprobs: int = field(default=20, metadata={"help": "most logprobs a request may ask for"})
    logits_processors: list[str | type] | None = field(
        default=None,
        metadata={
            "help": "classes of LogitsProcessor as module:Class, for requests that need them"
        },
    )
    generation_config: str = field(
        default="auto", metadata={"help": "auto: the model's defaults; vllm: none; or a folder"}
    )
    override_generation_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "JSON object: values in place of generation_config.json's"},
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja template, a file or the text itself"}
    )
    chat_template_content_format: ContentFormat = field(
        default="auto",
        metadata={"help": "messages as a string or as OpenAI's parts; auto: see the template"},
    )
    reasoning_parser: str = field(
        default="auto", metadata={"help": "how the model writes reasoning; auto: see its template"}
    )
    max_queued_requests: int = field(
        default=4096, metadata={"help": "requests that may wait; more are refused"}
    )
    max_queued_tokens: int = field(
        default=1 << 23, metadata={"help": "prompt tokens that may wait; more are refused"}
    )
    max_queue_seconds: float = field(
        default=600.0, metadata={"help": "longest wait for a first step, then 503; may be inf"}
    )
    watchdog_timeout: float = field(
        default=30.0,
        metadata={"help": "seconds without a finished step, amid requests, until /health says so"},
    )

    def create_engine_config(self) -> EngineConfig:
        """Validate and resolve. Raises `ValueError` naming the flag, or `ModelLoadError`."""
        self._check()
        path = resolve_model_path(self.model)
        model = ModelConfig.from_folder(path)
        if self.max_model_len is not None and self.max_model_len > model.context_window:
            raise ValueError(
                f"max_model_len {self.max_model_len} is over the model's window of "
                f"{model.context_window} tokens"
            )
        device = _resolve_device(self.device)
        max_tokens = self.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS[device]
        resolved: dict[str, Any] = {
            "model": model,
            "tokenizer_path": self._tokenizer_path(path),
            "served_model_names": tuple(self.served_model_name or [self.model]),
            "device": device,
            "dtype": self._resolve_dtype(model, device),
            "swap_space_bytes": int(self.swap_space * GIB),
            "max_num_batched_tokens": max_tokens,
            "cuda_graph_sizes": _graph_sizes(self.cuda_graph_sizes, self.max_num_seqs),
            "prefill_graph_sizes": _prefill_graph_sizes(self.prefill_graph_sizes, max_tokens),
            "logits_processors": tuple(map(_resolve_class, self.logits_processors or ())),
            "generation_defaults": read_generation_defaults(
                self.generation_config, path, self.override_generation_config
            ),
        }
        rest = {f.name for f in fields(EngineConfig)} - resolved.keys()  # as they were given
        return EngineConfig(**resolved, **{name: getattr(self, name) for name in rest})

    def _resolve_dtype(self, model: ModelConfig, device: str) -> str:
        dtype: str = DTYPE_NAMES.get(self.dtype, self.dtype)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else model.dtype_name
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {dtype} of {model.path} is not supported: pass --dtype")
        return dtype

    def _tokenizer_path(self, model: Path) -> Path | None:
        if self.skip_tokenizer_init:
            return None
        return resolve_model_path(self.tokenizer) if self.tokenizer else model

    def _check(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_logprobs", self.max_logprobs, 0)
        _at_least("max_queued_requests", self.max_queued_requests, 1)
        _at_least("max_queued_tokens", self.max_queued_tokens, 1)
        if not self.max_queue_seconds > 0:
            raise ValueError(f"max_queue_seconds must be positive, got {self.max_queue_seconds}")
        _at_least("swap_space", self.swap_space, 0)
        if not 0 < self.watchdog_timeout < math.inf:
            raise ValueError(f"watchdog_timeout must be positive, got {self.watchdog_timeout}")
        if not math.isfinite(self.swap_space):
            raise ValueError(f"swap_space must be finite, got {self.swap_space}")
        if any(not name for name in self.served_model_name or []):
            raise ValueError("served_model_name must not be empty")
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "chunked_prefill_size",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_num_seqs > MAX_NUM_SEQS_LIMIT:
            raise ValueError(f"max_num_seqs {self.max_num_seqs} is over {MAX_NUM_SEQS_LIMIT}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        for name, kind in get_type_hints(EngineArgs).items():
            if get_origin(kind) is Literal:
                _one_of(name, getattr(self, name), get_args(kind))


def _resolve_class(named: str | type) -> type:
    """A class, or what "module:Class" names. Raises `ValueError`."""
    if not isinstance(named, str):
        return named
    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise ValueError(f"logits_processors must be module:Class, got {named!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"logits_processors {named}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"logits_processors {named} is not a class")
    return found


def _resolve_device(name: str) -> Literal["cpu", "cuda"]:
    if name == "cpu":
        return "cpu"
    import torch  # the one question that only torch can answer

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise ValueError("device cuda: torch finds no CUDA device")
    return "cpu"


def _graph_sizes(sizes: list[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """Decode batch sizes to capture, ascending, the last one max_num_seqs."""
    if sizes is None:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(288, 513, 32)]
        sizes = [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 512)]
    if any(size < 1 or size > max_num_seqs for size in sizes):
        raise ValueError(f"cuda_graph_sizes must be between 1 and max_num_seqs, got {sizes}")
    return tuple(sorted(set(sizes)))


def _prefill_graph_sizes(sizes: list[int] | None, max_tokens: int) -> tuple[int, ...]:
    """Tokens per step to capture, ascending. Steps of more tokens are long enough to launch."""
    if sizes is None:
        largest = min(max_tokens, PREFILL_GRAPH_SIZES[-1])
        sizes = [size for size in PREFILL_GRAPH_SIZES if size < largest] + [largest]
    if any(size < 0 or size > max_tokens for size in sizes):
        raise ValueError(
            f"prefill_graph_sizes must be between 0 and max_num_batched_tokens, got {sizes}"
        )
    return tuple(sorted(set(sizes) - {0}))


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")

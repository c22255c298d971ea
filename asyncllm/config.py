"""`EngineArgs`, the flags and keywords of users, and `EngineConfig`, the resolved configuration.

Fields of `EngineArgs` are the command-line flags with underscores, with vLLM's names where they
mean the same. `create_engine_config()` validates them, once, and resolves "auto" and None. The
worker determines sizes that depend on the device (pages, the context that fits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from asyncllm import flag_values
from asyncllm.flag_values import flag
from asyncllm.generation_config import GenerationDefaults, read_generation_defaults
from asyncllm.hub.files import Part
from asyncllm.mesh_config import ClusterConfig, DistributedBackend, MeshConfig
from asyncllm.model_config import (
    ModelConfig,
    ModelImplementation,
    Quantization,
    hub_repo,
    resolve_model_path,
)

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
AttentionBackendName = Literal["auto", "torch", "flashinfer", "flash_attn"]
ContentFormat = Literal["auto", "string", "openai"]
DeviceName = Literal["auto", "cpu", "cuda"]
DataParallelBackend = Literal["auto", "uni", "mp"]

GIB = 1 << 30
DEFAULT_MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
FP8 = "float8_e4m3fn"
KV_DTYPE_NAMES = {"fp8": FP8, "fp8_e4m3": FP8, "fp8_e5m2": "float8_e5m2"}
DURATION = {"above": 0, "below": math.inf}


@dataclass(frozen=True)
class EngineConfig:
    """The validated settings of an engine. Sizes are in bytes, lengths in tokens."""

    model: ModelConfig
    tokenizer_path: Path | None  # None: prompts and outputs are token ids
    model_name: str  # as the user gave it: a folder, a repository or the built-in model
    served_model_names: tuple[str, ...]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    load_format: LoadFormat
    seed: int
    max_model_len: int | None  # None: the most that the model and the KV cache allow
    block_size: int
    kv_cache_dtype: str  # torch's name
    calculate_kv_scales: bool
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    swap_space_bytes: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None  # None: measured by the worker
    scheduling_policy: SchedulingPolicy
    preemption_mode: PreemptionMode
    async_scheduling: bool
    attention_backend: AttentionBackendName
    enforce_eager: bool
    cuda_graph_sizes: tuple[int, ...]
    prefill_graph_sizes: tuple[int, ...]
    max_logprobs: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_modules_to_save: tuple[str, ...]
    logits_processors: tuple[Any, ...]  # subclasses of worker.logits_processors.LogitsProcessor
    generation_defaults: GenerationDefaults
    chat_template: str | None
    chat_template_content_format: ContentFormat
    reasoning_parser: str
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_seconds: float
    watchdog_timeout: float
    mesh: MeshConfig  # of rank 0; other ranks get theirs when they are started
    cluster: ClusterConfig
    distributed_timeout_seconds: float
    data_parallel_size: int
    data_parallel_backend: DataParallelBackend
    data_parallel_rank: int

    @cached_property
    def num_slots(self) -> int:
        """Rows of the device state: one per running sequence, and the padding slot 0."""
        return self.max_num_seqs + 1


@dataclass
class EngineArgs:
    """The engine's flags."""

    model: str = flag("tiny", "folder, GGUF file, ORG/NAME[@REVISION] on the hub, or built-in name")
    tokenizer: str | None = flag(None, "folder or ORG/NAME[@REVISION], default: the model's")
    revision: str | None = flag(None, "the model's branch, tag or commit on the hub, default: main")
    download_dir: str | None = flag(None, "where models of the hub are kept, default: its cache")
    skip_tokenizer_init: bool = flag(False, "no tokenizer: token ids in, token ids out")
    served_model_name: list[str] | None = flag(None, "names clients may use, the first is reported")
    model_impl: ModelImplementation = flag(
        "auto", "transformers: its own model code; auto: where asyncllm has none"
    )
    dtype: DType = flag("auto", "auto: the checkpoint's on CUDA, float32 on CPU")
    device: DeviceName = flag("auto", "auto: CUDA where there is one")
    load_format: LoadFormat = flag("auto", "dummy: random weights, for benchmarks")
    quantization: Quantization | None = flag(
        None, "quantise a checkpoint in 16 bits while it is loaded; default: as the checkpoint is"
    )
    seed: int = flag(0, "for requests without a seed of their own")
    max_model_len: int | None = flag(
        None, "context window in tokens, default or -1: what model and KV allow", least=2
    )
    block_size: int = flag(16, "tokens per KV page", least=1)
    kv_cache_dtype: KVCacheDType = flag(
        "auto", "auto: the model's; fp8 is fp8_e4m3: half the memory, with the checkpoint's scales"
    )
    calculate_kv_scales: bool = flag(False, "measure the scales of an fp8 KV cache at the start")
    num_gpu_blocks_override: int | None = flag(None, "KV pages, instead of profiling", least=1)
    kv_cache_memory_bytes: int | None = flag(
        None, "bytes for the KV cache, instead of profiling", least=1
    )
    gpu_memory_utilization: float = flag(
        0.9, "share of device memory; on a CPU the KV cache takes a tenth", above=0, most=1
    )
    swap_space: float = flag(4.0, "CPU memory for swapped pages, GiB", least=0, below=math.inf)
    enable_prefix_caching: bool = flag(True, "share equal prefixes")
    max_num_seqs: int = flag(256, "sequences that run at once", least=1, most=4096)
    max_num_batched_tokens: int | None = flag(
        None, "tokens per step, default 8192 on CUDA, 2048 on CPU", least=1
    )
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens per step beside running decodes; on an idle device, of all but "
        "the first prompt; default: measured",
        least=1,
    )
    scheduling_policy: SchedulingPolicy = flag("fcfs", "priority: lower numbers first")
    preemption_mode: PreemptionMode = flag("auto", "auto: what is cheaper for the sequence")
    async_scheduling: bool = flag(True, "launch each step before the one before is known")
    attention_backend: AttentionBackendName = flag(
        "auto", "auto: on CUDA FlashInfer, or by measurement our own kernels; torch on a CPU"
    )
    enforce_eager: bool = flag(False, "no CUDA graphs")
    cuda_graph_sizes: list[int] | None = flag(None, "decode batch sizes to capture")
    prefill_graph_sizes: list[int] | None = flag(
        None, "tokens per step with prefills to capture; 0 for none"
    )
    max_logprobs: int = flag(20, "most logprobs a request may ask for; -1: all", least=-1)
    enable_lora: bool = flag(False, "serve LoRA adapters beside the model")
    max_loras: int = flag(8, "adapters that requests may use at once", least=1)
    max_lora_rank: int = flag(
        16, "largest rank of an adapter; all take memory for it", least=1, most=512
    )
    max_cpu_loras: int | None = flag(None, "adapters in CPU memory, default: max_loras", least=1)
    lora_modules_to_save: list[str] | None = flag(
        None, "as lm_head: adapters may bring its whole weight, all slots take memory for it"
    )
    logits_processors: list[str | type] | None = flag(
        None, "classes of LogitsProcessor as module:Class, for requests that need them"
    )
    generation_config: str = flag("auto", "auto: the model's defaults; vllm: none; or a folder")
    override_generation_config: dict[str, Any] | None = flag(
        None, "JSON object: values in place of generation_config.json's"
    )
    chat_template: str | None = flag(None, "Jinja template, a file or the text itself")
    chat_template_content_format: ContentFormat = flag(
        "auto", "messages as a string or as OpenAI's parts; auto: see the template"
    )
    reasoning_parser: str = flag("auto", "how the model writes reasoning; auto: see its template")
    max_queued_requests: int = flag(4096, "requests that may wait; more are refused", least=1)
    max_queued_tokens: int = flag(1 << 23, "prompt tokens that may wait; more are refused", least=1)
    max_queue_seconds: float = flag(
        600.0, "longest wait for a first step, then 503; may be inf", above=0
    )
    watchdog_timeout: float = flag(
        30.0, "seconds without a finished step, amid requests, until /health says so", **DURATION
    )
    tensor_parallel_size: int = flag(1, "ranks that divide every layer, one process each", least=1)
    pipeline_parallel_size: int = flag(
        1, "stages that divide the layers, of so many ranks each; they take turns", least=1
    )
    enable_expert_parallel: bool = flag(
        False, "ranks divide experts by number, not by size; those of all engines do, together"
    )
    distributed_executor_backend: DistributedBackend = flag(
        "mp", "who starts the other ranks: mp: this process; ray: its cluster; uni: nobody"
    )
    nnodes: int = flag(
        1, "hosts: this one starts its share of the ranks, the others join (asyncllm worker)",
        least=1,
    )  # fmt: skip
    master_addr: str | None = flag(
        None, "this host's address, for the other ranks; default: 127.0.0.1, or as Ray has it"
    )
    master_port: int = flag(29501, "where they join", least=0, most=65535)
    join_secret_file: str | None = flag(
        None, "what they must know to join, default: the environment's ASYNCLLM_JOIN_SECRET"
    )
    distributed_timeout_seconds: float = flag(
        8.0,
        "until a rank that does not answer, or keeps the others waiting, counts as lost",
        **DURATION,
    )
    data_parallel_size: int = flag(
        1,
        "engines, each with all of the model but for experts that they may share; a request runs "
        "on one of them",
        least=1,
        most=flag_values.MAX_ENGINES,
    )
    data_parallel_backend: DataParallelBackend = flag(
        "auto", "mp: a process for each engine; uni: all in this one, on a CPU; auto: by the cores"
    )
    data_parallel_rank: int = flag(
        0, "of this engine among others that a balancer knows, or of the first one here", least=0
    )

    def __post_init__(self) -> None:
        if self.max_model_len == -1:
            self.max_model_len = None

    def create_engine_config(self) -> EngineConfig:
        """Validate and resolve all flags. Raises `ValueError` naming the flag, or
        `ModelLoadError`."""
        flag_values.check_fields(self)
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ValueError("calculate_kv_scales is for an fp8 kv_cache_dtype")
        if any(not name for name in self.served_model_name or []):
            raise ValueError("served_model_name must not be empty")
        path = self._model_path()
        model = ModelConfig.from_folder(path, self.model_impl)
        if self.quantization is not None:
            if model.implementation != "asyncllm":
                raise ValueError(
                    f"quantization {self.quantization} is for asyncllm's own models: "
                    f"{model.architecture} is run by transformers' code"
                )
            model = replace(model, quantization=self.quantization)
        if self.max_model_len is not None and self.max_model_len > model.context_window:
            raise ValueError(
                f"max_model_len {self.max_model_len} is over the model's window of "
                f"{model.context_window} tokens"
            )
        device = flag_values.resolve_device(self.device)
        max_tokens = self.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS[device]
        if max_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence takes a token per step"
            )
        resolved: dict[str, Any] = {
            "model": model,
            "tokenizer_path": self._tokenizer_path(path),
            "model_name": self.model,
            "served_model_names": tuple(self.served_model_name or [self._name()]),
            "device": device,
            "dtype": (dtype := flag_values.resolve_dtype(self.dtype, model, device)),
            "kv_cache_dtype": KV_DTYPE_NAMES.get(self.kv_cache_dtype, dtype),
            "swap_space_bytes": int(self.swap_space * GIB),
            "max_num_batched_tokens": max_tokens,
            "max_lora_rank": flag_values.kernel_rank(self.max_lora_rank),
            "max_cpu_loras": max(self.max_loras, self.max_cpu_loras or 0),
            "lora_modules_to_save": tuple(self.lora_modules_to_save or ()),
            "data_parallel_backend": flag_values.resolve_data_parallel_backend(
                self.data_parallel_backend,
                self.data_parallel_size,
                device,
                shares_experts=self.enable_expert_parallel,
            ),
            "cuda_graph_sizes": flag_values.decode_sizes(
                self.cuda_graph_sizes, self.max_num_seqs, self.pipeline_parallel_size
            ),
            "prefill_graph_sizes": flag_values.prefill_sizes(self.prefill_graph_sizes, max_tokens),
            "logits_processors": flag_values.resolve_classes(self.logits_processors),
            "mesh": (mesh := flag_values.resolve_mesh(self, device)),
            "cluster": flag_values.resolve_cluster(self, mesh),
            "generation_defaults": read_generation_defaults(
                self.generation_config, path, self.override_generation_config
            ),
        }
        rest = {f.name for f in fields(EngineConfig)} - resolved.keys()  # used as given
        return EngineConfig(**resolved, **{name: getattr(self, name) for name in rest})

    def _model_path(self) -> Path:
        """The model's folder, which may be downloaded."""
        needs: list[Part] = ["config"]
        if self.load_format != "dummy":
            needs.append("weights")
        if not (self.skip_tokenizer_init or self.tokenizer):
            needs.append("tokenizer")
        return resolve_model_path(self.model, self.revision, self.download_dir, needs)

    def _name(self) -> str:
        repo = hub_repo(self.model, self.revision)
        return self.model if repo is None else repo.name

    def _tokenizer_path(self, model: Path) -> Path | None:
        if self.skip_tokenizer_init:
            return None
        if not self.tokenizer:
            return model
        return resolve_model_path(self.tokenizer, None, self.download_dir, ["tokenizer"])

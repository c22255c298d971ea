"""One device's share of the engine: the model, its memory, its steps.

It chooses the device's implementations, so that nothing above asks which device it is, and tells
the engine what follows: how many pages there are, how long a context may be, what a swap costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.registry import build_backend, resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import build_model
from asyncllm.progress import DELAY_S, ProgressBar
from asyncllm.types import StepPlan
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import LaunchedStep, StreamExecutor
from asyncllm.worker.kernels import make_executor, select_kernels
from asyncllm.worker.memory import measure_swap_cost, plan_memory, profile_step
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.step_inputs import StepBuilder
from asyncllm.worker.work_counts import WorkCounts

# Lengths that bring in the kernel variants: one token, few, many, a whole step.
WARM_UP_TOKENS = (1, 16, 64, 128, 512, 2048, 8192)


class Worker:
    """Ready to run when constructed. Construction blocks: seconds for large models.

    `phases` maps each phase of the construction to its seconds.
    Raises `ModelLoadError`, or `ValueError` naming the flag that cannot be met.
    """

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.phases: dict[str, float] = {}
        self._progress = progress
        self.device = torch.device(config.device)
        dtype = getattr(torch, config.dtype)
        self.backend_name = resolve_backend(config.attention_backend, self.device)
        model_len = config.max_model_len or config.model.context_window
        kernels = select_kernels(self.device, dtype)

        with self._phase("load"):
            model = build_model(config.model, dtype, self.device, kernels.ops, model_len)
            load_weights(model, config.model.path, config.load_format, config.seed, progress)
        with self._phase("profile"):
            profile = profile_step(model, config, self.device, kernels.top_k_top_p)
            page_bytes = KVCache.page_bytes(
                config.model.num_layers,
                config.block_size,
                config.model.num_kv_heads,
                config.model.head_dim,
                dtype,
            )
            self.memory = plan_memory(config, page_bytes, profile, self.device)
        with self._phase("kv_cache"):
            cache = self._allocate_cache(config, dtype)
            self.swap_cost = measure_swap_cost(cache, profile)
            pages_per_sequence = -(-self.memory.max_model_len // config.block_size)
            state = DeviceState(
                config.num_slots, pages_per_sequence, config.model.vocab_size, self.device
            )
        self._executor = make_executor(self.device)
        attention = build_backend(self.backend_name, cache, model.attention_layers)
        self.runner = ModelRunner(
            model=model,
            cache=cache,
            attention=attention,
            state=state,
            sampler=Sampler(state, kernels.plain_sample, kernels.top_k_top_p),
            executor=self._executor,
            builder=StepBuilder(config.num_slots, config.block_size),
            device=self.device,
        )
        with self._phase("warm_up"), self._on_stream():
            most = min(config.max_num_batched_tokens, self.memory.max_model_len)
            for num_tokens in WARM_UP_TOKENS if self.device.type == "cuda" else (1,):
                self.runner.warm_up(min(num_tokens, most))
        if attention.supports_graphs and not config.enforce_eager:
            with self._phase("graphs"), self._on_stream():
                self._capture(config.cuda_graph_sizes)

    @property
    def num_graphs(self) -> int:
        return len(self.runner.graphs) if self.runner.graphs is not None else 0

    @property
    def work(self) -> WorkCounts:
        return self.runner.work

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self.runner.launch(plan)

    def drain(self) -> None:
        """Block until all launched steps are done; raises what a lost device raises."""
        self._executor.drain()

    def close(self) -> None:
        """Drain, end the threads, and give all device memory back."""
        try:
            self._executor.close()
        finally:
            self.runner.graphs = None  # they hold the runner's decode_step: break the circle
            del self.runner
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _allocate_cache(self, config: EngineConfig, dtype: torch.dtype) -> KVCache:
        """Raises `ValueError` naming the flags where the memory is not there."""
        try:
            return KVCache(
                num_layers=config.model.num_layers,
                num_pages=self.memory.num_pages + 1,
                block_size=config.block_size,
                num_kv_heads=config.model.num_kv_heads,
                head_dim=config.model.head_dim,
                dtype=dtype,
                device=self.device,
                num_host_pages=self.memory.num_host_pages,
            )
        except (MemoryError, RuntimeError) as error:
            raise ValueError(
                f"no memory for {self.memory.num_pages} KV pages and {self.memory.num_host_pages} "
                "swapped ones: lower num_gpu_blocks_override, kv_cache_memory_bytes, "
                "gpu_memory_utilization or swap_space"
            ) from error

    def _capture(self, sizes: tuple[int, ...]) -> None:
        """One decode graph per size, largest first."""
        graphs = DecodeGraphs(self.runner.decode_step, sizes, self.device)
        for size in ProgressBar(
            sorted(sizes, reverse=True),
            desc="capturing decode graphs",
            disable=not self._progress,
            leave=False,
            delay=DELAY_S,
        ):
            graphs.capture(size)
        self.runner.graphs = graphs

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work on the stream that the steps will use, after all that came before."""
        executor = self._executor
        if not isinstance(executor, StreamExecutor):
            yield
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(executor.stream):
            yield
        executor.drain()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - start

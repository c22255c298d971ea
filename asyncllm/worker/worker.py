"""A worker: the model on one device, its memory, and its steps.

It chooses the implementations for the device, so that the engine need not know which device it is,
and tells the engine the number of pages, the context window and the cost of swapping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.registry import build_backend, import_backend, resolve_backend
from asyncllm.attention.state_cache import StateLayout
from asyncllm.config import EngineConfig
from asyncllm.kernels.declaration import Launch
from asyncllm.models.base import CausalLM
from asyncllm.models.parallel.mesh import ALONE, Mesh
from asyncllm.models.registry import settle
from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep, StepCost
from asyncllm.worker import step_captures
from asyncllm.worker.adapters import AdapterStore
from asyncllm.worker.common_step import CommonSteps
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import StreamExecutor
from asyncllm.worker.kernel_prewarm import KernelPrewarm, prewarm_slots
from asyncllm.worker.kernels import (
    SlotKernels,
    first_of_stage,
    make_executor,
    select_ops,
    select_slot_kernels,
    select_states,
)
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.memory import (
    allocate_cache,
    allocate_states,
    free_memory,
    host_rows,
    kv_scales,
    measure_swap_cost,
    plan_memory,
    time_prefill_on_cpu,
)
from asyncllm.worker.model_loading import check_stages, load_model, make_model
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.packed_step import PackedStep
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.ranks.messages import Kind
from asyncllm.worker.staged_runner import StagedRunner
from asyncllm.worker.step_captures import StepCaptures, capture_obstacle
from asyncllm.worker.step_cost import measure_step_cost
from asyncllm.worker.token_masks import TokenMaskBuffer

logger = logging.getLogger("asyncllm")

# Lengths that need different kernel variants. The profiling run had the largest step.
WARM_UP_TOKENS = (1, 16, 64, 128, 512, 2048)


class Worker:
    """Ready to run when constructed. Construction blocks, for seconds with large models.

    phases: the seconds of each phase of the construction.
    imported: called when all imports are done; after that the GIL is mostly free.
    connect: connects to the ranks that share the model, and waits until all are there.
    group: on rank 0, the other ranks.
    Raises `ModelLoadError`, or `ValueError` naming the flag that cannot be satisfied.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        imported: Callable[[], object] = lambda: None,
        connect: Callable[[], Mesh] = lambda: ALONE,
        group: WorkerGroup | None = None,
    ) -> None:
        self.phases: dict[str, float] = {}
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        with self._phase("cache_layout"):
            self._config, model = settle(config)
            config, layers = self._config, model.attention_layers
            kv_dtype = getattr(torch, config.kv_cache_dtype)
            layout = CacheLayout(layers, config.block_size, kv_dtype)
            if config.mesh.pp > 1:
                check_stages(config, kv_dtype)
            state_layout = StateLayout(model.state_layers)
        self.device = torch.device(config.device)
        wanted, is_fp8 = config.attention_backend, config.kv_cache_dtype != config.dtype
        self.backend_name = resolve_backend(wanted, self.device, is_fp8=is_fp8)
        if is_fp8 and self.backend_name != resolve_backend(wanted, self.device):
            logger.warning("falling back to attention_backend torch, for an FP8 KV cache: slow")
        _, num_host_pages = host_rows(config, layout, state_layout)
        host_pages = HostPages(layout.host_shape(num_host_pages), torch.int64, self.device)
        early = KernelPrewarm(self.device)
        with self._phase("kernels"):
            early.begin_all(config)
            kernels = select_slot_kernels(self.device)
            captured = {*config.prefill_graph_sizes, *config.cuda_graph_sizes}
            if config.enforce_eager:
                captured.clear()
            agree = self._take_the_first_ranks if config.mesh.tp > 1 else None
            ops = select_ops(self.device, self._dtype, captured, agree)
            is_auto = config.attention_backend == "auto"
            self.backend_name = import_backend(self.backend_name, or_torch=is_auto)
        imported()
        self.group = group
        with self._phase("ranks"):
            self._mesh = connect()
        with self._phase("load"):
            model, lora, stages = make_model(config, ops, self._mesh, self.device)
            loading = load_model(model, config, early, self.device, progress)
            if not self._mesh.config.is_alone:
                ops.agree(self._mesh.least)  # after a compilation, which went on while it loaded
        with self._phase("profile"):
            early.wait_for_hash()
            sizes = layout, state_layout, self.device
            self.memory = plan_memory(model, config, *sizes, self._mesh)
        with self._phase("kv_cache"):
            num_pages = self.memory.num_pages
            scales = kv_scales(model, config, self.device, stages)
            cache = allocate_cache(layout, num_pages, host_pages, scales, self.device)
            num_slots, vocab_size = config.num_slots, config.model.vocab_size
            states = allocate_states(state_layout, num_slots, self.memory, self.device)
            table_pages = -(-self.memory.max_model_len // config.block_size)
            state = DeviceState(num_slots, table_pages, vocab_size, self.device, layout.num_groups)
            self.token_masks = TokenMaskBuffer(num_slots, vocab_size, self.device)
        self._executor = make_executor(self.device, config.mesh.rank)
        with self._closed_on_failure():
            self.adapters = None
            if lora is not None:
                self.adapters = AdapterStore(lora, config.max_cpu_loras, self._executor, group)
            self.processors = LogitsProcessors(config.logits_processors, config, self.device)
            attention = build_backend(self.backend_name, cache, model.attention_layers, self._dtype)
            make_runner = ModelRunner if stages is None else partial(StagedRunner, stages)
            self.runner: ModelRunner = make_runner(
                config,
                model,
                cache,
                attention,
                None if states is None else select_states(states, self.device),
                state,
                kernels,
                self._executor,
                self.processors,
                self.token_masks,
                lora,
                self._mesh,
                group,
            )
            self.work = self.runner.work
            self.common_steps = CommonSteps(self.runner, self._most_tokens)
            with self._phase("warm_up"), self._executor.between_steps():
                self._warm_up(state, kernels, early)
            self._captures = StepCaptures(
                config, self.runner, ops.before_capture, self._mesh.least, progress=progress
            )
            if attention.supports_graphs and not config.enforce_eager and self._can_capture(model):
                self._capture(model, cache, loading)
            self.step_cost: StepCost | None = None  # None on a CPU, where chunks do not matter
            if self.device.type == "cuda":
                with self._phase("step_cost"), self._executor.between_steps():
                    full_read = model.full_read_tokens
                    self.step_cost = measure_step_cost(
                        self.runner, self._most_tokens, full_read, self._mesh.least
                    )
            with self._phase("swap_space"):
                if self.step_cost is not None:
                    token_s = self.step_cost.seconds_per_token
                else:
                    token_s = time_prefill_on_cpu(model, config)
                self.swap_cost = measure_swap_cost(cache, states, self.memory, token_s)
            if group is not None:
                with self._phase("other_ranks"):
                    group.wait_ready(self.memory.num_pages)

    @property
    def num_graphs(self) -> int:
        return len(self.runner.graphs) if self.runner.graphs is not None else 0

    @property
    def decode_kernels(self) -> dict[str, list[int]]:
        """Implementation of decode steps -> sizes captured with it; empty if they are eager."""
        return self.runner.graphs.implementations if self.runner.graphs is not None else {}

    @property
    def prefill_graph_sizes(self) -> tuple[int, ...]:
        """Token counts of mixed steps that are captured, or will be; ascending."""
        is_captured = self.runner.mixed.graphs is not None
        return self._config.prefill_graph_sizes if is_captured else ()

    @property
    def runs_on_host(self) -> bool:
        """Whether its steps run in a thread of this process, and need the GIL."""
        return self.device.type == "cpu"

    @property
    def num_pending_graphs(self) -> int:
        return len(self._captures)

    @torch.inference_mode()
    def clear_pages(self, page_ids: list[int]) -> None:
        """Zero these pages, after all that was launched before, on all ranks."""
        if self.group is not None:
            self.group.send(Kind.CLEAR_PAGES, page_ids)
        self.runner.clear_pages(page_ids)

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Capture the next of the graphs left for idle times, on all ranks: 10 to 20 ms."""
        if self.group is not None:
            self.group.send(Kind.CAPTURE_GRAPH)
        with self._executor.between_steps():
            self._captures.capture_one()

    def launch(self, plan: StepPlan, step: PackedStep | None = None) -> LaunchedStep:
        """Launch a step: all of it, or its forward pass (`HostStep`) if it `needs_host`. step: as
        for `ModelRunner.launch`."""
        return self.runner.launch(plan, step)

    @property
    def num_calls(self) -> int:
        """The number of collective calls so far; on a CPU, of completed ones."""
        return self._mesh.num_calls

    def drain(self) -> None:
        """Block until all steps are done, including ones whose sampling is not launched. Raises
        what a lost device raises."""
        self.runner.end_begun()
        self._executor.drain()
        if self.group is not None:
            self.group.check()

    def close(self) -> None:
        """Drain, end threads and other ranks, and free all device memory."""
        if self._config.mesh.dp > 1:
            self._mesh.close()  # another engine may have ended during a step
        try:
            self._executor.close()  # cannot hang on a lost rank, as the group watches it
        finally:
            self._captures.clear()  # calls of the mesh among them: before it is closed
            if self.group is not None:
                self.group.close()
            self._mesh.wait_closed()
            if self.adapters is not None:
                self.adapters.close()
            del self.runner, self._captures, self.common_steps
            if self.device.type == "cuda":
                free_memory(self.device.type)

    # --- phases of the construction ----------------------------------------------------------

    def _warm_up(self, state: DeviceState, kernels: SlotKernels, early: KernelPrewarm) -> None:
        """Run padding steps on the current stream, while threads compile other kernels. Kernels
        that threads have begun are awaited first, instead of compiling them twice."""
        early.settle()
        if isinstance(self._executor, StreamExecutor) and self._config.mesh.is_alone:
            slots = torch.zeros(1, dtype=torch.int32, device=self.device)  # the padding slot
            early.begin(partial(self.runner.decode_step, slots, 1), self._executor.stream)
        for num_tokens in WARM_UP_TOKENS if self.device.type == "cuda" else (1,):
            self.runner.run_padding(min(num_tokens, self._most_tokens))
        early.wait()
        prewarm_slots(state, kernels, self.token_masks, self._config.block_size, self._dtype)

    def _can_capture(self, model: CausalLM) -> bool:
        """Whether graphs can capture the model. transformers' code may wait for the device."""
        if self._config.model.implementation == "asyncllm":
            return True
        with self._executor.between_steps():
            reason = capture_obstacle(model, self.device)
        can_all = self._mesh.least(int(reason is None)) == 1
        if not can_all:
            reason = reason or "another rank cannot capture it"
            logger.warning("%s runs without graphs: %s", self._config.model.architecture, reason)
        return can_all

    def _capture(
        self, model: CausalLM, cache: KVCache, loading: Callable[[], Launch | None]
    ) -> None:
        """loading: waits for the compilation of the persistent kernel."""
        with self._phase("prefill_graphs"), self._executor.between_steps():
            self._captures.prefills()
        with self._phase("decode_kernel"):
            persistent = step_captures.persistent_step(
                self.runner, model, cache, loading(), self._mesh
            )
        with self._phase("graphs"), self._executor.between_steps():
            self._captures.decodes(persistent)

    def _take_the_first_ranks(self, ours: bytes) -> bytes:
        return first_of_stage(self._mesh, self.device, ours)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """If its body raises, end its thread, and free the graphs: they refer to the runner, which
        refers to them. Who has started other ranks ends them."""
        try:
            yield
        except BaseException:
            self._mesh.close()  # no step waits for another rank any more
            self._executor.close()
            if hasattr(self, "_captures"):
                self._captures.clear()
            raise

    @property
    def _most_tokens(self) -> int:
        """The most tokens of one sequence in a step."""
        return min(self._config.max_num_batched_tokens, self.memory.max_model_len)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - start

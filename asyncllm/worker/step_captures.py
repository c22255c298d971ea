"""Captures a runner's steps: some before the engine is ready, the others in idle times.

Forward passes of mixed steps, sampling of their rows, and decode steps share a graph pool. The
runner uses the graphs, and runs the same steps eagerly without them. `clear` must be called at the
end: graphs refer to methods of the runner, so the two form a reference cycle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from asyncllm.attention.kv_cache import KVCache
from asyncllm.config import EngineConfig
from asyncllm.errors import one_line
from asyncllm.graphs.decode_graphs import DecodeGraphs, DecodeStep
from asyncllm.graphs.pool import GraphPool, Outputs, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs, first_sizes, later_sizes
from asyncllm.kernels.declaration import Launch, num_sms
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.loader import DELAY_S, ProgressBar
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.persistent_decode import PersistentDecode, shared_bytes
from asyncllm.worker.memory import forward_without_attention
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.staged_runner import StagedRunner

logger = logging.getLogger("asyncllm")

ROOM_BYTES = 256 << 20  # for the kernels of a capture's steps, too, and what NCCL adds


def persistent_step(
    runner: ModelRunner, model: CausalLM, cache: KVCache, launch: Launch | None, mesh: Mesh
) -> DecodeStep | None:
    """A decode step by the persistent kernel, on all ranks or on none. launch: the compiled kernel;
    None: not available."""
    if mesh.least(int(launch is not None)) == 0:
        return None
    assert launch is not None and isinstance(model, DenseDecoder)
    words = None
    if mesh.config.tp > 1:
        words = mesh.share_words(shared_bytes(model, mesh.config))
        if words is None:
            return None
    num_blocks = num_sms(cache.layers[0].device)
    persistent = PersistentDecode(model, cache, launch, num_blocks, words)
    return partial(runner.decode_step, forward=persistent.forward)


def capture_obstacle(model: CausalLM, device: torch.device) -> str | None:
    """Why the model's forward pass cannot be captured, in one line; None if it can. It must be
    called on a stream other than the default, after a run that has compiled the kernels."""

    def run() -> Outputs:
        return (model.compute_logits(forward_without_attention(model, 2, device)),)

    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode(mode)
        GraphPool().record(run)
    except Exception as error:  # transformers' model code may raise anything
        return one_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.empty_cache()
    return None


class StepCaptures:
    """All methods must be called between two steps, on their stream."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        before_capture: Callable[[], None],
        agree: Callable[[int], int],
        *,
        progress: bool,
    ) -> None:
        """before_capture: as for `GraphPool`. agree: the minimum of a number over all ranks."""
        self._config = config
        self._runner = runner
        self._agree = agree
        self._progress = progress
        self._pool = GraphPool(clear=runner.inputs.clear, before_capture=before_capture)
        # Resampling reads the logits of a step's graph, so it must not share that graph's memory.
        self._resampling_pool = GraphPool()
        self._pending: deque[Callable[[], None]] = deque()  # captures left for idle times

    def __len__(self) -> int:
        """The number of captures left for idle times."""
        return len(self._pending)

    def prefills(self) -> None:
        """Capture mixed steps: forward passes by number of tokens, sampling by number of rows."""
        config, runner = self._config, self._runner
        sizes, most_rows = config.prefill_graph_sizes, config.cuda_graph_sizes[-1]
        if not sizes:
            return
        device, dtype = runner.inputs.token_ids.device, runner.mixed.dtype
        # The size that the LM head takes: a model's layers may use another one.
        hidden_size = forward_without_attention(runner.mixed.model, 1, device).shape[1]
        hidden = torch.zeros(max(sizes[-1], most_rows), hidden_size, dtype=dtype, device=device)
        graphs = runner.mixed.make_graphs(hidden, config.max_num_seqs, self._pool)
        self._capture(graphs.capture, sizes, "prefill")
        if config.mesh.stage > 0:  # which has no logits
            return
        for size in first_sizes(config.cuda_graph_sizes):
            runner.mixed.capture_sampling(size, self._pool)

    def decodes(self, persistent: DecodeStep | None) -> None:
        """Capture decode steps. persistent: as for `DecodeGraphs`."""
        sizes, runner = self._config.cuda_graph_sizes, self._runner
        slots = runner.inputs.decode_slots
        step: Callable[..., tuple[torch.Tensor, ...]] = runner.decode_step
        if isinstance(runner, StagedRunner):
            step = runner.stage_step
        is_alone = self._config.mesh.is_alone
        decode = DecodeGraphs(step, slots, self._pool, persistent, may_fail=is_alone)
        with_adapters = decode
        if runner.lora is not None:
            with_adapters = DecodeGraphs(partial(step, adapters=True), slots, self._pool)
        masked: SizedGraphs[Recorded] = SizedGraphs()

        def capture(size: int) -> None:
            if with_adapters is not decode:
                with_adapters.capture(size)
            decode.capture(size)
            if not isinstance(runner, StagedRunner):
                logits: torch.Tensor | None = decode.logits(size)
            else:
                if with_adapters is not decode:
                    runner.capture_last(size, self._pool, adapters=True)
                logits = runner.capture_last(size, self._pool, adapters=False)
            if logits is not None:
                resample = partial(runner.resample, logits, slots[:size])
                masked.add(size, self._resampling_pool.record(lambda: (resample(),)))

        self._capture(capture, sizes, "decode")
        runner.inputs.capture_changes(self._pool)
        runner.graphs, runner.masked_graphs = decode, masked
        runner.adapter_graphs = with_adapters

    def capture_one(self) -> None:
        """Do one of the captures left for idle times. Blocks for 10 to 20 ms.

        All ranks do it, because their steps must be padded to the same sizes. If one of them has no
        room left, none captures any more; if a capture fails nevertheless, that ends the group.
        """
        device = self._runner.inputs.token_ids.device
        if self._config.mesh.size > 1 and self._agree(int(has_room(device))) == 0:
            logger.warning("a rank has no memory for %d more graphs", len(self._pending))
            self._pending.clear()
            return
        try:
            self._pending.popleft()()  # removed even if it raises, so not tried again
        except torch.cuda.OutOfMemoryError as error:  # the next larger graph serves as well
            if self._config.mesh.size > 1:
                raise
            logger.warning("no memory for %d more graphs: %s", len(self._pending) + 1, error)
            self._pending.clear()

    def clear(self) -> None:
        """Destroy all graphs, also those that a step still refers to: NCCL keeps its memory while a
        graph has calls of it."""
        self._pending.clear()
        self._pool.reset()
        self._resampling_pool.reset()
        runner = self._runner
        runner.graphs = runner.adapter_graphs = runner.mixed.graphs = None
        runner.masked_graphs, runner.mixed.sample_graphs = SizedGraphs(), SizedGraphs()
        if isinstance(runner, StagedRunner):
            runner.last_graphs.clear()

    def _capture(self, capture: Callable[[int], None], sizes: tuple[int, ...], name: str) -> None:
        """Capture some sizes now, largest first, and the others in idle times. Engines that share
        experts capture all sizes now, as they are not idle at the same time."""
        has_idle_times = self._config.mesh.dp == 1
        for size in ProgressBar(
            first_sizes(sizes) if has_idle_times else sorted(sizes, reverse=True),
            desc=f"capturing {name} graphs",
            disable=not self._progress,
            leave=False,
            delay=DELAY_S,
        ):
            capture(size)
        if has_idle_times:
            self._pending.extend(partial(capture, size) for size in later_sizes(sizes))


def has_room(device: torch.device) -> bool:
    """Whether this rank has memory for one more graph. It must say so before a capture, in which
    the other ranks would wait for it."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= ROOM_BYTES

"""A runner's captured steps: some made before the engine is ready, the others in idle moments.

Forward passes of steps with prefills, samples of their rows, and whole decode steps share a pool.
The runner has its graphs from here, and without them runs the same steps eagerly. Whoever closes
the runner calls `clear`: a graph's functions are the runner's own, so each would keep the other.
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
from asyncllm.models.persistent_decode import PersistentDecode
from asyncllm.worker.memory import forward_without_attention
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.staged_runner import StagedRunner

logger = logging.getLogger("asyncllm")


def persistent_step(
    runner: ModelRunner, model: CausalLM, cache: KVCache, launch: Launch | None
) -> DecodeStep | None:
    """A decode step by the persistent kernel. launch: where this start has it."""
    if launch is None:
        return None
    assert isinstance(model, DenseDecoder)
    persistent = PersistentDecode(model, cache, launch, num_sms(cache.layers[0].device))
    return partial(runner.decode_step, forward=persistent.forward)


def capture_obstacle(model: CausalLM, device: torch.device) -> str | None:
    """Why the model's forward pass cannot be captured, in one line; None: it can. On the current
    stream, not the default one, after a run that has compiled its kernels."""

    def run() -> Outputs:
        return (model.compute_logits(forward_without_attention(model, 2, device)),)

    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode(mode)
        GraphPool().record(run)
    except Exception as error:  # whatever the code of a library's model raises
        return one_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.empty_cache()
    return None


class StepCaptures:
    """All on the current stream, which the steps use, between two of them."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        before_capture: Callable[[], None],
        *,
        progress: bool,
    ) -> None:
        """before_capture: as `GraphPool` calls it."""
        self._config = config
        self._runner = runner
        self._progress = progress
        self._pool = GraphPool(clear=runner.inputs.clear, before_capture=before_capture)
        self._pending: deque[Callable[[], None]] = deque()  # in their order

    def __len__(self) -> int:
        """How many are left for idle moments."""
        return len(self._pending)

    def prefills(self) -> None:
        """Capture steps with prefills: forward passes by their tokens, samples by their rows."""
        config, runner = self._config, self._runner
        sizes, most_rows = config.prefill_graph_sizes, config.cuda_graph_sizes[-1]
        if not sizes:
            return
        device, dtype = runner.inputs.token_ids.device, runner.mixed.dtype
        # What the head takes: a model may have another size between its layers.
        hidden_size = forward_without_attention(runner.mixed.model, 1, device).shape[1]
        hidden = torch.zeros(max(sizes[-1], most_rows), hidden_size, dtype=dtype, device=device)
        graphs = runner.mixed.make_graphs(hidden, config.max_num_seqs, self._pool)
        self._capture(graphs.capture, sizes, "prefill")
        for size in first_sizes(config.cuda_graph_sizes):
            runner.mixed.capture_sampling(size, self._pool)

    def decodes(self, persistent: DecodeStep | None) -> None:
        """persistent: as `DecodeGraphs` has it."""
        sizes, runner = self._config.cuda_graph_sizes, self._runner
        slots = runner.inputs.decode_slots
        step: Callable[..., tuple[torch.Tensor, ...]] = runner.decode_step
        if isinstance(runner, StagedRunner):
            step = runner.stage_step
        with_adapters = decode = DecodeGraphs(step, slots, self._pool, persistent)
        if runner.lora is not None:
            with_adapters = DecodeGraphs(partial(step, adapters=True), slots, self._pool)
        # What resampling computes must not lie where the logits are that it reads, which are a
        # step's outputs: it has a pool of its own.
        pool = GraphPool()
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
                masked.add(size, pool.record(lambda: (resample(),)))

        self._capture(capture, sizes, "decode")
        runner.inputs.capture_changes(self._pool)
        runner.graphs, runner.masked_graphs = decode, masked
        runner.adapter_graphs = with_adapters

    def capture_one(self) -> None:
        """One of those that are left. Blocks for 10 to 20 ms."""
        try:
            self._pending.popleft()()  # done also where it raises: it is not tried for ever
        except torch.cuda.OutOfMemoryError as error:  # the next larger graph serves as well
            logger.warning("no memory for %d more graphs: %s", len(self._pending) + 1, error)
            self._pending.clear()

    def clear(self) -> None:
        """Let go of all that is captured, which holds the runner's own methods: a circle."""
        self._pending.clear()
        runner = self._runner
        runner.graphs = runner.adapter_graphs = runner.mixed.graphs = None
        runner.masked_graphs, runner.mixed.sample_graphs = SizedGraphs(), SizedGraphs()
        if isinstance(runner, StagedRunner):
            runner.last_graphs.clear()

    def _capture(self, capture: Callable[[int], None], sizes: tuple[int, ...], name: str) -> None:
        """Some sizes now, largest first, the others when the engine is idle. Where ranks share the
        model all of them now: one that later had no memory left would pad steps to another size
        than the others, and their calls would not fit."""
        is_alone = self._config.mesh.size == 1
        for size in ProgressBar(
            first_sizes(sizes) if is_alone else sorted(sizes, reverse=True),
            desc=f"capturing {name} graphs",
            disable=not self._progress,
            leave=False,
            delay=DELAY_S,
        ):
            capture(size)
        if is_alone:
            self._pending.extend(partial(capture, size) for size in later_sizes(sizes))

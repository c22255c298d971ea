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

from asyncllm.config import EngineConfig
from asyncllm.graphs.decode_graphs import DecodeGraphs, DecodeKernel
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs, first_sizes, later_sizes
from asyncllm.models.loader import DELAY_S, ProgressBar
from asyncllm.worker.decode_autotune import DecodeAutotune
from asyncllm.worker.model_runner import ModelRunner

logger = logging.getLogger("asyncllm")


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
        shape = max(sizes[-1], most_rows), config.model.hf_config.hidden_size
        hidden = torch.zeros(shape, dtype=runner.mixed.dtype, device=runner.inputs.token_ids.device)
        graphs = runner.mixed.make_graphs(hidden, config.max_num_seqs, self._pool)
        self._capture(graphs.capture, sizes, "prefill")
        for size in first_sizes(config.cuda_graph_sizes):
            runner.mixed.capture_sampling(size, self._pool)

    def decodes(self, others: list[DecodeKernel], autotune: DecodeAutotune) -> None:
        """`others`: implementations of a step besides the layers, which `autotune` times."""
        sizes, runner = self._config.cuda_graph_sizes, self._runner
        slots = runner.inputs.decode_slots
        decode = DecodeGraphs(runner.decode_step, slots, self._pool, others, autotune)
        # What resampling computes must not lie where the logits are that it reads, which are a
        # step's outputs: it has a pool of its own.
        pool = GraphPool()
        masked: SizedGraphs[Recorded] = SizedGraphs()

        def capture(size: int) -> None:
            decode.capture(size)
            logits, rows = decode.logits(size), slots[:size]
            masked.add(size, pool.record(lambda: (runner.resample(logits, rows),)))

        self._capture(capture, sizes, "decode")
        runner.inputs.capture_changes(self._pool)
        runner.graphs, runner.masked_graphs = decode, masked

    def capture_one(self) -> None:
        """One of those that are left. Blocks for 10 to 20 ms, a few steps more where
        implementations are timed."""
        try:
            self._pending.popleft()()  # done also where it raises: it is not tried for ever
        except torch.cuda.OutOfMemoryError as error:  # the next larger graph serves as well
            logger.warning("no memory for %d more graphs: %s", len(self._pending) + 1, error)
            self._pending.clear()

    def clear(self) -> None:
        """Let go of all that is captured, which holds the runner's own methods: a circle."""
        self._pending.clear()
        runner = self._runner
        runner.graphs = runner.mixed.graphs = None
        runner.masked_graphs, runner.mixed.sample_graphs = SizedGraphs(), SizedGraphs()

    def _capture(self, capture: Callable[[int], None], sizes: tuple[int, ...], name: str) -> None:
        """Some sizes now, largest first, the others when the engine is idle."""
        for size in ProgressBar(
            first_sizes(sizes),
            desc=f"capturing {name} graphs",
            disable=not self._progress,
            leave=False,
            delay=DELAY_S,
        ):
            capture(size)
        self._pending.extend(partial(capture, size) for size in later_sizes(sizes))

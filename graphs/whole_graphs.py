"""Mixed steps, each captured whole, attention and all, by the number of tokens.

Attention reads on the device what differs from step to step (`StepAttention`), so nothing breaks
the graph, and a step is one launch: 28 layers in pieces cost the host some 3 ms. A size is captured
twice: for prefills alone, and with decodes before them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, PrefillRows, StepAttention
from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.step_graph import Clear, ReadDecodes, StepGraph, Way, WriteChanges
from asyncllm.graphs.token_buffers import TokenBuffers, forward
from asyncllm.models.base import CausalLM


class WholeGraphs:
    """Steps of up to as many tokens as `buffers` has are captured by calls of `capture`."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        step_attention: StepAttention,
        write_changes: WriteChanges,
        read_decodes: ReadDecodes,
        most_decodes: int,
        buffers: TokenBuffers,
        hidden: torch.Tensor,
        clear: Clear,
        pool: GraphPool,
    ) -> None:
        """hidden: for the last replay's hidden states, [most tokens or more, hidden_size]."""
        self._model = model
        self._attention = attention
        self._step_attention = step_attention
        self._write_changes = write_changes
        self._read_decodes = read_decodes
        self._most_decodes = min(most_decodes, step_attention.max_decodes)
        self._buffers = buffers
        self._clear = clear
        self._pool = pool
        self._hidden = hidden
        self._sizes = CapturedSizes()
        self._graphs: dict[StepGraph, Graph] = {}

    def graph_of(self, num_decodes: int, prefills: PrefillRows) -> StepGraph | None:
        """What such a step replays; None: it has no graph."""
        size = self._sizes.fitting(num_decodes + prefills.num_tokens)
        attention = self._step_attention
        if (
            size is None
            or num_decodes > self._most_decodes
            or len(prefills.kv_lens) > attention.max_prefills
            or len(prefills.pages) > attention.max_pages
        ):
            return None
        return StepGraph(size, Way.MIXED if num_decodes else Way.PREFILLS)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        self._clear()
        for way in (Way.MIXED, Way.PREFILLS):
            graph, _ = self._pool.record(partial(self._forward, size, way))
            self._graphs[StepGraph(size, way)] = graph
        self._sizes.add(size)

    def replay(
        self, graph: StepGraph, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        """As `StepGraphs` says."""
        self._step_attention.prepare(len(decode_positions), prefills)
        self._graphs[graph].replay()
        return self._hidden

    def _forward(self, size: int, way: Way) -> tuple[()]:
        self._write_changes()
        tokens = self._buffers.first(size)
        decodes = None
        if way is Way.MIXED:
            decodes = self._read_decodes(min(size, self._most_decodes), tokens)
        attend_rows = self._step_attention.bind(decodes, tokens.q, tokens.out)
        hidden = forward(self._model, self._attention, tokens, attend_rows)
        self._hidden[:size].copy_(hidden)
        return ()

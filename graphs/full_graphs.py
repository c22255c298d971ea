"""Full CUDA graphs of mixed steps, attention included, by the number of tokens.

Attention reads on the device what differs from step to step (`StepAttention`), so nothing breaks
the graph, and a step is one launch: 28 layers in pieces cost the host some 3 ms. A size is captured
twice: for prefills alone, and with decodes before them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, PrefillRows, StepAttention
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import Clear, ReadDecodes, TokenBuffers, WriteChanges, forward
from asyncllm.models.base import CausalLM
from asyncllm.step_plan import StepKind, StepShape


class FullGraphs:
    """A `MixedGraphs`, for steps of up to as many tokens as `buffers` has."""

    writes_changes = True

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
        self._graphs: dict[StepKind, SizedGraphs[Recorded]] = {
            kind: SizedGraphs() for kind in (StepKind.MIXED, StepKind.PREFILL)
        }

    def fitting(self, num_decodes: int, prefills: PrefillRows) -> StepShape | None:
        attention = self._step_attention
        if (
            num_decodes > self._most_decodes
            or len(prefills.kv_lens) > attention.max_prefills
            or len(prefills.pages) > attention.max_pages
        ):
            return None
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        size = self._graphs[kind].fitting(num_decodes + prefills.num_tokens)
        return None if size is None else StepShape(kind, size)

    def capture(self, size: int) -> None:
        self._clear()
        for kind, graphs in self._graphs.items():
            graphs.add(size, self._pool.record(partial(self._forward, kind, size)))

    def replay(
        self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        self._step_attention.prepare(len(decode_positions), prefills)
        self._graphs[shape.kind][shape.size].replay()
        return self._hidden

    def _forward(self, kind: StepKind, size: int) -> tuple[()]:
        self._write_changes()
        tokens = self._buffers.first(size)
        decodes = None
        if kind is StepKind.MIXED:
            decodes = self._read_decodes(min(size, self._most_decodes), tokens)
        attend_rows = self._step_attention.bind(decodes, tokens.q, tokens.out)
        hidden = forward(self._model, self._attention, tokens, attend_rows)
        self._hidden[:size].copy_(hidden)
        return ()

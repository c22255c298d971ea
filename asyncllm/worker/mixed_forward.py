"""The forward pass of a step with prefills: captured where a size fits, else eager.

Both ways read the step's arrays from the inbox, or, where there are more tokens than that holds,
from a copy of their own; a captured step has padding behind its tokens. Its changes of slots come
with the inbox too, and are part of most graphs. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncllm.attention.base import AttentionBackend, DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.pool import GraphPool
from asyncllm.graphs.prefill_graphs import PrefillGraphs
from asyncllm.graphs.step_graph import StepGraph, StepGraphs, Way
from asyncllm.graphs.token_buffers import TokenBuffers, forward
from asyncllm.graphs.whole_graphs import WholeGraphs
from asyncllm.models.base import CausalLM
from asyncllm.worker.decode_rows import FillDecodes
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.inbox import TOKEN_ARRAYS, Inbox
from asyncllm.worker.slot_changes import NO_CHANGES, SlotChanges
from asyncllm.worker.slot_writer import SlotWriter
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_inputs import StepTokens

EAGER_SIZE = 256  # tokens to which steps that are not captured are rounded, to compare them


def duration_key(num_tokens: int, graph: StepGraph | None) -> int:
    """What such a step's duration goes by; not 0, which decodes alone have."""
    if graph is None:
        return -(-num_tokens // EAGER_SIZE) * EAGER_SIZE * len(Way)
    return graph.num_tokens * len(Way) + graph.way


class MixedForward:
    """Eager until `make_graphs`, and captures."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        state: DeviceState,
        inbox: Inbox,
        staging: Staging,
        slot_writer: SlotWriter,
        fill_decodes: FillDecodes,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache
        self._state = state
        self._inbox = inbox
        self._staging = staging
        self._slot_writer = slot_writer
        self._fill_decodes = fill_decodes
        self.graphs: StepGraphs | None = None

    def make_graphs(self, hidden: torch.Tensor, most_decodes: int, pool: GraphPool) -> StepGraphs:
        """Whole ones where attention can be captured, else pieces. None is captured yet.

        hidden: the buffer for hidden states [tokens, hidden_size], of all that the inbox takes.
        """
        inbox, layer = self._inbox, self._model.attention_layers[0]
        buffers = TokenBuffers.around(
            inbox.token_ids,
            inbox.positions,
            inbox.prompt_lens,
            inbox.write_slots,
            layer,
            self._cache.layers[0].dtype,
        )
        model, attention = self._model, self._attention
        step_attention = attention.step_attention(len(inbox.token_ids))
        if step_attention is None:
            return PrefillGraphs(
                model,
                attention,
                self._read_decodes,
                buffers,
                hidden,
                inbox.clear,
                pool,
            )
        return WholeGraphs(
            model,
            attention,
            step_attention,
            self._slot_writer.launch,
            self._read_decodes,
            most_decodes,
            buffers,
            hidden,
            inbox.clear,
            pool,
        )

    def graph_of(self, step: StepTokens) -> StepGraph | None:
        """What such a step runs in; None: it runs eagerly."""
        if self.graphs is None:
            return None
        return self.graphs.graph_of(len(step.decode_slots), step.prefills)

    def run(
        self, step: StepTokens, graph: StepGraph | None, changes: SlotChanges = NO_CHANGES
    ) -> torch.Tensor:
        """Hidden states [tokens or more, hidden_size], until the next step: decodes, prefills.

        graph: the step's `graph_of`. changes: as many as the inbox takes; its decodes see them. The
        inbox has the step's rows afterwards.
        """
        self._inbox.put(step, changes, None if graph is None else graph.num_tokens)
        if changes is not NO_CHANGES and (graph is None or not graph.writes_changes):
            self._slot_writer.write()
        if self.graphs is not None and graph is not None:
            return self.graphs.replay(graph, step.decode_positions, step.prefills)
        tokens, decodes = self._eager_tokens(step), None
        if num_decodes := len(step.decode_slots):
            max_len = int(step.decode_positions.max()) + 1
            decodes = replace(self._read_decodes(num_decodes, tokens), max_len=max_len)
        attend_rows = self._attention.mixed(decodes, step.prefills, tokens.q, tokens.out)
        return forward(self._model, self._attention, tokens, attend_rows)

    def _read_decodes(self, num_rows: int, tokens: TokenBuffers) -> DecodeRows:
        slots = self._inbox.decode_slots[:num_rows]
        return self._fill_decodes(self._state, slots, tokens, self._cache.block_size)

    def _eager_tokens(self, step: StepTokens) -> TokenBuffers:
        tokens = TokenBuffers.zeros(
            step.num_tokens,
            self._model.attention_layers[0],
            self._cache.layers[0].dtype,
            self._state.positions.device,
        )
        uploaded = self._staging.upload({"tokens": step.tokens, "write_slots": step.write_slots})
        first = len(step.decode_slots)
        for name, values in zip(TOKEN_ARRAYS, uploaded["tokens"], strict=True):
            getattr(tokens, name)[first:].copy_(values)
        tokens.write_slots[first:].copy_(uploaded["write_slots"])
        return tokens

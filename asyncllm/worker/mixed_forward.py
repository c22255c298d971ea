"""The forward pass of a step with prefills: captured where a size fits, else eager.

Both ways fill the same kind of buffers and call the same attention; a graphed step has padding
behind its tokens. One short prompt from its beginning is one graph, any other rows are pieces with
the attention between them. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from asyncllm.attention.base import AttentionBackend, DecodeRows, PrefillRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.prefill_graphs import PrefillGraphs, TokenBuffers, forward
from asyncllm.models.base import CausalLM
from asyncllm.worker.device_state import DeviceState

EAGER_SIZE = 256  # tokens to which steps that are not captured are rounded, to compare them


class StepGraph(NamedTuple):
    """What a step with prefills replays. `is_whole`: it is one graph, attention and all."""

    num_tokens: int
    is_whole: bool


def duration_key(num_tokens: int, graph: StepGraph | None) -> int:
    """What such a step's duration goes by: its (padded) tokens, negative where it is one graph.

    Decodes alone, which go on, have 0.
    """
    if graph is None:
        return -(-num_tokens // EAGER_SIZE) * EAGER_SIZE
    return -graph.num_tokens if graph.is_whole else graph.num_tokens


class MixedForward:
    """Eager until `graphs` is set."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, cache: KVCache, state: DeviceState
    ) -> None:
        self._model = model
        self._attention = attention
        self.state = state
        self._block_size = cache.block_size
        self._dtype = cache.layers[0].dtype
        self.graphs: PrefillGraphs | None = None

    def graph_of(self, num_decodes: int, prefills: PrefillRows) -> StepGraph | None:
        """What such a step runs in; None: it runs eagerly."""
        size = None
        if self.graphs is not None:
            size = self.graphs.size_for(num_decodes + prefills.num_tokens)
        if self.graphs is None or size is None:
            return None
        is_whole = num_decodes == 0 and prefills.is_fresh and self.graphs.has_whole(size)
        return StepGraph(size, is_whole)

    def run(
        self,
        decode_slots: torch.Tensor,
        max_decode_len: int,
        prefills: PrefillRows,
        tensors: Mapping[str, torch.Tensor],
        graph: StepGraph | None,
    ) -> torch.Tensor:
        """Hidden states [tokens or more, hidden_size], until the next step: decodes, prefills.

        decode_slots: int32 [decodes]. tensors: the step's uploaded `prefill_*` and `write_slots`.
        graph: its `graph_of`.
        """
        num_tokens = len(decode_slots) + prefills.num_tokens
        graphs = self.graphs
        if graphs is not None and graph is not None:
            tokens = graphs.buffers(graph.num_tokens)
            tokens.write_slots[num_tokens:].zero_()  # stale elsewhere is harmless
        else:
            tokens = self._new_buffers(num_tokens)
        decodes = None
        if len(decode_slots):
            decodes = self._fill_decodes(decode_slots, max_decode_len, tokens)
        self._fill_prefills(tensors, len(decode_slots), num_tokens, tokens)
        if graphs is None or graph is None:
            attend_rows = self._attention.mixed(decodes, prefills, tokens.q, tokens.out)
            return forward(self._model, self._attention, tokens, attend_rows)
        if graph.is_whole:
            return graphs.replay_whole(graph.num_tokens)
        attend_rows = self._attention.mixed(decodes, prefills, tokens.q, tokens.out)
        return graphs.replay(graph.num_tokens, attend_rows)

    def _new_buffers(self, num_tokens: int) -> TokenBuffers:
        layer = self._model.attention_layers[0]
        return TokenBuffers.zeros(num_tokens, layer, self._dtype, self.state.positions.device)

    def _fill_decodes(self, slots: torch.Tensor, max_len: int, tokens: TokenBuffers) -> DecodeRows:
        state, rows = self.state, tokens.first(len(slots))
        torch.index_select(state.last_tokens, 0, slots, out=rows.token_ids)
        torch.index_select(state.positions, 0, slots, out=rows.positions)
        if self._model.uses_prompt_lens:
            torch.index_select(state.prompt_lens, 0, slots, out=rows.prompt_lens)
        decodes = DecodeRows(state.block_tables[slots], rows.positions, max_len)
        rows.write_slots.copy_(decodes.write_slots(self._block_size))
        return decodes

    def _fill_prefills(
        self, tensors: Mapping[str, torch.Tensor], start: int, end: int, tokens: TokenBuffers
    ) -> None:
        """Tokens start:end."""
        tokens.token_ids[start:end].copy_(tensors["prefill_tokens"])
        tokens.positions[start:end].copy_(tensors["prefill_positions"])
        tokens.write_slots[start:end].copy_(tensors["write_slots"])
        if self._model.uses_prompt_lens:
            tokens.prompt_lens[start:end].copy_(tensors["prefill_prompt_lens"])

"""From the hidden states of a step with prefills to the logits of the rows that sample.

The inbox says which tokens those are, and the slots and positions of what follows them. Where a
number of rows is captured, logits come with plainly sampled tokens.
"""

from __future__ import annotations

import torch

from asyncllm.graphs.pool import GraphPool
from asyncllm.graphs.sample_graphs import SampleGraphs
from asyncllm.models.base import CausalLM
from asyncllm.worker.inbox import Inbox
from asyncllm.worker.sampler import Sampler


class MixedLogits:
    """Eager until `make_graphs`, and captures."""

    def __init__(self, model: CausalLM, sampler: Sampler, inbox: Inbox) -> None:
        self._model = model
        self._sampler = sampler
        self._inbox = inbox
        self.graphs: SampleGraphs | None = None

    def make_graphs(self, buffer: torch.Tensor, pool: GraphPool) -> SampleGraphs:
        """buffer: for hidden states of the most rows [rows, hidden_size]. None is captured yet."""

        def sample(
            hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._model.compute_logits(hidden)
            return self._sampler.plain(logits, slots, positions), logits

        return SampleGraphs(sample, buffer, *self.rows(len(buffer)), pool)

    def of(self, hidden: torch.Tensor, num_rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """[rows, V] of the step in the inbox; before them tokens int32 [rows] if sampled already.

        hidden: of the step's tokens, [tokens or more, hidden_size].
        """
        rows = self._inbox.sample_tokens[:num_rows]
        if num_rows and self.graphs is not None and self.graphs.takes(num_rows):
            return self.graphs.replay(hidden, rows)
        # Where no prefill reached its last chunk, there is nothing to sample.
        tokens = None if num_rows else rows
        return tokens, self._model.compute_logits(hidden[rows])

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions int32 [rows] of the samples of the step in the inbox."""
        inbox = self._inbox
        return inbox.sample_slots[:num_rows], inbox.sample_positions[:num_rows]

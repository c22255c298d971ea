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

    def make_graphs(self, hidden: torch.Tensor, pool: GraphPool) -> SampleGraphs:
        """hidden: where captured steps leave hidden states, and as many as there may be rows. None
        is captured yet."""
        inbox = self._inbox

        def sample(
            hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._model.compute_logits(hidden)
            return self._sampler.plain(logits, slots, positions), logits

        rows = (inbox.sample_tokens, inbox.sample_slots, inbox.sample_positions)
        return SampleGraphs(sample, hidden, *rows, pool)

    def of(self, hidden: torch.Tensor, num_rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """[rows, V] of the step in the inbox; before them tokens int32 [rows] if sampled already.
        Of both there may be more, which are padding.

        hidden: of the step's tokens, [tokens or more, hidden_size].
        """
        if not num_rows:  # no prefill reached its last chunk
            return self._inbox.sample_tokens[:0], hidden[:0]
        outputs = None if self.graphs is None else self.graphs.replay(hidden, num_rows)
        if outputs is not None:
            tokens, logits = outputs
            return tokens, logits
        rows = self._inbox.sample_tokens[:num_rows]
        return None, self._model.compute_logits(hidden[rows])

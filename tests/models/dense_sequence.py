"""One sequence through a model with the plainest attention there is: every key kept in a list."""

from __future__ import annotations

import torch

from asyncllm.attention.base import AttentionLayer, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.parallel.stages import Stages


class DenseSequence:
    """A `Mixer` that feeds tokens in pieces of any length; keys and values of all are kept."""

    def __init__(
        self, model: CausalLM, num_prompt_tokens: int, stages: Stages | None = None
    ) -> None:
        self.model = model
        self.stages = stages
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed = 0
        self.keys: list[list[torch.Tensor]] = [[] for _ in model.attention_layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in model.attention_layers]

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, vocab_size] of the next T tokens."""
        positions = torch.arange(len(token_ids), dtype=torch.int32) + self.num_computed
        prompt_lens = None
        if self.model.uses_prompt_lens:
            prompt_lens = torch.full_like(positions, self.num_prompt_tokens)
        num_tokens, stages = len(token_ids), self.stages
        if stages is not None:
            stages.receive(num_tokens)
        hidden = self.model.forward(TokenInputs(token_ids, positions, prompt_lens), self)
        self.num_computed += num_tokens
        if stages is not None:
            stages.send(hidden, returns=True)
            if stages.is_first:
                stages.take_back(num_tokens)
                hidden = stages.model.last_norm(num_tokens)
        return self.model.compute_logits(hidden)

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q, k, v = rotated_heads(layer, qkv, rotation)
        self.keys[layer.index].append(k)
        self.values[layer.index].append(v)
        group = layer.num_heads // layer.num_kv_heads
        keys = torch.cat(self.keys[layer.index]).repeat_interleave(group, dim=1)
        values = torch.cat(self.values[layer.index]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
        if layer.soft_cap is not None:
            scores = (scores / layer.soft_cap).tanh() * layer.soft_cap
        query = self.num_computed + torch.arange(len(q))[:, None]
        key = torch.arange(len(keys))[None, :]
        seen = key <= query
        if layer.window is not None:
            seen &= key > query - layer.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), dim=2)
        probs = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", probs, values).flatten(1)

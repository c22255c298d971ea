"""Layers with sparse attention by an index (DeepSeek sparse attention), run as full attention.

In such layers a token attends to the top-k tokens of a small attention, the index. If k is at least
max_model_len, it attends to all tokens, and the index' modules are left out. A larger max_model_len
is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from asyncllm.models.transformers_attention import Unservable

# By layer type: the number of tokens that it attends to, and the name of the setting.
SEEN: dict[str, tuple[Callable[[Any], int], str]] = {
    "indexed_attention": (lambda text: int(text.index_topk), "index_topk"),
    "deepseek_sparse_attention": (lambda text: int(text.index_topk), "index_topk"),  # older
    "minimax_m3_sparse": (
        lambda text: int(text.index_topk_blocks * text.index_block_size),
        "index_topk_blocks * index_block_size",
    ),
}


def check_index(text: Any, max_model_len: int) -> None:
    """Raises `Unservable` if a layer's index would leave tokens out."""
    for layer_type in set(getattr(text, "layer_types", None) or ()) & SEEN.keys():
        count, key = SEEN[layer_type]
        try:
            num_seen = count(text)
        except AttributeError:  # another kind of index
            raise Unservable(f"has layer_types {layer_type!r} without {key}") from None
        if num_seen < max_model_len:
            raise Unservable(
                f"has layer_types {layer_type!r}, which see {key} {num_seen} tokens, fewer than "
                f"max_model_len {max_model_len}"
            )


def leave_out_index(model: nn.Module) -> None:
    for module in list(model.modules()):
        if "indexer" in module._modules:
            module.__class__ = type(type(module).__name__, (_WithIndex, type(module)), {})
            if (indexer := module._modules["indexer"]) is not None:
                name = type(indexer).__name__
                indexer.__class__ = type(name, (_ChoosesAll, type(indexer)), {})


class _ChoosesAll(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states.new_empty(0, dtype=torch.int32)


class _WithIndex(nn.Module):
    """Attention that slices its mask by the index; without a mask it gets an empty one."""

    def forward(self, *args: Any, **named: Any) -> Any:
        if named.get("attention_mask") is None:
            named["attention_mask"] = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
        return super().forward(*args, **named)

"""The engine's interface to a model: one forward pass over the step's tokens, whatever they are.

A model knows no sequences, pages, batches or sampling. It never waits for the device, and its
shapes depend only on the number of tokens, so a step may be captured in a CUDA graph; where a
backend cannot be captured, the graph breaks at `attend`, called exactly once per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from asyncllm.attention.base import AttentionLayer, Mixer
from asyncllm.kernels.recurrent.records import StateLayer


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """One tensor of a checkpoint, or a slice of it, and the view of a weight that it fills.

    The file's tensor has the view's shape and dtype (any float for a float), unless `file_shape`
    and `file_dtype` differ. `part` has a slice for each of its first dimensions, without
    steps: a shard reads its own bytes only. `transform` makes the view's contents of what was read,
    which is on the view's device and may not be written to; it fills `others` itself, where one
    tensor of a file makes several. It raises `ValueError` in the words that follow the name.
    """

    name: str
    view: torch.Tensor
    part: tuple[slice, ...] = ()
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    file_shape: tuple[int, ...] | None = None
    file_dtype: torch.dtype | None = None
    others: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes that it fills."""
        return self.view.nbytes + sum(other.nbytes for other in self.others)


class TokenInputs(NamedTuple):
    """One step's tokens: int32 or int64 [T] each."""

    ids: torch.Tensor
    positions: torch.Tensor  # below max_model_len
    prompt_lens: torch.Tensor | None = None  # of each token's sequence, where the model uses them


class CausalLM(Protocol):
    """A decoder with its weights on one device. T is the number of tokens in the step."""

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """In order; `layer.index` is the place in this list."""
        ...

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The states that recurrent layers keep; `layer.index` is the place in this list."""
        ...

    @property
    def uses_prompt_lens(self) -> bool:
        """`forward` needs `prompt_lens`, as KV depends on the length of the prompt."""
        ...

    @property
    def full_read_tokens(self) -> int:
        """A step of so many different tokens reads all weights, but for a rare expert; 1 without
        experts."""
        ...

    @property
    def aliases(self) -> Mapping[str, str | None]:
        """Names a checkpoint may hold besides those of `loads`, each a copy of another; None: of
        what the model does not use."""
        ...

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden_size], for `compute_logits`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] in the model's dtype, of the rows that sample."""
        ...

    def loads(self) -> Iterator[Load]:
        """All that fills the weights, each element of them exactly once."""
        ...

    def finish_loading(self) -> None:
        """To be called when all `loads` are done, again after each reload."""
        ...

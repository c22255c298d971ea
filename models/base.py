"""The engine's interface to a model: one forward pass over the tokens of a step.

A model does not know sequences, pages, batches or sampling. It never waits for the device, and its
shapes depend only on the number of tokens, so CUDA graphs can capture it. If attention cannot be
captured, a graph breaks at `attend`, which is called once per layer.
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
    """A tensor of a checkpoint, or a slice of it, and the view of a weight that it fills.

    file_shape, file_dtype: of the file's tensor; default: those of the view (any float dtype for a
    float). part: slices of its first dimensions, without steps; a shard only reads its own bytes.
    transform: converts what was read, on the view's device and read-only, to the view's contents.
    It also fills `others`, if one tensor of a file makes several. Raises `ValueError` with a
    message that continues after the tensor's name.
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
        """The bytes of the views that it fills."""
        return self.view.nbytes + sum(other.nbytes for other in self.others)


class TokenInputs(NamedTuple):
    """The tokens of a step: int32 or int64 [T] each."""

    ids: torch.Tensor
    positions: torch.Tensor  # below max_model_len
    prompt_lens: torch.Tensor | None = None  # of each token's sequence, if the model uses them


class CausalLM(Protocol):
    """A decoder with its weights on a device. T is the number of tokens in the step."""

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """All attention layers, in order; `layer.index` is the index in this list."""
        ...

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """All recurrent states, in order; `layer.index` is the index in this list."""
        ...

    @property
    def uses_prompt_lens(self) -> bool:
        """Whether `forward` needs `prompt_lens`, because KV depends on the prompt's length."""
        ...

    @property
    def full_read_tokens(self) -> int:
        """The number of different tokens at which a step reads nearly all weights; 1 without
        experts."""
        ...

    @property
    def aliases(self) -> Mapping[str, str | None]:
        """Tensors that a checkpoint may have besides those of `loads`: name -> the tensor that it
        must equal, or None for one that the model does not use."""
        ...

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden_size], for `compute_logits`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows that sample: [S, hidden_size] -> [S, vocab_size], in the model's dtype."""
        ...

    def loads(self) -> Iterator[Load]:
        """The loads that fill the weights, each element exactly once."""
        ...

    def finish_loading(self) -> None:
        """To be called when all `loads` are done, and again after each reload."""
        ...

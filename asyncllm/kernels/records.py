"""Records that kernels take: tensors under their names, and the constants of one layer.

The floors above pass these on; attention/base.py and models/layers/ops.py say what is done to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

# The least logit of a token that a mask allows: whatever else forbids it (bad words, min_tokens), a
# grammar's only token stays possible. Far from what float32 can hold, because a small temperature
# multiplies it.
LEAST_LOGIT = -1e30


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMSNorm over each head of q and of k, before the rotation. Weights: [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary embedding of one step, NeoX style: entry i of a head pairs with i + head_dim / 2.

    rows: int32 or int64 [tokens], each token's row of cos_sin: float32 [rows, head_dim], the
    cosines in the first half, the sines in the second.
    """

    rows: torch.Tensor
    cos_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention. `window` counts the tokens seen, itself included.

    soft_cap: scores become soft_cap * tanh(scores / soft_cap). sinks: [num_heads], a score of each
    head that takes part in the softmax and has no value. slopes: float32 [num_heads]: to each score
    is added the head's slope times key position minus query position (ALiBi). latent_dim: there is
    one KV head, a latent vector of which q's heads see all of head_dim as their key and the first
    latent_dim entries as their value (MLA, with the projections from the latent to keys and values
    done on q and on the output); pages hold it once. The output's entries behind latent_dim mean
    nothing.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    head_norm: HeadNorm | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    latent_dim: int | None = None


class RotatedHeads(NamedTuple):
    """Heads of q, k and v that are normalised and rotated: [tokens, heads, dim], strided as may be.

    There may be fewer than the layer's, and smaller ones: zeros fill them up. More KV heads come
    behind the others, more query heads behind those of each KV head, more dimensions behind.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


# One step's attention, bound to its batch. Of [tokens, num_heads + 2 * num_kv_heads, head_dim],
# contiguous: the heads of q, of k, of v; may be overwritten. Or of rotated heads, without a
# rotation. Returns [tokens, num_heads * head_dim].
Attend = Callable[[AttentionLayer, torch.Tensor | RotatedHeads, Rotation | None], torch.Tensor]
# The same by kernels that begin with the projection: of heads that are not rotated.
AttendProjected = Callable[[AttentionLayer, torch.Tensor, Rotation], torch.Tensor]
# Attention of one layer over a mixed step's rows, from its q to its out (see `mixed`).
AttendRows = Callable[[AttentionLayer], None]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, on the device. Padding rows have table 0 and position 0.

    In a graph of whole mixed steps (`StepAttention`) a row may be no request's: its position is -1.
    """

    block_tables: tuple[torch.Tensor, ...]  # by cache group: int32 [rows, pages per sequence]
    positions: torch.Tensor  # int32 [rows]
    max_len: int | None = None  # longest context, where the host knows it (not under capture)

    def write_slots(self, block_size: int) -> list[torch.Tensor]:
        """By group, int64 [rows]: the flat position page * block_size + offset of each row's token
        in the cache."""
        positions = self.positions.long()
        blocks, offsets = (positions // block_size).unsqueeze(1), positions % block_size
        pages = [table.gather(1, blocks).squeeze(1) for table in self.block_tables]
        return [page.long() * block_size + offsets for page in pages]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The constants of one RMSNorm. weight: [size]. `centered`: of what is less its mean, which
    makes it a layer norm without bias.

    In the model's dtype the weight multiplies what was rounded to it, as Llama's does; in float32
    before the rounding, as that of Gemma (which holds 1 + weight here) and OLMo. in_bytes: the
    norm's only product takes many rows quantised, in this type, e4m3 or int8.
    """

    weight: torch.Tensor
    eps: float
    centered: bool = False
    in_bytes: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A norm's output [T, size], or one whose last factor is still to come.

    The factor is one number per token, so the product of one token applies it to its result and the
    norm needs no pass of its own: with `squares` the output is

        values * rsqrt(squares.sum(1, keepdim=True) / size + eps)

    in_bytes: the values as `Norm.in_bytes`, and each row's scale, float32 [T, 1].
    """

    values: torch.Tensor
    squares: torch.Tensor | None = None  # float32 [T, parts], of the norm's input
    eps: float = 0.0
    in_bytes: tuple[torch.Tensor, torch.Tensor] | None = None

    def whole(self) -> torch.Tensor:
        """The output itself, for who does not apply the factor later."""
        if self.squares is None:
            return self.values
        mean = self.squares.sum(1, keepdim=True) / self.values.shape[1]
        return (self.values * (mean + self.eps).rsqrt()).to(self.values.dtype)


@dataclass(frozen=True, slots=True)
class Activation:
    """activation(gate) * up. clamped: gate at most `limit` and up within +-`limit`, then
    gate * sigmoid(alpha * gate) * (up + 1)."""

    name: Literal["silu", "gelu_tanh", "clamped"]
    limit: float = 0.0
    alpha: float = 1.0


SILU = Activation("silu")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts and their gates.

    score: of each expert, from its logit; "top_softmax" is the softmax over those taken alone.
    renormalise: the gates' sum is 1, before `scale` multiplies them.
    Of `num_groups` groups of experts only the best `top_groups` count: by the sum of their two best
    scores, or the best one where `group_score` is "max".
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["two", "max"] = "two"
    least_sum: float = 0.0  # added to the sum that renormalises


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """A rank's experts, where ranks divide them by number: those from `first` on, of `num_all`."""

    first: int
    num_all: int


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The experts of each token, all different, and what they count. `own`: only some of the
    experts are here, and the others add nothing; ids count all of them, and those of padding may be
    the number of all experts, which nobody has."""

    ids: torch.Tensor  # int64 or int32 [T, k], else below the number of all experts
    gates: torch.Tensor  # float32 [T, k]
    own: ExpertRange | None = None

    @property
    def first_expert(self) -> int:
        """The first of those that are here."""
        return 0 if self.own is None else self.own.first


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One layer's experts in the model's dtype: down(activation(gate(x)) * up(x)) each."""

    gate_up: torch.Tensor  # [experts, 2 * size, hidden_size], the gates before the ups
    down: torch.Tensor  # [experts, hidden_size, size]
    gate_up_bias: torch.Tensor | None  # [experts, 2 * size]
    down_bias: torch.Tensor | None  # [experts, hidden_size]
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class WholeWeights:
    """Matrices of all adapter slots that take the base's place for some features of a product,
    from `first` on."""

    is_there: torch.Tensor  # [slots, 1]: 1 of slots that have one, else 0
    weight: torch.Tensor  # [slots, features, in]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class LoRAWeights:
    """Hold what all adapter slots have of a linear layer; see models/layers/lora.py. Of an
    embedding `a` lies transposed: [slots, tokens, max_rank]."""

    a: torch.Tensor  # [slots, parts * max_rank, in]
    b: torch.Tensor  # [slots, out, max_rank]
    bias: torch.Tensor  # [slots, out]
    gain: torch.Tensor  # [slots, out]
    sizes: tuple[int, ...]  # of each part, in output features
    index: int  # of the layer, among those that have adapters
    whole: tuple[WholeWeights, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The rows of one pass, gathered by their slots into tiles that each have one.

    A kind is 0 where a tile's slot has nothing of a layer; 2 * slot where it has matrices, and one
    more where it has biases or gains, too.
    """

    slots: torch.Tensor  # int64 [T], of each row
    rows: torch.Tensor  # int32 [tiles, rows of a tile]; behind them -1
    tiles: torch.Tensor  # int32 [layers, tiles]: the kinds


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a step, on the device."""

    of_row: torch.Tensor  # int32 [rows]: each row's place in `bits`, or NO_MASK
    bits: torch.Tensor  # int32 [masked, ceil(V / 32)]


class SlotState(Protocol):
    """The tensors of `DeviceState` that kernels read and write; dtypes and shapes there."""

    last_tokens: torch.Tensor
    positions: torch.Tensor
    prompt_lens: torch.Tensor
    block_tables: torch.Tensor
    float_params: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    adapters: torch.Tensor
    seeds: torch.Tensor
    output_counts: torch.Tensor

    @property
    def penalties(self) -> tuple[torch.Tensor, ...]: ...

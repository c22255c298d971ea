"""Attention of transformers' model code, by a registered attention function of ours.

Before a model has weights it runs once on the meta device. This trial records, for each layer,
which module calls attention with which heads, scale, window, soft cap and sinks. It refuses all
that paged attention would not compute exactly: masks that are neither causal nor a sliding window,
and unknown arguments. Windows are taken from the masks that the model requests from transformers,
which its eager attention obeys, and not from arguments.

All pages have one shape, so heads are padded with zeros to the largest shape: more KV heads, more
query heads per KV head, and a larger head_dim (also of V). Zeros do not change scores, and the
padding of the output is removed. q and k arrive rotated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from asyncllm.attention.base import AttentionLayer, HeadNorm, Mixer, RotatedHeads, Rotation
from asyncllm.models.layers.build import Build
from asyncllm.models.transformers_rope import HANDLER, StepRotary

RUN, TRIAL = "asyncllm", "asyncllm_trial"  # attention implementations: without and with masks
LAYER = "asyncllm_layers"  # the attribute of modules that attend: an `AttentionLayer` per call
FAR = 1 << 30  # a position beyond all windows
# Arguments that do not matter for packed causal self-attention without a mask.
HARMLESS = {
    "cache_position", "dropout", "layer_idx", "logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip


Rotations = dict[StepRotary | None, Rotation]  # None: for layers that do not rotate


class Unservable(Exception):
    """Why a model is refused: the end of a sentence that begins with its class."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """A layer's attention, as its model calls it."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str | None  # name of the module's parameter
    slopes: torch.Tensor | None  # float32 [num_heads], on the CPU


class Trial:
    """Records the attention calls of a forward pass on the meta device."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.calls: list[AttentionCall] = []

    def attention(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if q.shape[2] != k.shape[2]:
            raise Unservable(
                f"gives {type(module).__name__} {k.shape[2]} keys, {q.shape[2]} queries"
            )
        is_causal = others.pop("is_causal", None)
        is_causal = is_causal is not False and getattr(module, "is_causal", True)
        if mask is None and not is_causal:  # else the mask is checked
            raise Unservable(f"has attention that is not causal in {type(module).__name__}")
        for name, value in others.items():
            if isinstance(value, torch.Tensor) and not value.numel():
                continue  # it has no effect
            if name not in HARMLESS and value is not None and value is not False:
                what = "a tensor" if isinstance(value, torch.Tensor) else repr(value)[:60]
                raise Unservable(f"passes {name} ({what}) to attention in {type(module).__name__}")
        window = self._window(mask, sliding_window)
        self.calls.append(
            AttentionCall(
                module,
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=q.shape[3],
                v_dim=v.shape[3],
                scale=float(q.shape[3] ** -0.5 if scaling is None else scaling),
                window=window if window is not None and window < self.max_model_len else None,
                soft_cap=None if not softcap else float(softcap),
                sinks=None if s_aux is None else _parameter_name(module, s_aux),
                slopes=slopes,
            )
        )
        return v.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def _window(self, mask: torch.Tensor | None, sliding_window: int | None) -> int | None:
        if mask is None:  # the model relies on the argument
            return sliding_window
        made = getattr(mask, HANDLER, None) or getattr(mask._base, HANDLER, None)
        if made is None:
            raise Unservable("makes a mask of its own")
        function, size = made
        return self._window_of(function, size)

    def _window_of(self, function: Callable[..., Any], size: int | None) -> int | None:
        """The window of transformers' mask function, found by calling it for some pairs."""

        def sees(query: int, key: int) -> bool:
            return bool(function(0, 0, torch.tensor(query), torch.tensor(key)))

        try:
            if sees(1, 2):
                raise Unservable("has attention that is not causal")
            if sees(FAR, 0):
                return None
            if size is not None:
                starts = (FAR, FAR + 1, FAR + size // 2)
                if all(sees(q, q - size + 1) and not sees(q, q - size) for q in starts):
                    return size
        except (RuntimeError, IndexError):  # it depends on tensors without values
            pass
        if size is not None and size >= self.max_model_len:
            return None
        raise Unservable(
            f"has a mask that is no sliding window (chunked attention?) of {size} tokens, fewer "
            f"than max_model_len {self.max_model_len}"
        )


class HeadShape(NamedTuple):
    """The padded shape of heads in all layers: the largest of all calls."""

    num_kv_heads: int
    group: int  # query heads of one KV head
    head_dim: int

    @classmethod
    def of(cls, calls: Sequence[AttentionCall], build: Build) -> HeadShape:
        if not calls:  # all layers are recurrent
            return cls(1, 1, 2)
        largest = max(max(call.head_dim, call.v_dim) for call in calls)
        largest += largest % 2  # a rotation has pairs
        return cls(
            num_kv_heads=max(call.num_kv_heads for call in calls),
            group=max(call.num_heads // call.num_kv_heads for call in calls),
            head_dim=build.page_dim(largest),
        )

    def is_of(self, call: AttentionCall) -> bool:
        """Whether the call's heads need no padding."""
        heads = call.num_kv_heads, call.num_heads // call.num_kv_heads
        return (*heads, call.head_dim) == self and call.v_dim == self.head_dim


class Step:
    """The current step, as far as attention needs it: set for each forward pass."""

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        shape: HeadShape,
        head_norm: Callable[[AttentionCall], HeadNorm | None],
    ) -> None:
        self.mixer: Mixer | None = None
        self.rotations: Rotations = {}
        self.positions: torch.Tensor | None = None  # int64 [T]
        self.shape = shape
        self._calls: Counter[nn.Module] = Counter()  # calls in this forward pass
        self._padded: list[tuple[AttentionCall, torch.Tensor, torch.Tensor]] = []  # sinks
        self.layers = [
            self._layer(index, call, head_norm(call)) for index, call in enumerate(calls)
        ]

    def begin(self, mixer: Mixer, positions: torch.Tensor, rotations: Rotations) -> None:
        self.mixer, self.positions, self.rotations = mixer, positions.long(), rotations
        self._calls.clear()

    def _layer(self, index: int, call: AttentionCall, norm: HeadNorm | None) -> AttentionLayer:
        num_kv_heads, group, head_dim = self.shape
        return AttentionLayer(
            index=index,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=call.scale,
            window=call.window,
            head_norm=norm,
            soft_cap=call.soft_cap,
            sinks=None if call.sinks is None else self._sinks(call),
            slopes=None if call.slopes is None else self._slopes(call, call.slopes),
        )

    def _sinks(self, call: AttentionCall) -> torch.Tensor:
        sinks = call.module.get_parameter(str(call.sinks))
        padded = self._of_all_heads(call, sinks)
        if padded is not sinks:
            self._padded.append((call, sinks, padded))
        return padded

    def _slopes(self, call: AttentionCall, slopes: torch.Tensor) -> torch.Tensor:
        device = next(call.module.parameters()).device
        return self._of_all_heads(call, slopes.to(device))

    def _of_all_heads(self, call: AttentionCall, of_heads: torch.Tensor) -> torch.Tensor:
        """Pad a value per head with zeros: [the call's heads] -> [the layer's heads]."""
        num_kv_heads, group, _ = self.shape
        if len(of_heads) == num_kv_heads * group:
            return of_heads
        of_groups = of_heads.unflatten(0, (call.num_kv_heads, -1))
        more = (0, group - of_groups.shape[1], 0, num_kv_heads - call.num_kv_heads)
        return F.pad(of_groups, more).flatten()

    def finish_loading(self) -> None:
        """Copy loaded sinks to the layers' padded copies."""
        for call, sinks, padded in self._padded:  # in place, as graphs have their addresses
            padded.copy_(self._of_all_heads(call, sinks))

    def attention(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **others: Any,
    ) -> torch.Tensor:
        """[1, T, heads, v_dim] from q [1, heads, T, dim], k and v [1, kv_heads, T, dim]."""
        assert self.mixer is not None
        layers: list[AttentionLayer] = getattr(module, LAYER)
        layer = layers[self._calls[module] % len(layers)]
        self._calls[module] += 1
        rotated = RotatedHeads(*(x[0].transpose(0, 1) for x in (q, k, v)))
        out = self.mixer.attend(layer, rotated, None)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        heads = out.view(1, -1, *self.shape)
        found = heads[:, :, :kv_heads, :group, : v.shape[3]].flatten(2, 3)
        return found if len(layers) == 1 else found.clone()  # the next call overwrites it


def _parameter_name(module: nn.Module, tensor: torch.Tensor) -> str:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is tensor:
            return name
    raise Unservable(f"has sinks that are no parameter of {type(module).__name__}")


def _attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; see its `AttentionInterface`."""
    handler: Trial | Step = getattr(module, HANDLER)
    return handler.attention(module, q, k, v, attention_mask, **arguments), None


def _trial_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **others: Any
) -> torch.Tensor:
    """A mask without contents, which has the mask function as an attribute."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, HANDLER, (mask_function, others.get("local_size")))
    return mask


AttentionInterface.register(RUN, _attention)
AttentionInterface.register(TRIAL, _attention)
AttentionMaskInterface.register(TRIAL, _trial_mask)

"""Attention of transformers classes that predate its attention functions.

Their modules multiply q by k, add a mask, apply the softmax and multiply by v with torch functions.
While such a module runs, its first product of two activations becomes `Scores`. These record
scaling and biases that grow with the distance (ALiBi) but compute nothing, and their product with
the values calls our attention. Masks are not examined: each class was compared with its own
`generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from asyncllm.models.transformers_attention import Unservable
from asyncllm.models.transformers_rope import HANDLER

LEGACY = frozenset(
    {
        "BigBirdForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "FalconForCausalLM",
        "GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM", "GitForCausalLM",
        "MegatronBertForCausalLM", "MptForCausalLM", "MvpForCausalLM", "OpenAIGPTLMHeadModel",
        "RemBertForCausalLM", "RoFormerForCausalLM", "TrOCRForCausalLM", "XGLMForCausalLM",
    }
)  # fmt: skip
# Encoders, unless is_decoder is set.
ENCODERS = frozenset(
    {
        "BigBirdForCausalLM", "MegatronBertForCausalLM", "RemBertForCausalLM",
        "RoFormerForCausalLM",
    }
)  # fmt: skip
SLOPES = "asyncllm_slopes"  # the attribute of modules with ALiBi
PRODUCTS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm}
DIVISIONS = {torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.__itruediv__}
MULTIPLICATIONS = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__imul__}
SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}
KEEPING = {F.softmax, F.dropout, torch.max, torch.where, torch.softmax}  # our attention does these


def check_legacy(architecture: str, config: Any) -> None:
    """Raise `Unservable` if a class of LEGACY would compute something else."""
    is_decoder = getattr(config, "is_decoder", None)
    if is_decoder is False or (is_decoder is None and architecture in ENCODERS):
        raise Unservable(f"has is_decoder {is_decoder!r}")
    if getattr(config, "attention_type", "original_full") != "original_full":
        raise Unservable(f"has attention_type {config.attention_type!r}")


class Scores:
    """A module's scores, q @ k, before or after the softmax."""

    def __init__(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor) -> None:
        """q [..., T, dim], k [..., dim, T]."""
        self._module, self._q, self._k = module, q, k
        self._scale = 1.0
        self._slope_scale: float | None = None  # None: no slopes are added
        self.shape = torch.Size((*q.shape[:-1], k.shape[-1]))
        self.dtype, self.device = q.dtype, q.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        scores = next(each for each in args if isinstance(each, Scores))
        other: Any = next((each for each in args if each is not scores), None)
        if function in PRODUCTS:
            return scores._attend(other)
        if function in DIVISIONS:
            return scores / other
        if function in MULTIPLICATIONS:
            return scores * other
        if function in SUMS:
            return scores + other
        if function in KEEPING:
            return scores
        raise Unservable(f"does {getattr(function, '__name__', function)} to its scores")

    def __truediv__(self, other: Any) -> Scores:
        return self._scaled(1 / float(other))

    def __mul__(self, other: Any) -> Scores:
        if isinstance(other, torch.Tensor) and other.dim():  # a mask of zeros and ones
            return self + other
        return self._scaled(float(other))

    def _scaled(self, factor: float) -> Scores:
        self._scale *= factor
        if self._slope_scale is not None:
            self._slope_scale *= factor
        return self

    def __add__(self, mask: Any) -> Scores:
        """Add a mask, or a bias per head: once, as Falcon's mask has the same biases again."""
        if mask.dim() > 2 and mask.shape[-3] != 1:
            if getattr(self._module, SLOPES, None) is None:
                raise Unservable("adds a bias of each head to its scores")
            self._slope_scale = self._slope_scale or 1.0
        return self

    __radd__, __itruediv__, __imul__, __iadd__ = __add__, __truediv__, __mul__, __add__

    def __matmul__(self, values: torch.Tensor) -> torch.Tensor:
        """By torch, which calls `__torch_function__` without `_Products`: our attention multiplies
        activations, too."""
        return torch.matmul(self, values)  # type: ignore[arg-type]

    def _attend(self, values: torch.Tensor) -> torch.Tensor:
        """The attention output, with the dimensions of `values`."""
        heads = [x if x.dim() == 4 else x[None] for x in (self._q, self._k.mT, values)]
        q, k, v = (x.to(values.dtype) for x in heads)
        out: torch.Tensor = getattr(self._module, HANDLER).attention(
            self._module, q, k, v, None, scaling=self._scale,
            sliding_window=_window(self._module), slopes=self._slopes(),
        )  # fmt: skip
        return out.transpose(1, 2).reshape(*self.shape[:-1], values.shape[-1])

    def _slopes(self) -> torch.Tensor | None:
        if self._slope_scale is None or self.device.type != "meta":  # only the trial needs them
            return None
        return torch.tensor(getattr(self._module, SLOPES)) * self._slope_scale

    def masked_fill(self, *_: Any) -> Scores:
        return self

    def view(self, *shape: int) -> Scores:
        self.shape = torch.Size(shape)
        return self

    reshape = view

    def to(self, dtype: torch.dtype) -> Scores:
        self.dtype = dtype
        return self

    def float(self) -> Scores:
        return self.to(torch.float32)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class _Products(TorchFunctionMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        are_activations = all(isinstance(x, torch.Tensor) and x.dim() > 2 for x in args[:2])
        if function in PRODUCTS and are_activations:
            return Scores(self._module, *args[:2])
        if function in (torch.baddbmm, torch.Tensor.baddbmm):
            return self._sum(*args, **(named or {}))
        return function(*args, **(named or {}))

    def _sum(
        self,
        bias: torch.Tensor,
        batch1: torch.Tensor,
        batch2: torch.Tensor,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> Scores:
        """baddbmm adds a bias per head; with beta 0, `bias` is uninitialised memory."""
        scores = Scores(self._module, batch1, batch2) * alpha
        return scores + bias if beta and getattr(self._module, SLOPES, None) is not None else scores


class _LegacyAttention(nn.Module):
    def forward(self, *args: Any, **named: Any) -> Any:
        with _Products(self):
            return super().forward(*args, **named)


def replace_attention(model: Any) -> None:
    """Replace the attention modules of a model of a LEGACY class."""
    slopes = _alibi_slopes(model)
    for module in list(_attention_modules(model)):
        module.__class__ = type(type(module).__name__, (_LegacyAttention, type(module)), {})
        setattr(module, SLOPES, slopes)


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that are named Attention."""
    for module in model.modules():
        named = [each for each in module.modules() if type(each).__name__.endswith("Attention")]
        if named == [module]:
            yield module


def _alibi_slopes(model: Any) -> list[float] | None:
    """The ALiBi slope of each head: what the class's own function adds per distance. None without
    ALiBi."""
    code, num_heads = sys.modules[type(model).__module__], model.config.num_attention_heads
    if hasattr(code, "build_mpt_alibi_tensor"):
        bias = code.build_mpt_alibi_tensor(num_heads, 2)
    elif hasattr(code, "build_alibi_tensor"):
        ones = torch.ones(1, 2, dtype=torch.int64)
        bias = code.build_alibi_tensor(ones, num_heads, torch.float32)
    else:
        return None
    slopes: list[float] = (bias[:, 0, 1] - bias[:, 0, 0]).tolist()
    return slopes


def _window(module: Any) -> int | None:
    """The window of GPT-Neo's local layers."""
    if getattr(module, "attention_type", None) != "local":
        return None
    window: int = module.config.window_size
    return window

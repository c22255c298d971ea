"""The Triton recurrences against torch's, of decodes, prompts and both in a step.

They run on a GPU, or without one under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.recurrence import run, tokens_of
from asyncllm.attention.state_cache import StateCache, StateLayout, TorchStates
from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
    StateLayer,
)

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"
    ),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
HEADS = 4 if INTERPRETED else 32
DIM = 24 if INTERPRETED else 128
STATE = 12 if INTERPRETED else 128
WIDTHS = (3, 4)
NUM_SLOTS = 8
CHUNKS = [(17, [16]), (1, []), (2, [2]), (3, [1]), (1, [1]), (7, [1, 6])]  # tokens, snapshots


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """A view with strides, as what is split off a projection."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator, device=DEVICE)
    return wide.to(dtype)[..., : shape[-1]]


def flat(num_tokens: int, *shape: int) -> torch.Tensor:
    return randn(num_tokens, int(np.prod(shape))).unflatten(1, shape)


def convolution(tokens: int, width: int) -> Convolution:
    channels = HEADS * DIM + 5
    return Convolution(
        randn(tokens, channels), randn(channels, width), randn(1, channels)[0], silu=width == 4
    )


def mamba2(tokens: int) -> SelectiveScan:
    dt = randn(tokens, HEADS, dtype=torch.float32).exp() * 0.1
    a, d = -randn(1, HEADS, dtype=torch.float32)[0].exp(), randn(1, HEADS)[0].contiguous()
    b, c = flat(tokens, 2, STATE), flat(tokens, 2, STATE).flip(0)
    return SelectiveScan(flat(tokens, HEADS, DIM), dt, a, b, c, d)


def mamba(tokens: int) -> SelectiveScan:
    channels = HEADS * DIM
    dt = randn(tokens, channels, dtype=torch.float32).exp() * 0.1
    a = -randn(channels, 16, dtype=torch.float32).exp()
    b, c = flat(tokens, 1, 16), flat(tokens, 1, 16).flip(0)
    return SelectiveScan(flat(tokens, channels, 1), dt, a, b, c, None)


def delta_rule(tokens: int, by_row: bool) -> DeltaRule:
    q, k = (flat(tokens, 2, STATE).float() for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k.flip(0)))
    g = -randn(tokens, HEADS, *[STATE] * by_row, dtype=torch.float32).exp() * 0.1
    return DeltaRule(q, k, flat(tokens, HEADS, DIM), g, randn(tokens, HEADS).float().sigmoid())


MAKERS: dict[str, Any] = {
    **{f"conv{width}": lambda n, width=width: convolution(n, width) for width in WIDTHS},
    "mamba2": mamba2,
    "mamba": mamba,
    "delta": lambda n: delta_rule(n, by_row=False),
    "delta by row": lambda n: delta_rule(n, by_row=True),
}


def caches(inputs: Recurrence) -> tuple[StateCache, StateCache, StateLayer]:
    """Two with the same states, behind those of another layer."""
    dtype = inputs.x.dtype if isinstance(inputs, Convolution) else torch.float32
    layer = StateLayer(1, inputs.state_shape, dtype)
    layout = StateLayout([StateLayer(0, (5,), torch.bfloat16), layer])
    ours, theirs = (StateCache(layout, NUM_SLOTS + 3, DEVICE) for _ in range(2))
    states = randn(NUM_SLOTS + 2, *inputs.state_shape, dtype=torch.float32).to(dtype)
    for cache in (ours, theirs):
        cache.layers[1][1:] = states
    return ours, theirs, layer


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    limits = {"rtol": 1e-4, "atol": 1e-4}
    if ours.dtype == torch.bfloat16:
        limits = {"rtol": 2e-2, "atol": 2e-2}
    elif torch.bfloat16 == DTYPE:
        limits = {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(ours, theirs, **limits)


@pytest.mark.parametrize("name", MAKERS)
def test_decodes(name: str) -> None:
    from asyncllm.attention.triton_states import TritonStates

    slots = torch.tensor([3, 0, 1, 7, 0], dtype=torch.int32, device=DEVICE)
    inputs = MAKERS[name](len(slots))
    ours, theirs, layer = caches(inputs)
    found = TritonStates(ours).decode(slots)(layer, inputs)
    expected = TorchStates(theirs).decode(slots)(layer, inputs)
    check(found, expected)
    check(ours.layers[1], theirs.layers[1])
    assert not ours.layers[1][0].any() and not ours.layers[0].any()


@pytest.mark.parametrize("num_decodes", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_prompts_beside_decodes(name: str, num_decodes: int) -> None:
    """Prompts of 1, 11 and 2 tokens; of the second two snapshots, of the third one at its end."""
    from asyncllm.attention.triton_states import TritonStates

    slots = torch.tensor([5, 6], dtype=torch.int32, device=DEVICE)[:num_decodes]
    inputs = MAKERS[name](num_decodes + 14)
    prefills = PrefillRows(
        np.array([0, 1, 12, 14]),
        np.array([1, 20, 2]),
        np.zeros(4),
        np.zeros((1, 0)),
        np.array([2, 4, 1]),
        np.array([[1, 2, 8], [1, 9, 9], [2, 14, 10]]),
    )
    ours, theirs, layer = caches(inputs)
    found = TritonStates(ours).mixed(slots, prefills)(layer, inputs)
    expected = TorchStates(theirs).mixed(slots, prefills)(layer, inputs)
    check(found, expected)
    check(ours.layers[1], theirs.layers[1])
    assert not ours.layers[1][0].any() and not ours.layers[0].any()


@pytest.mark.parametrize("name", MAKERS)
def test_a_prompt_in_chunks_is_as_a_whole(name: str) -> None:
    """Chunks and pieces shorter than a convolution too, each beside a decode of another slot; a
    second sequence goes on from each snapshot."""
    from asyncllm.attention.triton_states import TritonStates

    slot, other, saved = 4, 5, NUM_SLOTS
    inputs = MAKERS[name](sum(num for num, _ in CHUNKS))
    cache, _, layer = caches(inputs)
    states, first = cache.layers[1], cache.layers[1][slot].clone()
    start, expected = 0, run(inputs, first)[0]
    for num_tokens, saves in CHUNKS:
        end, num_decodes = start + num_tokens, min(start, 1)
        decodes = torch.full((num_decodes,), other, dtype=torch.int32, device=DEVICE)
        rows = [[0, place, saved + i] for i, place in enumerate(saves)]
        prefills = prefill_of(num_tokens, slot, rows)
        recur = TritonStates(cache).mixed(decodes, prefills)
        found = recur(layer, tokens_of(inputs, slice(start - num_decodes, end)))
        check(found[num_decodes:], expected[start:end])
        check(states[slot], run(tokens_of(inputs, slice(end)), first)[1].to(states.dtype))
        for i, place in enumerate(saves):
            before = tokens_of(inputs, slice(start + place))
            check(states[saved + i], run(before, first)[1].to(states.dtype))
            if left := num_tokens - place:
                states[other] = states[saved + i]
                resume = TritonStates(cache).mixed(decodes[:0], prefill_of(left, other, []))
                check(resume(layer, tokens_of(inputs, slice(end - left, end))), found[-left:])
        start = end


def prefill_of(num_tokens: int, slot: int, saves: list[list[int]]) -> PrefillRows:
    """One row of a prompt; its pages are not used."""
    return PrefillRows(
        np.array([0, num_tokens]),
        np.array([num_tokens]),
        np.zeros(2),
        np.zeros((1, 0)),
        np.array([slot]),
        np.array(saves, np.int32).reshape(-1, 3),
    )


@pytest.mark.skipif(INTERPRETED, reason="nothing is captured")
def test_captured_decodes() -> None:
    from asyncllm.attention.triton_states import TritonStates

    inputs = delta_rule(4, by_row=False)
    ours, theirs, layer = caches(inputs)
    slots = torch.tensor([3, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    recur = TritonStates(ours).decode(slots)
    recur(layer, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = recur(layer, inputs)
    slots.copy_(torch.tensor([5, 6, 7, 0], dtype=torch.int32))
    graph.replay()
    expected = TorchStates(theirs).decode(slots)(layer, inputs)
    check(found, expected)
    check(ours.layers[1][5:8], theirs.layers[1][5:8])

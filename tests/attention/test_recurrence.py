"""The recurrences in torch against transformers' own, whole, in pieces and side by side; and the
memory of their states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.recurrence import CHUNK, run, run_by_token, step, tokens_of
from asyncllm.attention.state_cache import (
    MAX_COPIED_BYTES,
    StateCache,
    StateLayout,
    TorchStates,
)
from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
    StateLayer,
)
from asyncllm.step_plan import StateMoves

CPU = torch.device("cpu")
NUM_TOKENS = 11
HEADS, DIM, STATE = 4, 6, 5
LONG = 3 * CHUNK + 5  # tokens


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def convolution() -> Convolution:
    return Convolution(randn(NUM_TOKENS, 7), randn(7, 4), randn(7), silu=True)


def mamba2() -> SelectiveScan:
    x, dt = randn(NUM_TOKENS, HEADS, DIM), randn(NUM_TOKENS, HEADS).exp()
    b, c = randn(NUM_TOKENS, 2, STATE), randn(NUM_TOKENS, 2, STATE).flip(0)
    return SelectiveScan(x, dt, -randn(HEADS).exp(), b, c, randn(HEADS))


def mamba() -> SelectiveScan:
    x, dt = randn(NUM_TOKENS, HEADS, 1), randn(NUM_TOKENS, HEADS).exp()
    b, c = randn(NUM_TOKENS, 1, STATE), randn(NUM_TOKENS, 1, STATE).flip(0)
    return SelectiveScan(x, dt, -randn(HEADS, STATE).exp(), b, c, randn(HEADS))


def delta_rule() -> DeltaRule:
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in randn(2, NUM_TOKENS, 2, STATE))
    g, beta = -randn(NUM_TOKENS, HEADS).exp(), randn(NUM_TOKENS, HEADS).sigmoid()
    return DeltaRule(q, k, randn(NUM_TOKENS, HEADS, DIM), g, beta)


def delta_rule_by_row() -> DeltaRule:
    return delta_rule()._replace(g=-randn(NUM_TOKENS, HEADS, STATE).exp())


ALL = [convolution, mamba2, mamba, delta_rule, delta_rule_by_row]


def zeros(inputs: Recurrence) -> torch.Tensor:
    return torch.zeros(inputs.state_shape)


def test_equal_to_transformers() -> None:
    conv = convolution()
    theirs = causal_conv1d_fn(conv.x.T[None], conv.weight, conv.bias, activation="silu")[0].T
    torch.testing.assert_close(run(conv, zeros(conv))[0], theirs)
    scan = mamba2()
    args = scan.x[None], scan.dt[None], scan.a, scan.b[None], scan.c[None]
    theirs, state = mamba2_chunk_scan(*args, chunk_size=4, D=scan.d, return_final_states=True)
    ours = run(scan, zeros(scan))
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], state[0])
    one = mamba()
    args = (
        one.x[None, ..., 0].mT,
        one.dt[None].mT,
        one.a,
        one.b[None, :, 0].mT,
        one.c[None, :, 0].mT,
    )
    torch.testing.assert_close(
        run(one, zeros(one))[0][..., 0], mamba_selective_scan(*args, D=one.d)[0].T
    )
    rule = delta_rule()
    heads: Any = (x.repeat_interleave(2, dim=1)[None] for x in (rule.q * STATE**0.5, rule.k))
    theirs, state = torch_chunk_gated_delta_rule(
        *heads, rule.v[None], rule.g[None], rule.beta[None], chunk_size=4, output_final_state=True
    )
    ours = run(rule, zeros(rule))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], state[0], rtol=1e-4, atol=1e-5)


def long_scan(scale: float) -> SelectiveScan:
    """Its decays' logarithms of about -`scale`."""
    x, dt = randn(LONG, HEADS, DIM), randn(LONG, HEADS).exp()
    b, c = randn(LONG, 2, STATE), randn(LONG, 2, STATE).flip(0)
    return SelectiveScan(x, dt, -scale * randn(HEADS).exp(), b, c, randn(HEADS))


def long_rule(scale: float, same_key: bool) -> DeltaRule:
    """same_key: all tokens want the same place, which makes the system as coupled as it can be."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in randn(2, LONG, 2, STATE))
    if same_key:
        k = k[:1].expand_as(k)
    g, beta = -scale * randn(LONG, HEADS).exp(), (3 * randn(LONG, HEADS)).sigmoid()
    return DeltaRule(q, k, randn(LONG, HEADS, DIM), g, beta)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e4, float("inf")])
@pytest.mark.parametrize("kind", ["scan", "rule", "coupled rule"])
def test_chunks_are_what_token_by_token_is(kind: str, scale: float) -> None:
    inputs = long_scan(scale) if kind == "scan" else long_rule(scale, kind == "coupled rule")
    start = randn(*inputs.state_shape)
    for num_tokens in (1, CHUNK - 1, CHUNK, LONG):
        some = tokens_of(inputs, slice(num_tokens))
        (out, end), (by_token, state) = run(some, start), run_by_token(some, start)
        torch.testing.assert_close(
            out, by_token, rtol=1e-5, atol=1e-5 * float(by_token.abs().max())
        )
        torch.testing.assert_close(end, state, rtol=1e-5, atol=1e-5 * float(state.abs().max()))
    assert not out.isnan().any() and torch.equal(start, randn(*inputs.state_shape))


@pytest.mark.parametrize("make", ALL)
def test_pieces_and_steps_are_the_whole(make: Any) -> None:
    inputs = make()
    whole, end = run(inputs, zeros(inputs))
    state, outputs = zeros(inputs), []
    for rows in (slice(0, 3), slice(3, 8), slice(8, NUM_TOKENS)):
        out, state = run(tokens_of(inputs, rows), state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), whole)
    torch.testing.assert_close(state, end)
    states = torch.stack([zeros(inputs), end])  # each token by itself, from another state
    out, moved = step(tokens_of(inputs, slice(0, 2)), states)
    for i in range(2):
        alone = run(tokens_of(inputs, slice(i, i + 1)), states[i])
        torch.testing.assert_close(out[i : i + 1], alone[0])
        torch.testing.assert_close(moved[i], alone[1])


@pytest.mark.parametrize("make", ALL)
def test_rows_of_a_step_are_apart(make: Any) -> None:
    """A decode of slot 3; a prompt in slot 1 with a snapshot; one of slot 2 that goes on."""
    inputs = make()
    layer = StateLayer(1, inputs.state_shape, torch.float32)
    layout = StateLayout([StateLayer(0, (3,), torch.bfloat16), layer])
    cache = StateCache(layout, num_rows=6, device=CPU)
    states = cache.layers[1]
    states[2:4] = before = randn(2, *inputs.state_shape)
    prefills = PrefillRows(
        np.array([0, 6, 10]), np.array([6, 9]), np.zeros(3), np.zeros((1, 0)), np.array([1, 2]),
        np.array([[0, 4, 5]]),
    )  # fmt: skip
    out = TorchStates(cache).mixed(torch.tensor([3]), prefills)(layer, inputs)
    pieces = ((slice(0, 1), before[1], 3), (slice(1, 7), zeros(inputs), 1),
              (slice(7, 11), before[0], 2))  # fmt: skip
    for rows, start, slot in pieces:
        expected, moved = run(tokens_of(inputs, rows), start)
        torch.testing.assert_close(out[rows], expected)
        torch.testing.assert_close(states[slot], moved)
    snapshot = run(tokens_of(inputs, slice(1, 5)), zeros(inputs))[1]
    torch.testing.assert_close(states[5], snapshot)
    assert not cache.layers[0].any() and not states[0].any() and not states[4].any()


def test_padding_rows_leave_zeros() -> None:
    inputs = mamba2()
    layer = StateLayer(0, inputs.state_shape, torch.float32)
    cache = StateCache(StateLayout([layer]), 2, CPU)
    TorchStates(cache).decode(torch.zeros(NUM_TOKENS, dtype=torch.int32))(layer, inputs)
    assert not cache.layers[0].any()


@pytest.mark.parametrize("most_bytes", [1, MAX_COPIED_BYTES])
def test_moves(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.attention.state_cache.MAX_COPIED_BYTES", most_bytes)
    layer = StateLayer(0, (2,), torch.float32)
    cache = StateCache(StateLayout([layer]), 5, CPU, host_rows=1)
    states = cache.layers[0]
    states[1:] = torch.arange(1.0, 5)[:, None]
    cache.before_step(StateMoves(swap_out=((1, 0),), restore=((4, 1), (0, 3))))
    assert states[:, 0].tolist() == [0, 4, 2, 0, 4]
    cache.before_step(StateMoves(save=((1, 4), (2, 3)), restore=((0, 1), (3, 2))))
    assert states[:, 0].tolist() == [0, 0, 2, 2, 4]
    cache.before_step(StateMoves(swap_in=((0, 2),)))
    cache.after_step(StateMoves(fork=((2, 3),)))
    assert states[:, 0].tolist() == [0, 0, 1, 1, 4]

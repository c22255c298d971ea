"""Attention of whole mixed steps against that of launched ones; their decodes against torch's."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.worker.device_state import DeviceState, fill_decodes_torch
from asyncllm.worker.slot_changes import RECORD_WORDS, SLOT_INIT, write_slots_torch
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a GPU with FA3",
    ),
]
BLOCK_SIZE, NUM_PAGES, TABLE_PAGES, SIZE, MOST_DECODES = 16, 3000, 64, 512, 64


class Step(NamedTuple):
    decodes: DecodeRows | None
    prefills: PrefillRows

    @property
    def num_decodes(self) -> int:
        return 0 if self.decodes is None else len(self.decodes.positions)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.prefills.num_tokens


def random_step(rng: random.Random, num_decodes: int, num_prefills: int) -> Step:
    pages = iter(rng.sample(range(1, NUM_PAGES), NUM_PAGES - 1))
    tables = np.zeros((num_decodes, TABLE_PAGES), np.int32)
    positions = [rng.randrange(TABLE_PAGES * BLOCK_SIZE) for _ in range(num_decodes)]
    for row, position in enumerate(positions):
        for i in range(position // BLOCK_SIZE + 1):
            tables[row, i] = next(pages)
    left = SIZE - num_decodes - num_prefills
    lens, olds = [], []
    for _ in range(num_prefills):
        more = rng.randrange(left // 2 + 1)
        left -= more
        lens.append(1 + more)
        olds.append(rng.choice([0, 0, rng.randrange(500)]))
    kv_lens = [n + old for n, old in zip(lens, olds, strict=True)]
    num_pages = [-(-n // BLOCK_SIZE) for n in kv_lens]
    prefills = PrefillRows(
        np.cumsum([0, *lens], dtype=np.int32),
        np.array(kv_lens, np.int32),
        np.cumsum([0, *num_pages], dtype=np.int32),
        np.array([[next(pages) for _ in range(sum(num_pages))]], np.int32),
    )
    decodes = None
    if num_decodes:
        where = torch.tensor(positions, dtype=torch.int32).cuda()
        decodes = DecodeRows((torch.from_numpy(tables).cuda(),), where, max(positions) + 1)
    return Step(decodes, prefills)


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 2, 64)])
@torch.inference_mode()
def test_one_captured_launch_serves_all_steps(heads: tuple[int, int, int]) -> None:
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    cache = uniform_cache(
        num_layers=2, num_pages=NUM_PAGES, block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads,
        head_dim=head_dim, dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    for layer in cache.layers:
        layer.normal_()
    layers = [AttentionLayer(i, num_heads, num_kv_heads, head_dim, head_dim**-0.5) for i in (0, 1)]
    attention = FlashInferAttention(cache, layers)
    q = torch.randn(SIZE, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(q)
    fixed = DecodeRows(
        (torch.zeros(MOST_DECODES, TABLE_PAGES, dtype=torch.int32, device="cuda"),),
        torch.full((MOST_DECODES,), -1, dtype=torch.int32, device="cuda"),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours = attention.step_attention(SIZE)
        assert ours is not None
        graphs = {}
        for decodes in (fixed, None):
            for capture in (False, True):
                graph = torch.cuda.CUDAGraph()
                if capture:
                    graph.capture_begin()
                attend = ours.bind(decodes, q, out)
                for layer in layers:
                    attend(layer)
                if capture:
                    graph.capture_end()
            graphs[decodes is None] = graph
        rng = random.Random(1)
        for num_decodes, num_prefills in [(5, 1), (0, 1), (0, 256), (64, 3), (1, 200), (48, 1)] * 3:
            step = random_step(rng, num_decodes, num_prefills)
            fixed.positions.fill_(-1)
            if step.decodes is not None:
                fixed.block_tables[0][:num_decodes] = step.decodes.block_tables[0]
                fixed.positions[:num_decodes] = step.decodes.positions
            out.fill_(7)
            ours.prepare(num_decodes, step.prefills)
            graphs[not num_decodes].replay()
            expected = torch.full_like(out, 7)
            attend = attention.mixed(step.decodes, step.prefills, q, expected)
            for layer in layers:
                attend(layer)
            stream.synchronize()
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@torch.inference_mode()
def test_decodes_are_read_as_by_the_reference() -> None:
    from asyncllm.kernels.slots.kernel import fill_decodes_triton

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    state = DeviceState(40, 9, 100, device, num_groups=3)
    for tensor, most in (
        (state.last_tokens, 100),
        (state.positions, 9 * BLOCK_SIZE),
        (state.prompt_lens, 50),
        (state.block_tables, 1000),
    ):
        values = torch.from_numpy(rng.integers(0, most, tensor.shape, np.int32))
        tensor.copy_(values.to(device))
    slots = torch.zeros(16, dtype=torch.int32, device=device)
    slots[:11] = torch.from_numpy(1 + rng.permutation(39)[:11].astype(np.int32)).to(device)
    state.presence_penalties[2::2] = 0.5
    state.repetition_penalties[1:] = 1
    both, counts = [], []
    for fill in (fill_decodes_torch, fill_decodes_triton):
        state.output_counts.zero_()
        tokens = TokenBuffers.zeros(20, (2, 64), 3, torch.bfloat16, device)
        tokens.token_ids.fill_(3)
        tokens.write_slots.fill_(5)
        rows = fill(state, slots, tokens, BLOCK_SIZE)
        filled = (tokens.token_ids, tokens.positions, tokens.slots, tokens.write_slots)
        both.append((rows.positions, *(table[:11] for table in rows.block_tables), *filled))
        counts.append(state.output_counts.clone())
    assert both[0][0].tolist()[11:] == [-1] * 5 and both[0][4].tolist()[11:] == [3] * 9
    for expected, ours in zip(*both, strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(*counts) and 0 < counts[0].sum() < 11


@torch.inference_mode()
def test_slots_are_written_as_by_the_reference() -> None:
    from asyncllm.kernels.slots.kernel import write_slots_triton

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    for num_records, num_entries in ((1, 3), (0, 200), (150, 1), (7, 0), (39, 300)):
        records = np.zeros(num_records, SLOT_INIT)
        for name in SLOT_INIT.names or ():
            values = rng.integers(-(1 << 31), 1 << 31, num_records)
            records[name] = values * (1 << 31) + 7 if name == "seed" else values
        records["slot"] = 1 + rng.permutation(199)[:num_records]
        places = 9 + rng.permutation(399 * 9)[:num_entries]
        entries = np.stack([places // 9, places % 9, rng.integers(1, 99, num_entries)])
        packed = torch.from_numpy(records.view(np.int32).reshape(num_records, RECORD_WORDS))
        changes = (packed.to(device), torch.from_numpy(entries.astype(np.int32)).to(device))
        padded = (
            pad(changes[0], (0, 0, 0, 90)),
            pad(changes[1], (0, 700)),
        )  # as static inputs have them
        expected, *states = (DeviceState(200, 9, 10, device, num_groups=2) for _ in range(3))
        write_slots_torch(expected, *changes)
        write_slots_triton(states[0], *changes)
        write_slots_triton(states[1], *padded)
        for state in states:
            for name in ("last_tokens", "positions", "prompt_lens", "top_ks", "adapters", "seeds"):
                assert torch.equal(getattr(state, name), getattr(expected, name)), name
            assert torch.equal(state.float_params, expected.float_params)
            assert torch.equal(state.block_tables, expected.block_tables)
        assert num_entries == 0 or expected.block_tables.any()

"""Balanced decode attention against float32, and captured; needs a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.kernels.balanced_decode import KERNEL, BalancedDecode, definitions
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
MAX_LEN = 4096
MAX_ROWS = 300
NUM_PAGES = 30000
# query heads, KV heads, head_dim, page
SHAPES = [(32, 8, 128, 16), (16, 8, 128, 16), (32, 8, 64, 16), (9, 3, 64, 16), (8, 1, 128, 32)]
# Few rows, which many warps have parts of.
LENGTHS = {
    "token": [1],
    "tile": [16],
    "long": [MAX_LEN],
    "even": [1100] * 7,
    "odd": [1, 15, 17, MAX_LEN - 1, 333],
    "one long": [100] * 5 + [MAX_LEN] + [100] * 26,
    "padding behind": [1100] * 7 + [0] * 249,
}


class Case:
    def __init__(self, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
        torch.manual_seed(0)
        self.layer = AttentionLayer(0, heads, kv_heads, head_dim, head_dim**-0.5)
        self.cache = uniform_cache(
            num_layers=1, num_pages=NUM_PAGES, block_size=block_size, num_kv_heads=kv_heads,
            head_dim=head_dim, dtype=torch.bfloat16, device=CUDA,
        )  # fmt: skip
        self.cache.layers[0].normal_()
        flags = definitions([self.layer], torch.bfloat16, block_size)
        launch = KERNEL.begin_loading(CUDA, flags)()
        if launch is None:
            pytest.skip("no balanced decode on this device")
        num_sms = torch.cuda.get_device_properties(CUDA).multi_processor_count
        self.decode = BalancedDecode(self.cache.layers, self.layer, launch, num_sms)
        self.tables = torch.randint(
            1, NUM_PAGES, (MAX_ROWS, MAX_LEN // block_size), dtype=torch.int32, device=CUDA
        )

    def q(self, num_rows: int) -> torch.Tensor:
        shape = (num_rows, self.layer.num_heads, self.layer.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=CUDA)

    def enqueue(self, q: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        bind = self.decode.bind(q, self.tables[: len(q)], lengths - 1, out, starts_early=False)
        bind(self.layer)  # not early: its positions are the kernel before

    def expected(self, q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        group = self.layer.num_heads // self.layer.num_kv_heads
        outs = []
        for row, length in enumerate(lengths.tolist()):
            pages = self.cache.layers[0][self.tables[row].long()].float()
            keys, values = (
                pages[:, i].flatten(0, 1)[:length].repeat_interleave(group, 1) for i in range(2)
            )
            scores = torch.einsum("hd,lhd->hl", q[row].float(), keys) * self.layer.scale
            outs.append(torch.einsum("hl,lhd->hd", scores.softmax(1), values))
        return torch.stack(outs)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.isfinite().all()
    rows = (ours.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert rows.max() < 0.02  # bf16 output, and bf16 softmax weights


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
def test_equals_float32(shape: tuple[int, int, int, int], num_rows: int) -> None:
    case = Case(*shape)
    for most in (1, 17, 640, MAX_LEN):
        lengths = torch.randint(1, most + 1, (num_rows,), dtype=torch.int32, device=CUDA)
        lengths[num_rows // 2] = most
        q = case.q(num_rows)
        out = torch.full_like(q, torch.nan)
        case.enqueue(q, lengths, out)
        assert_near(out, case.expected(q, lengths))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows(shape: tuple[int, int, int, int], name: str) -> None:
    case = Case(*shape)
    lengths = torch.tensor(LENGTHS[name], dtype=torch.int32, device=CUDA)
    num_rows = int((lengths > 0).sum())
    q = case.q(len(lengths))
    results = []
    for _ in range(5):
        out = torch.full_like(q, torch.nan)
        case.enqueue(q, lengths, out)
        results.append(out)
    assert_near(results[0][:num_rows], case.expected(q[:num_rows], lengths[:num_rows]))
    assert results[0][num_rows:].isnan().all()
    assert all(torch.equal(out[:num_rows], results[0][:num_rows]) for out in results)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_rows", [1, 12, 64, 300])
def test_from_the_projection_on(
    num_rows: int, has_norm: bool, shape: tuple[int, int, int, int]
) -> None:
    """Behind a product that fills the GPU, in a graph: what is asked for early is there."""
    case = Case(*shape)
    heads, kv_heads, head_dim, block_size = shape
    if has_norm:
        weights = torch.rand(2, head_dim, device=CUDA, dtype=torch.bfloat16) + 0.5
        case.layer = replace(case.layer, head_norm=HeadNorm(weights[0], weights[1], 1e-6))
    case.tables = 1 + torch.randperm(NUM_PAGES - 1, device=CUDA)[: num_rows * 60].int().view(-1, 60)
    width = (heads + 2 * kv_heads) * head_dim
    x = torch.randn(num_rows, 256, device=CUDA, dtype=torch.bfloat16)
    projection = torch.randn(256, width, device=CUDA, dtype=torch.bfloat16) / 16
    qkv = (x @ projection).view(num_rows, -1, head_dim)
    angles = torch.rand(1000, head_dim // 2, device=CUDA) * 7
    positions = torch.zeros(num_rows, device=CUDA, dtype=torch.int32)
    rotation = Rotation(positions, torch.cat((angles.cos(), angles.sin()), dim=1))
    attend = case.decode.decode(case.tables, positions)

    def step() -> torch.Tensor:
        return attend(case.layer, (x @ projection).view(num_rows, -1, head_dim), rotation)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()  # another stream reads all that
    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
    for most in (1, 17, 640):
        lengths = torch.randint(1, most + 1, (num_rows,), dtype=torch.int32, device=CUDA)
        positions.copy_(lengths - 1)
        pages = case.tables.gather(1, (positions // block_size).unsqueeze(1).long()).squeeze(1)
        tokens = positions % block_size
        case.cache.layers[0][pages, :, tokens] = torch.nan
        results = []
        for _ in range(5):
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            results.append(out.clone())
        q, *new = rotated_heads(case.layer, qkv.float(), rotation)
        for i in range(2):
            kept = case.cache.layers[0][pages, i, tokens].float()
            torch.testing.assert_close(kept, new[i], rtol=0.02, atol=0.02)
        assert_near(out.view_as(q), case.expected(q, lengths))
        assert all(torch.equal(result, results[0]) for result in results)


def test_a_captured_launch_takes_other_lengths() -> None:
    """And gives the same each time, bit for bit: a launch leaves its counters at zero."""
    case = Case(32, 8, 128, 16)
    q, lengths = case.q(64), torch.ones(64, dtype=torch.int32, device=CUDA)
    out = torch.empty_like(q)
    torch.cuda.synchronize()  # another stream reads them
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        case.enqueue(q, lengths, out)
        with torch.cuda.graph(graph, stream=stream):
            case.enqueue(q, lengths, out)
    for most in (40, 700, MAX_LEN):
        lengths.random_(1, most)
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            results.append(out.clone())
        assert_near(out, case.expected(q, lengths))
        assert all(torch.equal(result, results[0]) for result in results)

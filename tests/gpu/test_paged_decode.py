"""The Triton decode kernel against torch; skipped where there is no CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, Rotation
from asyncllm.attention.kv_cache import KVCache
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
TOLERANCE = 1e-2  # relative: bf16 output, and bf16 softmax weights


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.float() - reference.float()).norm() / reference.float().norm()).item()


@dataclass
class Case:
    q: torch.Tensor  # [rows, heads, head_dim], a view of a merged projection
    cache: torch.Tensor  # [pages, 2, block_size, kv_heads, head_dim]
    tables: torch.Tensor  # int32 [rows, pages per sequence]
    positions: torch.Tensor  # int32 [rows]
    window: int | None = None
    num_sms: int = 132

    def decode(self) -> torch.Tensor:
        from asyncllm.kernels.paged_decode.kernel import paged_decode

        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=CUDA)
        paged_decode(
            self.q, self.cache, self.tables, self.positions, out,
            scale=self.scale, window=self.window, num_sms=self.num_sms,
        )  # fmt: skip
        return out

    def reference(self) -> torch.Tensor:
        """Row by row in float32."""
        group = self.q.shape[1] // self.cache.shape[3]
        outs = []
        for q, table, length in zip(
            self.q, self.tables, (self.positions + 1).tolist(), strict=True
        ):
            keys, values = self.cache[table].float().transpose(0, 1).flatten(1, 2)[:, :length]
            if self.window is not None:
                keys, values = keys[-self.window :], values[-self.window :]
            keys = keys.repeat_interleave(group, 1)
            values = values.repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", q.float(), keys) * self.scale
            outs.append(torch.einsum("hn,nhd->hd", scores.softmax(1), values))
        return torch.stack(outs)

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def poison_unseen(self) -> None:
        """NaN in every slot past a row's length or before its window: none may come through."""
        block_size = self.cache.shape[2]
        seen = torch.zeros(self.cache.shape[0], block_size, dtype=torch.bool, device=CUDA)
        for table, length in zip(self.tables, (self.positions + 1).tolist(), strict=True):
            first = 0 if self.window is None else max(0, length - self.window)
            position = torch.arange(first, length, device=CUDA)
            seen[table[position // block_size].long(), position % block_size] = True
        self.cache.transpose(1, 2)[~seen] = float("nan")


def make_case(
    rows: int,
    max_len: int,
    *,
    group: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    window: int | None = None,
    num_sms: int = 132,
    dtype: torch.dtype = BF16,
) -> Case:
    """Rows of 1 to `max_len` keys (the first has the most) on shuffled pages; page 0 is padding."""
    pages = -(-max_len // block_size)
    num_heads = group * num_kv_heads
    qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim, device=CUDA, dtype=dtype)
    cache_shape = (1 + rows * pages, 2, block_size, num_kv_heads, head_dim)
    cache = torch.randn(cache_shape, device=CUDA, dtype=dtype)
    positions = torch.randint(0, max_len, (rows,), device=CUDA, dtype=torch.int32)
    positions[0] = max_len - 1
    tables = (torch.randperm(rows * pages, device=CUDA) + 1).view(rows, pages).int()
    return Case(qkv[:, :num_heads], cache, tables, positions, window, num_sms)


def check(case: Case) -> None:
    assert not case.q.is_contiguous() or case.q.shape[0] == 1
    reference = case.reference()
    case.poison_unseen()
    assert relative_error(case.decode(), reference) < TOLERANCE


# A variant is compiled for each, in seconds: no grid of all.
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(64, 16), (80, 64), (96, 16), (128, 32), (128, 256), (256, 16), (256, 64)],
)
def test_equals_torch_for_shapes(head_dim: int, block_size: int) -> None:
    check(make_case(9, 700, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(
    ("group", "num_kv_heads"), [(1, 8), (2, 4), (3, 1), (5, 8), (8, 8), (16, 1), (20, 2), (48, 1)]
)
def test_equals_torch_for_groups(group: int, num_kv_heads: int) -> None:
    check(make_case(5, 300, group=group, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize(
    ("window", "num_sms"), [(1, 132), (50, 132), (64, 1), (130, 132), (1000, 1), (5000, 132)]
)
def test_equals_torch_for_windows(window: int, num_sms: int) -> None:
    check(make_case(9, 2000, window=window, num_sms=num_sms))


@pytest.mark.parametrize(("rows", "max_len"), [(1, 1), (1, 65), (1, 9000), (3, 4000), (300, 200)])
@pytest.mark.parametrize("num_sms", [1, 20, 132])  # with 1 there is one split
def test_equals_torch_for_splits(rows: int, max_len: int, num_sms: int) -> None:
    check(make_case(rows, max_len, num_sms=num_sms))


def test_equals_torch_in_float16() -> None:
    check(make_case(5, 700, dtype=torch.float16))


@pytest.mark.parametrize("num_sms", [1, 132])
def test_offsets_beyond_two_billion_elements(num_sms: int) -> None:
    case = make_case(2, 100, num_kv_heads=8, num_sms=num_sms)
    far = 70_000  # pages of 32768 elements
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    cache = torch.zeros(far + len(case.cache), *case.cache.shape[1:], device=CUDA, dtype=BF16)
    cache[far:] = case.cache
    case.cache, case.tables = cache, case.tables + far
    assert relative_error(case.decode(), case.reference()) < TOLERANCE


@pytest.mark.parametrize("num_sms", [1, 132])
def test_strided_rows_equal_contiguous_ones(num_sms: int) -> None:
    case = make_case(7, 500, num_sms=num_sms)
    strided = case.decode()
    case.q = case.q.contiguous()
    assert torch.equal(case.decode(), strided)


def test_padding_rows_are_finite() -> None:
    case = make_case(6, 400)
    case.cache[0] = 0
    case.tables[3:], case.positions[3:] = 0, 0
    reference = case.reference()
    out = case.decode()
    assert out.isfinite().all() and not out[3:].any()
    assert relative_error(out[:3], reference[:3]) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 6, 300])
@pytest.mark.parametrize("window", [None, 100])
def test_replays_with_other_lengths_and_tables(rows: int, window: int | None) -> None:
    case = make_case(rows, 1500, window=window)
    case.decode()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.decode()
    for _ in range(4):
        case.positions.copy_(torch.randint(0, 1500, (rows,), device=CUDA))
        case.tables.copy_(case.tables.flatten()[torch.randperm(case.tables.numel())].view(rows, -1))
        case.q.copy_(torch.randn_like(case.q))
        graph.replay()
        assert relative_error(out, case.reference()) < TOLERANCE


def make_cache(layer: AttentionLayer, num_pages: int) -> KVCache:
    cache = uniform_cache(
        num_layers=1, num_pages=num_pages, block_size=16, num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim, dtype=BF16, device=CUDA,
    )  # fmt: skip
    cache.layers[0].normal_()
    return cache


def make_projection(layer: AttentionLayer, tokens: int) -> tuple[torch.Tensor, Rotation]:
    """A merged projection, and a rotation that leaves it as it is."""
    heads = layer.num_heads + 2 * layer.num_kv_heads
    qkv = torch.randn(tokens, heads, layer.head_dim, device=CUDA, dtype=BF16)
    half = torch.ones(1, layer.head_dim // 2, device=CUDA)
    rows = torch.zeros(tokens, dtype=torch.int32, device=CUDA)
    return qkv, Rotation(rows, torch.cat([half, 0 * half], dim=1))


@pytest.mark.parametrize("version", ["tested", "other"])
@pytest.mark.parametrize("window", [None, 30])
def test_mixed_step_equals_torch(
    version: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decodes, 40 tokens after 24 old ones and 7 new ones, in a layer with a window and one
    without; padding behind them. FlashInfer's module called as tested, and its public `run`."""
    pytest.importorskip("flashinfer")
    from asyncllm.attention.flashinfer import api
    from asyncllm.attention.flashinfer.backend import FlashInferAttention
    from asyncllm.attention.torch_native import TorchAttention

    if version == "other":
        monkeypatch.setattr(api, "get_batch_prefill_module", None)
    layers = [
        AttentionLayer(0, 32, 8, 128, 128**-0.5),
        AttentionLayer(1, 32, 8, 128, 128**-0.5, window=window),
    ]
    cache = uniform_cache(
        num_layers=2, num_pages=40, block_size=16, num_kv_heads=8, head_dim=128,
        dtype=BF16, device=CUDA,
    )  # fmt: skip
    for kv in cache.layers:
        kv.normal_()
    flashinfer, plain = FlashInferAttention(cache, layers), TorchAttention(cache)
    pages = torch.randperm(39, device=CUDA).int() + 1
    decodes = DecodeRows(
        (pages[:32].view(2, 16),), torch.tensor([200, 33], device=CUDA, dtype=torch.int32)
    )
    prefills = PrefillRows(
        query_indptr=np.array([0, 40, 47], np.int32),
        kv_lens=np.array([64, 7], np.int32),
        page_indptr=np.array([0, 4, 5], np.int32),
        pages=pages[None, 32:37].cpu().numpy(),
    )
    q = torch.randn(64, 32, 128, device=CUDA, dtype=BF16)
    outs = [torch.full_like(q, 7.0) for _ in range(2)]
    for backend, out in zip((flashinfer, plain), outs, strict=True):
        attend = backend.mixed(decodes, prefills, q, out)
        for layer in layers:
            attend(layer)
    for rows in (slice(0, 2), slice(2, 42), slice(42, 49)):
        assert relative_error(outs[0][rows], outs[1][rows]) < TOLERANCE
    assert (outs[0][49:] == 7).all()


def test_write_puts_q_where_it_is_told() -> None:
    pytest.importorskip("flashinfer")
    from asyncllm.attention.flashinfer.backend import FlashInferAttention
    from asyncllm.attention.torch_native import TorchAttention

    layer = AttentionLayer(0, 32, 8, 128, 128**-0.5)
    caches = [make_cache(layer, 4) for _ in range(2)]
    qkv, rotation = make_projection(layer, 5)
    slots = torch.tensor([17, 18, 40, 3, 4], device=CUDA)[None]
    qs = [torch.empty(5, 32, 128, device=CUDA, dtype=BF16) for _ in range(2)]
    FlashInferAttention(caches[0], [layer]).write(layer, qkv.clone(), rotation, slots, qs[0])
    TorchAttention(caches[1]).write(layer, qkv.clone(), rotation, slots, qs[1])
    assert torch.equal(qs[0], qs[1])
    written = [cache.layers[0].transpose(1, 2).flatten(0, 1)[slots[0]] for cache in caches]
    assert torch.equal(written[0], written[1])

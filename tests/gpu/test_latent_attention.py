"""Attention over pages of latents, and slopes of ALiBi, by Triton against torch's attention.

Without a CUDA device in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, RotatedHeads
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention

triton = pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
if ON_GPU:
    pytestmark = pytest.mark.gpu
elif tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.__version__ >= "2.4":
    pytest.skip("this Triton's interpreter knows no numpy 2.4", allow_module_level=True)

BLOCK_SIZE = 16
TOLERANCE = 1e-2 if ON_GPU else 1e-5  # relative
# heads, latent, rotary: DeepSeek V2 Lite's, V3's; odd ones.
SHAPES = [(16, 512, 64), (128, 512, 64), (6, 48, 20)] if ON_GPU else [(6, 48, 20)]
LENGTHS = [1, 700, 33, 3000] if ON_GPU else [1, 70, 33, 130]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def make_layer(shape: tuple[int, int, int]) -> AttentionLayer:
    heads, latent, rotary = shape
    return AttentionLayer(0, heads, 1, latent + rotary, latent**-0.5, latent_dim=latent)


def make_caches(layer: AttentionLayer, num_pages: int) -> list[KVCache]:
    layout = CacheLayout([layer], BLOCK_SIZE, DTYPE)
    caches = [KVCache(layout, num_pages, DEVICE) for _ in range(2)]
    caches[0].layers[0].copy_(random(*caches[0].layers[0].shape))
    caches[1].layers[0].copy_(caches[0].layers[0])
    return caches


def error_of(layer: AttentionLayer, ours: torch.Tensor, reference: torch.Tensor) -> float:
    ours, reference = (
        x.unflatten(-1, (-1, layer.head_dim))[..., : layer.latent_dim].float()
        if x.dim() == 2
        else x[..., : layer.latent_dim].float()
        for x in (ours, reference)
    )
    return ((ours - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_sms", [1, 132])  # with 1 there is one split
def test_decodes(shape: tuple[int, int, int], num_sms: int) -> None:
    from asyncllm.attention.latent import LatentPages

    layer, per_row = make_layer(shape), -(-max(LENGTHS) // BLOCK_SIZE)
    ours, reference = make_caches(layer, 1 + len(LENGTHS) * per_row)
    pages = 1 + torch.randperm(len(LENGTHS) * per_row, device=DEVICE)
    positions = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32) - 1
    rows = DecodeRows((pages.view(len(LENGTHS), per_row).int(),), positions)
    kv = random(len(LENGTHS), 1, layer.head_dim)
    heads = RotatedHeads(random(len(LENGTHS), layer.num_heads, layer.head_dim), kv, kv)
    backend = LatentPages(ours)
    backend._num_sms = num_sms
    out = backend.decode(rows)(layer, heads, None)
    expected = TorchAttention(reference).decode(rows)(layer, heads, None)
    assert error_of(layer, out, expected) < TOLERANCE
    assert torch.equal(ours.layers[0], reference.layers[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_steps(shape: tuple[int, int, int]) -> None:
    """Two decodes, 40 tokens after 30 old ones, 35 new ones."""
    from asyncllm.attention.latent import LatentPages

    layer = make_layer(shape)
    cache, _ = make_caches(layer, 40)
    pages = torch.randperm(39, device=DEVICE).int() + 1
    positions = torch.tensor([37, 5], device=DEVICE, dtype=torch.int32)
    decodes = DecodeRows((pages[:6].view(2, 3),), positions)
    prefills = PrefillRows(
        np.array([0, 40, 75], np.int32), np.array([70, 35], np.int32),
        np.array([0, 5, 8], np.int32), pages[None, 6:14].cpu().numpy(),
    )  # fmt: skip
    q = random(77, layer.num_heads, layer.head_dim)
    outs = []
    for backend in (LatentPages(cache), TorchAttention(cache)):
        outs.append(torch.zeros_like(q))
        backend.mixed(decodes, prefills, q, outs[-1])(layer)
    assert error_of(layer, *outs) < TOLERANCE


@pytest.mark.skipif(not ON_GPU, reason="graphs need a device")
def test_a_captured_decode_replays_with_other_rows() -> None:
    from asyncllm.attention.latent import LatentPages

    layer = make_layer(SHAPES[0])
    ours, reference = make_caches(layer, 400)
    tables = torch.zeros(4, 90, device=DEVICE, dtype=torch.int32)
    positions = torch.zeros(4, device=DEVICE, dtype=torch.int32)
    kv = random(4, 1, layer.head_dim)
    heads = RotatedHeads(random(4, layer.num_heads, layer.head_dim), kv, kv)
    backend, graph = LatentPages(ours), torch.cuda.CUDAGraph()
    rows = DecodeRows((tables,), positions)
    backend.decode(rows)(layer, heads, None)
    with torch.cuda.graph(graph):
        out = backend.decode(rows)(layer, heads, None)
    for length in (1, 1400, 300):
        tables.copy_(1 + torch.randperm(399, device=DEVICE)[:360].view(4, 90).int())
        positions.fill_(length - 1)
        kv.normal_()
        graph.replay()
        expected = TorchAttention(reference).decode(rows)(layer, heads, None)
        assert error_of(layer, out, expected) < TOLERANCE


@pytest.mark.parametrize("num_sms", [1, 132])
@pytest.mark.parametrize("window", [None, 20])
def test_slopes_of_decodes(num_sms: int, window: int | None) -> None:
    from asyncllm.kernels.paged_decode.kernel import paged_decode

    slopes = torch.rand(8, device=DEVICE)
    layer = AttentionLayer(0, 8, 2, 64, 0.125, window, slopes=slopes)
    cache, _ = make_caches(layer, 40)
    tables = (1 + torch.randperm(39, device=DEVICE)[:27]).view(3, 9).int()
    positions = torch.tensor([0, 77, 143], device=DEVICE, dtype=torch.int32)
    q = random(3, 8, 64)
    out = torch.empty_like(q)
    paged_decode(
        q, cache.layers[0], tables, positions, out, scale=layer.scale, window=window,
        num_sms=num_sms, slopes=slopes,
    )  # fmt: skip
    expected = torch.empty_like(q)
    rows = DecodeRows((tables,), positions)
    TorchAttention(cache).attend_decodes(rows)(layer, q, expected)
    assert ((out - expected).float().norm() / expected.float().norm()).item() < TOLERANCE

"""Attention over latents is attention over the keys and values that are made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, RotatedHeads
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.registry import build_backend
from asyncllm.attention.torch_native import TorchAttention

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_PAGES, NUM_TOKENS = 4, 9, 30
HEADS, LATENT, ROTARY, PLAIN, V_DIM = 6, 16, 4, 8, 10
LAYER = AttentionLayer(0, HEADS, 1, LATENT + ROTARY, 0.3, latent_dim=LATENT)
MADE = AttentionLayer(0, HEADS, HEADS, PLAIN + ROTARY, 0.3)  # of keys and values of each head


class Case:
    """A sequence of NUM_TOKENS tokens on shuffled pages, both ways."""

    def __init__(self, window: int | None) -> None:
        torch.manual_seed(0)
        self.layer, self.made = replace(LAYER, window=window), replace(MADE, window=window)
        self.cache = KVCache(self._layout(self.layer), NUM_PAGES, CPU)
        self.reference = KVCache(self._layout(self.made), NUM_PAGES, CPU)
        self.to_keys = torch.randn(HEADS, LATENT, PLAIN)
        self.to_values = torch.randn(HEADS, LATENT, V_DIM)
        self.q = torch.randn(NUM_TOKENS, HEADS, PLAIN + ROTARY)
        self.latents = torch.randn(NUM_TOKENS, LATENT + ROTARY)
        self.pages = 1 + torch.randperm(NUM_PAGES - 1)

    @staticmethod
    def _layout(layer: AttentionLayer) -> CacheLayout:
        return CacheLayout([layer], BLOCK_SIZE, torch.float32)

    def heads(self, tokens: slice) -> RotatedHeads:
        """q with the projection to keys done on it."""
        plain, rotated = self.q[tokens].split([PLAIN, ROTARY], dim=2)
        q = torch.cat((torch.einsum("thd,hld->thl", plain, self.to_keys), rotated), dim=2)
        latent = self.latents[tokens].unsqueeze(1)
        return RotatedHeads(q, latent, latent[..., :LATENT])

    def made_heads(self, tokens: slice) -> RotatedHeads:
        latent, rotated = self.latents[tokens].split([LATENT, ROTARY], dim=1)
        k = torch.einsum("tl,hld->thd", latent, self.to_keys)
        k = torch.cat((k, rotated.unsqueeze(1).expand(-1, HEADS, -1)), dim=2)
        return RotatedHeads(self.q[tokens], k, torch.einsum("tl,hld->thd", latent, self.to_values))

    def slots(self, tokens: slice) -> torch.Tensor:
        positions = torch.arange(NUM_TOKENS)[tokens]
        return (self.pages[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)[None]

    def mixed(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk of the prompt: [tokens, heads, V_DIM] by latents, and by keys and values."""
        num_tokens, num_pages = tokens.stop - tokens.start, -(-tokens.stop // BLOCK_SIZE)
        rows = PrefillRows(
            *(np.array(each, np.int32) for each in ([0, num_tokens], [tokens.stop])),
            np.array([0, num_pages], np.int32), self.pages[None, :num_pages].numpy(),
        )  # fmt: skip
        outs = []
        for layer, cache, heads in (
            (self.layer, self.cache, self.heads(tokens)),
            (self.made, self.reference, self.made_heads(tokens)),
        ):
            attention, q = TorchAttention(cache), torch.zeros(num_tokens, HEADS, layer.head_dim)
            out = torch.zeros_like(q)
            attention.write(layer, heads, None, self.slots(tokens), q)
            attention.mixed(None, rows, q, out)(layer)
            outs.append(out)
        return self._of_latents(outs[0]), outs[1][..., :V_DIM]

    def decode(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = (self.pages.int()[None],)
        rows = DecodeRows(tables, torch.tensor([position], dtype=torch.int32), position + 1)
        tokens = slice(position, position + 1)
        ours = TorchAttention(self.cache).decode(rows)(self.layer, self.heads(tokens), None)
        made = TorchAttention(self.reference).decode(rows)
        expected = made(self.made, self.made_heads(tokens), None)
        return self._of_latents(ours.view(1, HEADS, -1)), expected.view(1, HEADS, -1)[..., :V_DIM]

    def _of_latents(self, out: torch.Tensor) -> torch.Tensor:
        assert not out[..., LATENT:].any(), "behind the values there is nothing"
        return torch.einsum("thl,hld->thd", out[..., :LATENT], self.to_values)


@pytest.mark.parametrize("window", [None, 7])
def test_latents_are_keys_and_values(window: int | None) -> None:
    case = Case(window)
    for tokens in (slice(0, 11), slice(11, 12), slice(12, 25)):
        torch.testing.assert_close(*case.mixed(tokens), rtol=1e-4, atol=1e-4)
    for position in range(25, NUM_TOKENS):
        torch.testing.assert_close(*case.decode(position), rtol=1e-4, atol=1e-4)


def test_a_page_has_the_latents_size() -> None:
    layer = AttentionLayer(0, 128, 1, 576, 0.1, latent_dim=512)  # DeepSeek V3
    layout = CacheLayout([replace(layer, index=i) for i in range(61)], 64, torch.bfloat16)
    assert layout.page_bytes == 61 * 64 * 576 * 2
    cache = KVCache(CacheLayout([layer], 1, torch.bfloat16), 3, CPU)
    assert cache.layers[0].shape == (3, 1, 576)


def test_a_backend_that_has_no_latents_refuses_them() -> None:
    cache = KVCache(CacheLayout([LAYER], BLOCK_SIZE, torch.float32), 2, CPU)
    with pytest.raises(ValueError, match=r"flash_attn does not do latents.*layer 0 has: pass auto"):
        build_backend("flash_attn", cache, [LAYER], torch.float32)


def test_latents_in_fp8_are_refused_where_no_kernel_reads_them() -> None:
    cache = KVCache(CacheLayout([LAYER], BLOCK_SIZE, torch.float8_e4m3fn), 2, CPU)
    with pytest.raises(ValueError, match=r"kv_cache_dtype torch.float8_e4m3fn.*no FP8 latents"):
        build_backend("flashinfer", cache, [LAYER], torch.bfloat16)

"""Our lists of FA3's tiles against those of FlashInfer's planner, word by word."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a GPU with FA3",
    ),
]
BLOCK_SIZE, MAX_TOKENS = 16, 2048


def random_rows(rng: random.Random) -> PrefillRows:
    num_rows = rng.choice([1, 1, 2, 3, 8, 17, 64, 200])
    lens = np.diff([0, *sorted(rng.sample(range(1, MAX_TOKENS + 1), num_rows))])
    kv_lens = lens + np.array([rng.choice([0, 0, rng.randrange(5000)]) for _ in lens])
    num_pages = -(-kv_lens // BLOCK_SIZE)
    return PrefillRows(
        np.cumsum([0, *lens], dtype=np.int32),
        kv_lens.astype(np.int32),
        np.cumsum([0, *num_pages], dtype=np.int32),
        rng.randrange(1000) + np.arange(sum(num_pages), dtype=np.int32)[None],
    )


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 2, 64)])
def test_they_are_those_of_the_planner(heads: tuple[int, int, int]) -> None:
    from asyncllm.attention.flashinfer.prefill import PrefillModule
    from asyncllm.attention.prefill_lists import (
        BLOCK_ENDS,
        PAGE_STARTS,
        PLAN_ORDER,
        Limits,
        PrefillLists,
    )
    from asyncllm.kernels.prefill_lists import KERNEL

    num_heads, num_kv_heads, head_dim = heads
    device = torch.device("cuda")
    layer = AttentionLayer(0, num_heads, num_kv_heads, head_dim, 1.0)
    cache = uniform_cache(
        num_layers=1, num_pages=1, block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads,
        head_dim=head_dim, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    make = KERNEL.begin_loading(device)()
    assert make is not None
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    limits = Limits(MAX_TOKENS, 256, 1 << 17)
    stream = torch.cuda.current_stream().cuda_stream
    ours = PrefillLists(layer, limits, make, num_blocks, device, stream)
    workspace, theirs = (torch.zeros(8 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    module = PrefillModule(layer, cache, workspace, torch.bfloat16, theirs)
    rng = random.Random(0)
    for num_decodes in [0, 3, 64] * 10:
        rows = random_rows(rng)
        ours.prepare(num_decodes, rows)
        query_indptr = rows.query_indptr + np.int32(num_decodes)
        host = [
            torch.from_numpy(array).pin_memory()
            for array in (query_indptr, rows.page_indptr, rows.kv_lens)
        ]
        their_places = module._module.plan(
            *module._workspaces, module._pinned, *host, MAX_TOKENS, len(rows.kv_lens), num_heads,
            num_kv_heads, BLOCK_SIZE, True, head_dim, head_dim, True, -1,  # captured; causal
        )  # fmt: skip
        torch.cuda.synchronize()
        sizes = dict.fromkeys(PLAN_ORDER, num_heads * _num_tiles(rows, head_dim))
        sizes[BLOCK_ENDS] = num_blocks + 1
        assert their_places[-1] == ours.places[-1]
        places = zip(PLAN_ORDER[:-1], ours.places, their_places, strict=False)
        for which, our_place, their_place in places:
            mine, expected = (
                lists.view(torch.int32)[place // 4 :][: sizes[which]]
                for lists, place in ((ours.workspace, our_place), (theirs, their_place))
            )
            if which == PAGE_STARTS:  # our pages lie behind the other rows' numbers
                expected = expected + 3 * len(rows.kv_lens) + 2
            assert torch.equal(mine, expected), which
        first_page = 3 * len(rows.kv_lens) + 2
        pages = ours.pages[first_page:][: rows.pages.size].cpu()
        assert torch.equal(pages, torch.from_numpy(rows.pages[0]))


def _num_tiles(rows: PrefillRows, head_dim: int) -> int:
    from asyncllm.attention.prefill_lists import tile_size

    return int((-(-np.diff(rows.query_indptr) // tile_size(head_dim))).sum())

"""Lists of FA3's tiles by prefill_lists.cu, run on the CPU: who does what, and is it greedy."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.prefill_lists import (
    BLOCK_ENDS,
    HEADS,
    KV_LENS,
    PAGE_STARTS,
    PLAN_ORDER,
    QUERY_LENS,
    QUERY_STARTS,
    TILES,
    Limits,
    PrefillLists,
    tile_size,
)
from asyncllm.kernels.prefill_lists import KERNEL
from tests.cuda.emulated import compile_for_cpu

CPU = torch.device("cpu")
PAGE = 16  # tokens
LIMITS = Limits(tokens=2000, rows=40, pages=3000)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_for_cpu(KERNEL, (), tmp_path_factory.mktemp("lists") / "lists.so")


def prompts(lens: list[tuple[int, int]]) -> PrefillRows:
    """Rows of so many tokens, with so many before them, on pages of no order."""
    tokens, kv_lens = [new for new, _ in lens], [new + old for new, old in lens]
    num_pages = [-(-n // PAGE) for n in kv_lens]
    return PrefillRows(
        np.cumsum([0, *tokens], dtype=np.int32),
        np.array(kv_lens, np.int32),
        np.cumsum([0, *num_pages], dtype=np.int32),
        np.random.default_rng(0).permutation(sum(num_pages)).astype(np.int32)[None] + 7,
    )


class Work(NamedTuple):
    """A tile of a head, as the kernel is told of it."""

    head: int
    tile: int
    query_start: int
    page_start: int
    query_len: int
    kv_len: int


def works(lists: PrefillLists) -> list[list[Work]]:
    """Each block's, found as the kernel finds it."""
    words = lists.workspace.view(torch.int32)
    starts = dict(zip(PLAN_ORDER[:-1], lists.places, strict=False))

    def entries(which: int) -> torch.Tensor:
        return words[starts[which] // 4 :]

    order = (HEADS, TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS)
    ends = entries(BLOCK_ENDS)[: NUM_BLOCKS + 1].tolist()
    assert ends[0] == 0
    columns = torch.stack([entries(which)[: ends[-1]] for which in order])
    all_works = [Work(*values) for values in columns.T.tolist()]
    return [all_works[a:b] for a, b in pairwise(ends)]


NUM_BLOCKS = 7
# Tokens and those before them; no two rows of one length, so that the order is one.
STEPS = {
    "none": [],
    "one": [(1, 0)],
    "a tile": [(128, 0)],
    "beyond": [(193, 0)],
    "long": [(1990, 7)],
    "a chunk of a long one": [(300, 9000)],
    "several": [(5, 1000), (700, 3), (129, 0), (1, 1), (400, 2000)],
    "many": [(17 + 2 * i, 0) for i in range(40)],
    "the most tiles": [(1, i) for i in range(39)] + [(1961, 0)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 128), (3, 64)])
def test_each_tile_is_for_the_block_with_the_least_to_do(
    function: Any, name: str, num_heads: int, head_dim: int
) -> None:
    layer = AttentionLayer(0, num_heads, 1, head_dim, 1.0)
    lists = PrefillLists(layer, LIMITS, function, NUM_BLOCKS, CPU, 0)
    lists.prepare(9, prompts(STEPS["several"]))  # whose lists are no longer there
    rows, tile = prompts(STEPS[name]), tile_size(head_dim)
    lists.prepare(5, rows)
    by_block = works(lists)
    block_of = {work[:3]: block for block, of_block in enumerate(by_block) for work in of_block}
    assert len(block_of) == sum(map(len, by_block))

    loads, order = [0] * NUM_BLOCKS, dict.fromkeys(range(NUM_BLOCKS), 0)
    longest_first = np.argsort(-rows.kv_lens)
    for head in range(num_heads):
        for row in longest_first:
            first, end = rows.query_indptr[row : row + 2].tolist()
            kv_len = int(rows.kv_lens[row])
            for index in reversed(range(-(-(end - first) // tile))):
                block = block_of.pop((head, index, 5 + first))
                assert loads[block] == min(loads)
                loads[block] += 2 * tile + min(kv_len - (end - first) + (index + 1) * tile, kv_len)
                work = by_block[block][order[block]]
                order[block] += 1
                assert work[:3] == (head, index, 5 + first)  # a block has them in this order
                assert work[4:] == (end - first, kv_len)
                first_page, end_page = rows.page_indptr[row : row + 2].tolist()
                pages = lists.pages[work.page_start :][: end_page - first_page]
                assert pages.tolist() == rows.pages[0, first_page:end_page].tolist()
    assert not block_of


def test_random_steps_one_after_another(function: Any) -> None:
    """Steps of any size go through two buffers: nothing is left of the steps before."""
    layer = AttentionLayer(0, 2, 1, 128, 1.0)
    lists = PrefillLists(layer, LIMITS, function, NUM_BLOCKS, CPU, 0)
    rng = random.Random(0)
    for _ in range(60):
        most = rng.choice([1, 3, 40])
        rows = prompts([(rng.randrange(1, 51), rng.randrange(900)) for _ in range(most)])
        lists.prepare(0, rows)
        made = sorted((w.query_start, w.head, w.kv_len) for block in works(lists) for w in block)
        starts, lens = rows.query_indptr[:-1].tolist(), rows.kv_lens.tolist()
        expected = [(s, h, n) for s, n in zip(starts, lens, strict=True) for h in (0, 1)]
        assert made == expected


def test_no_more_than_there_is_place_for(function: Any) -> None:
    layer = AttentionLayer(0, 2, 1, 128, 1.0)
    limits = Limits(tokens=256, rows=2, pages=200)
    lists = PrefillLists(layer, limits, function, NUM_BLOCKS, CPU, 0)
    lists.prepare(0, prompts([(255, 0), (1, 0)]))
    before = lists.workspace.clone()
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        lists.prepare(0, prompts([(1, 0)] * 20))
    with pytest.raises(ValueError):
        lists.prepare(0, prompts([(1, 16 * 6000)]))
    assert torch.equal(lists.workspace, before)

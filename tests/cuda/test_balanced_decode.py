"""Balanced decode attention, its CUDA source run on the CPU (emulator.h), against the reference."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.kernels.balanced_decode import KERNEL, BalancedDecode, definitions
from tests.caches import uniform_cache
from tests.cuda.emulated import compile_for_cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_LEN = 640
PAGES = MAX_LEN // BLOCK_SIZE
MAX_ROWS = 40
# By name: query heads, KV heads, head_dim, page.
SHAPES = {
    "gqa": (16, 8, 128, 16),
    "mha-64": (4, 4, 64, 16),
    "mqa-8-large-pages": (8, 1, 128, 32),
    "odd": (9, 3, 64, 16),  # a block's warps are no multiple of the heads
}
# One shape is compiled in the fast tier.
TIERS = ["gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != "gqa")]
LENGTHS = {
    "one": [1],
    "tile": [16],
    "beyond": [17],
    "long": [640],
    "uneven": [1, 300, 16, 15, 640, 2],
    "many": [*range(1, 33), 500, 1, 1, 1],  # rows that a lane looks up alone
    "fewer tiles than shares": [20, 3],
}
Compiled = Callable[[tuple[str, ...]], Any]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The source by its definitions, each compiled once."""
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def function(flags: tuple[str, ...]) -> Any:
        made = folder / f"{'-'.join(flags)}.so"
        return compile_for_cpu(KERNEL, flags, made)

    return function


class Case:
    def __init__(self, shape: str, compiled: Compiled, num_blocks: int) -> None:
        heads, kv_heads, head_dim, block_size = SHAPES[shape]
        torch.manual_seed(0)
        self.layer = AttentionLayer(1, heads, kv_heads, head_dim, head_dim**-0.5)
        self.cache = uniform_cache(
            num_layers=2, num_pages=MAX_ROWS * PAGES + 1, block_size=block_size,
            num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device=CPU,
        )  # fmt: skip
        self.cache.layers[1].normal_()
        flags = definitions([self.layer], torch.bfloat16, block_size)
        assert flags is not None
        self._function = compiled(flags)
        self._seed = 0
        self.decode = BalancedDecode(self.cache.layers, self.layer, self._launch, num_blocks)
        pages = MAX_LEN // block_size
        self.tables = (1 + torch.randperm(MAX_ROWS * pages)).int().view(MAX_ROWS, pages)

    def _launch(self, args: object, num_blocks: int, stream: int) -> int:
        self._seed += 1
        return int(self._function(args, num_blocks, self._seed))

    def poison_the_unseen(self, lengths: list[int]) -> None:
        """Fills with NaN all that no row sees."""
        keep = torch.zeros(self.cache.layers[1].shape[0], self.cache.block_size, dtype=torch.bool)
        for row, length in enumerate(lengths):
            tokens = torch.arange(length)
            keep[
                self.tables[row, tokens // self.cache.block_size].long(), tokens % keep.shape[1]
            ] = True
        self.cache.layers[1].masked_fill_(~keep[:, None, :, None, None], torch.nan)

    def ours(self, q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        positions = torch.tensor(lengths, dtype=torch.int32) - 1
        self.decode.bind(q, self.tables[: len(q)], positions, out)(self.layer)
        return out

    def ours_from(self, qkv: torch.Tensor, rotation: Rotation, lengths: list[int]) -> torch.Tensor:
        positions = torch.tensor(lengths, dtype=torch.int32) - 1
        out = self.decode.decode(self.tables[: len(qkv)], positions)(self.layer, qkv, rotation)
        return out.view(len(qkv), self.layer.num_heads, self.layer.head_dim)

    def expected(self, q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """In float64: [rows, heads, head_dim]."""
        outs = []
        group = self.layer.num_heads // self.layer.num_kv_heads
        for row, length in enumerate(lengths):
            pages = self.cache.layers[1][self.tables[row].long()].double()
            keys, values = (
                pages[:, i].flatten(0, 1)[:length].repeat_interleave(group, 1) for i in range(2)
            )
            scores = torch.einsum("hd,lhd->hl", q[row].double(), keys) * self.layer.scale
            outs.append(torch.einsum("hl,lhd->hd", scores.softmax(1), values))
        return torch.stack(outs)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("shape", TIERS)
def test_equals_the_reference(shape: str, name: str, compiled: Compiled) -> None:
    case = Case(shape, compiled, num_blocks=3)
    lengths = LENGTHS[name]
    case.poison_the_unseen(lengths)
    q = torch.randn(len(lengths), case.layer.num_heads, case.layer.head_dim).bfloat16()
    expected = case.expected(q, lengths)
    for _ in range(2):  # the second time with what the first left in its counters
        error = (case.ours(q, lengths).double() - expected).norm() / expected.norm()
        assert error < 0.01


def normed(layer: AttentionLayer) -> AttentionLayer:
    weights = torch.rand(2, layer.head_dim).bfloat16() + 0.5
    return replace(layer, head_norm=HeadNorm(weights[0], weights[1], 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "beyond", "uneven", "many", "fewer tiles than shares"])
@pytest.mark.parametrize("shape", TIERS)
def test_from_the_projection_on(shape: str, name: str, compiled: Compiled) -> None:
    """The new keys and values are attended to, and come into the cache, where nothing was."""
    case = Case(shape, compiled, num_blocks=3)
    if shape in ("gqa", "odd"):
        case.layer = normed(case.layer)
    lengths, block_size = LENGTHS[name], case.cache.block_size
    case.poison_the_unseen([length - 1 for length in lengths])
    heads = case.layer.num_heads + 2 * case.layer.num_kv_heads
    qkv = torch.randn(len(lengths), heads, case.layer.head_dim).bfloat16()
    angles = torch.rand(50, case.layer.head_dim // 2) * 7
    rows = torch.randint(50, (len(lengths),), dtype=torch.int32)
    rotation = Rotation(rows, torch.cat((angles.cos(), angles.sin()), dim=1))
    before = case.cache.layers[1].clone()
    ours = case.ours_from(qkv, rotation, lengths)

    q, *new = rotated_heads(case.layer, qkv.float(), rotation)
    kept = case.cache.layers[1].clone()
    for row, length in enumerate(lengths):
        page, token = case.tables[row, (length - 1) // block_size], (length - 1) % block_size
        for i in range(2):
            place = page, i, token
            torch.testing.assert_close(kept[place].float(), new[i][row], rtol=0.01, atol=0.01)
            kept[place] = before[place]
    torch.testing.assert_close(kept, before, rtol=0, atol=0, equal_nan=True)
    expected = case.expected(q, lengths)
    assert (ours.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.slow
def test_the_order_of_threads_changes_nothing(compiled: Compiled) -> None:
    """One launch after another, each with its own order: bit for bit the same."""
    case = Case("gqa", compiled, num_blocks=3)
    q = torch.randn(6, 16, 128).bfloat16()
    first = case.ours(q, LENGTHS["uneven"])
    for _ in range(4):
        assert torch.equal(case.ours(q, LENGTHS["uneven"]), first)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [1, 2, 7])
@pytest.mark.parametrize("shape", [tier for tier in TIERS if "mha-64" not in str(tier)])
def test_parts_of_a_row_in_several_blocks(shape: str, num_blocks: int, compiled: Compiled) -> None:
    """That begin there, end there, and go through; the same bits whoever of them is last."""
    case = Case(shape, compiled, num_blocks)
    lengths = [450, 31, 1, 640]
    case.poison_the_unseen(lengths)
    q = torch.randn(len(lengths), case.layer.num_heads, case.layer.head_dim).bfloat16()
    expected = case.expected(q, lengths)
    first = case.ours(q, lengths)
    assert (first.double() - expected).norm() < 0.01 * expected.norm()
    assert torch.equal(case.ours(q, lengths), first)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_padding_rows_are_left_alone(num_rows: int, compiled: Compiled) -> None:
    case = Case("gqa", compiled, num_blocks=3)
    lengths = LENGTHS["uneven"][:num_rows]
    case.poison_the_unseen(lengths)
    q = torch.randn(num_rows + 4, 16, 128).bfloat16()
    for _ in range(2):
        out = case.ours(q, [*lengths, 0, 0, 0, 0])
        assert out[num_rows:].isnan().all()
        if num_rows:
            expected = case.expected(q[:num_rows], lengths)
            assert (out[:num_rows].double() - expected).norm() < 0.01 * expected.norm()


def test_what_a_launch_reads_lives_as_long_as_it(compiled: Compiled) -> None:
    case = Case("gqa", compiled, num_blocks=1)
    tensors = [torch.zeros(2, 16, 128).bfloat16(), torch.ones(2, dtype=torch.int32)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    call = case.decode.bind(tensors[0], case.tables[:2], tensors[1], torch.zeros_like(tensors[0]))
    tensors.clear()
    assert all(tensor() is not None for tensor in alive)
    del call
    assert not any(tensor() is not None for tensor in alive)


def test_a_greater_score_comes_late(compiled: Compiled) -> None:
    """Scores that grow from tile to tile: all that was summed before shrinks each time."""
    case = Case("gqa", compiled, num_blocks=1)
    lengths = [640]
    keys = case.cache.layers[1][case.tables[0].long(), 0]
    keys *= torch.linspace(0.1, 8, len(keys))[:, None, None, None]
    case.cache.layers[1][case.tables[0].long(), 0] = keys
    q = torch.randn(1, 16, 128).bfloat16()
    expected = case.expected(q, lengths)
    assert (case.ours(q, lengths).double() - expected).norm() < 0.01 * expected.norm()

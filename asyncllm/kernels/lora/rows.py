"""The rows of a pass, gathered by the slots of their adapters: tiles that each have one slot.

    row     0 1 2 3 4 5 6          tiles of 2 rows:   2 5 | 0 3 | 6 - | 1 4 | - -
    slot    1 2 0 1 2 0 1          their slots:        0  |  1  |  1  |  2  |  0

How many tiles there may be depends on the number of rows alone, so a captured graph replays as it
is: those left over have slot 0 and no rows. Gathered once in a pass, for all layers; each layer
has a line of its own that says what its tiles' slots have of it, so that its kernels read nothing
of an adapter that leaves the layer as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.records import AdapterRows

FEW_ROWS, FEW_ROWS_TILE, MANY_ROWS_TILE = 256, 16, 64  # up to so many rows: least tiles
MOST_COMPARED = 8192  # rows times slots, at a time


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_layers", "num_tiles"])
def _gather(
    slots_ptr, adapted_ptr, rows_ptr, tiles_ptr, num_rows, num_slots, num_layers, num_tiles,
    adapted_stride,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """The tiles of one slot, behind those of lower slots; and, of the last slot, the rest."""
    slot = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    counts = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        its = tl.load(slots_ptr + row, row < num_rows, other=-1)
        counts += tl.sum((its[:, None] == slots[None, :]).to(tl.int32), axis=0)
    tiles = (counts + (TILE - 1)) // TILE
    first = tl.sum(tl.where(slots < slot, tiles, 0), axis=0)
    end = first + tl.sum(tl.where(slots == slot, tiles, 0), axis=0)
    found = first * TILE
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        is_own = tl.load(slots_ptr + row, row < num_rows, other=-1) == slot
        place = found + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(rows_ptr + place, row, is_own)
        found += tl.sum(is_own.to(tl.int32), axis=0)
    place = found + tl.arange(0, TILE)
    tl.store(rows_ptr + place, -1, place < end * TILE)
    layer = tl.arange(0, LAYERS)
    is_layer = layer < num_layers
    adapted = tl.load(adapted_ptr + slot.to(tl.int64) * adapted_stride + layer, is_layer, other=0.0)
    kind = adapted.to(tl.int32)
    tiles_ptr += layer * num_tiles
    for tile in range(first, end):
        tl.store(tiles_ptr + tile, tl.where(kind > 0, 2 * slot + kind - 1, 0), is_layer)
    if slot == num_slots - 1:
        for tile in range(end, num_tiles):
            tl.store(rows_ptr + tile * TILE + tl.arange(0, TILE), -1)
            tl.store(tiles_ptr + tile, 0, is_layer)


def gather_rows(slots: torch.Tensor, adapted: torch.Tensor) -> AdapterRows:
    """slots: int32 [T], of each row. adapted: [slots, layers], what each slot has of each layer."""
    num_rows, (num_slots, num_layers) = len(slots), adapted.shape
    tile = FEW_ROWS_TILE if num_rows <= FEW_ROWS else MANY_ROWS_TILE
    groups = min(num_slots, num_rows)
    num_tiles = groups + (num_rows - groups) // tile
    rows = slots.new_empty((num_tiles, tile))
    tiles = slots.new_empty((num_layers, num_tiles))
    padded = triton.next_power_of_2(num_slots)
    _gather[(num_slots,)](
        slots, adapted, rows, tiles, num_rows, num_slots, num_layers, num_tiles, adapted.stride(0),
        TILE=tile, BLOCK=max(16, min(1024, MOST_COMPARED // padded)), SLOTS=padded,
        LAYERS=triton.next_power_of_2(num_layers),
    )  # fmt: skip
    # Behind the kernel, as an ordinary launch: the next ones read what it wrote before their wait.
    return AdapterRows(slots.long(), rows, tiles)

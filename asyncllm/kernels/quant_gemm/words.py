"""Codes of four bits as all kernels take them: words of eight, in tiles.

    tile of 8 rows and 128 columns:  16 words a row, row by row, 512 bytes
    word j of a row in a tile:       columns j, 16 + j, 32 + j, ..., lowest bits first
    matrix:                          8 rows tile by tile, then the next 8

A word's codes meet inputs that lie apart by as many as a tile's row has words, so neighbouring
words meet neighbouring inputs. What one copy brings of 8 rows, and what a warp reads at once, lies
in one piece.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 128  # columns of a tile
WORDS = 16  # of its rows; the least depth of a product of tensor cores
TILE_ROWS = 8


def num_words(rows: int, columns: int) -> tuple[int, int]:
    """Shape of int32 words that hold a matrix, padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // CHUNK) * WORDS


def to_words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns] below 16 -> int32 of `num_words`, zeros where there is no code."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % CHUNK, 0, -rows % TILE_ROWS))
    planes = padded.unflatten(1, (-1, 8, WORDS)).to(torch.int32)  # [rows, chunks, 8, WORDS]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device).view(8, 1)
    words = (planes << shifts).sum(2, dtype=torch.int32)
    return words.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).reshape(len(padded), -1)

"""Attention's softmax a tile of keys at a time, for the Triton kernels that read keys once.

A program keeps, for each of its query heads, the largest score so far, the sum of exp2(score -
best), and the values weighted so, which shrink when a larger score comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # scores are of base 2: their scale has this factor


@triton.jit
def start_softmax(HEADS: tl.constexpr, DIM: tl.constexpr):
    """(best [HEADS], total [HEADS], acc [HEADS, DIM]), before the first tile."""
    best = tl.full([HEADS], float("-inf"), tl.float32)
    return best, tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, DIM], tl.float32)


@triton.jit
def add_tile(scores, values, best, total, acc):
    """The same after a tile: scores [HEADS, TILE], of each head one finite; values [TILE, DIM]."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return new_best, total, acc


@triton.jit
def add_sink(sinks, best, total, acc):
    """The same after a score of each head that has no value: sinks [HEADS], of base 2."""
    new_best = tl.maximum(best, sinks)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + tl.exp2(sinks - new_best), acc * shrink[:, None]


@triton.jit
def scaled_scores(products, scale, SOFT_CAP: tl.constexpr, LOG2_E: tl.constexpr):
    """Scores of base 2 from q times k, whatever the layer does to them."""
    scores = products * scale
    if SOFT_CAP is not None:  # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = (2 * tl.sigmoid(scores * (2 / SOFT_CAP)) - 1) * SOFT_CAP
    return scores * LOG2_E

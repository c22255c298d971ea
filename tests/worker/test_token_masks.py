"""Token masks on the logits, bit by bit, and what the sampler makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.worker.token_masks import (
    LEAST_LOGIT,
    NO_MASK,
    RowMasks,
    TokenMaskBuffer,
    allows,
    apply_masks_torch,
)

INF = float("inf")


@pytest.mark.parametrize("vocab_size", [32, 40, 97])
def test_masked_rows_keep_what_is_allowed_and_others_everything(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((3, vocab_size)) < 0.5
    buffer = TokenMaskBuffer(6, vocab_size, torch.device("cpu"))
    host = buffer.host()
    assert host.dtype == np.int32 and host.shape == (6, -(-vocab_size // 32))
    host[:3] = 0
    for row, choices in enumerate(allowed):
        for token in range(vocab_size):
            bit = np.int32(np.uint32(1 << token % 32).view(np.int32))
            host[row, token // 32] |= bit if choices[token] else 0
    logits = torch.randn(6, vocab_size)
    expected = logits.clone()
    rows = [4, 0, 3]
    expected[rows] = expected[rows].masked_fill(torch.from_numpy(~allowed), -INF)
    masks = buffer.upload(np.array(rows, np.int32), 6)
    apply_masks_torch(logits, masks)
    assert torch.equal(logits, expected)
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(vocab_size))
    asked = allows(masks, pairs[:, 0], pairs[:, 1].int())
    assert torch.equal(asked.view(6, vocab_size), expected > -INF)


def test_what_is_allowed_is_possible_whatever_else_forbids_it() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF], [-INF, 1.0, -INF]])
    bits = torch.tensor([[0b101]], dtype=torch.int32)
    apply_masks_torch(logits, RowMasks(torch.tensor([NO_MASK, 0], dtype=torch.int32), bits))
    assert logits.tolist() == [
        [-INF, 1.0, -INF],
        [pytest.approx(LEAST_LOGIT), -INF, pytest.approx(LEAST_LOGIT)],
    ]
    assert (logits[1, 0] / 1e-5).isfinite(), "the smallest temperature that is not greedy"

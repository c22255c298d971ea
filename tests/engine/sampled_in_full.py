"""Which steps are sampled in full, not by the plain sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.worker.sampler import Sampler


def count_in_full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the rows of each such step. A start tries it too, twice with one row."""
    in_full: list[int] = []
    full = Sampler.full

    def counted(self: Sampler, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        in_full.append(len(logits))
        return full(self, logits, *args)

    monkeypatch.setattr(Sampler, "full", counted)
    return in_full

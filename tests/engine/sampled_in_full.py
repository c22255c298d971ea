"""Which steps are sampled in full, not plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.worker import step_sampling
from asyncllm.worker.sampler import SampleSlots, sample_fully


def count_in_full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the rows of each such step."""
    in_full: list[int] = []

    def counted(sample: SampleSlots, state: Any, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        in_full.append(len(logits))
        return sample_fully(sample, state, logits, *args)

    monkeypatch.setattr(step_sampling, "sample_fully", counted)
    return in_full

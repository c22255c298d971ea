"""Small steps are quickest on one thread, and on a busy machine a second one only waits."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)

"""Small steps are quickest on one thread, and on a busy machine a second one only waits."""

from __future__ import annotations

import pytest
import torch

from tests.text.conftest import byte_level, model_folder

__all__ = ["byte_level", "model_folder"]  # fixtures


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)

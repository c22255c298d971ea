"""For all tests."""

from __future__ import annotations

import torch

# Small steps are quickest on one thread, and two processes of tests share two cores.
torch.set_num_threads(1)

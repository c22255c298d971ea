"""For all tests."""

from __future__ import annotations

import os

import torch

# Small steps are quickest on one thread, and two processes of tests share two cores.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # the processes that tests start
# Read when Triton is imported: its kernels then run without a device, slowly.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

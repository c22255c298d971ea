"""Imports FlashInfer the one way that this project has tested. Import it from here only.

FlashInfer reads its environment when imported: without FLASHINFER_USE_CUDA_NORM its norms need a
compiler of its own (cute-dsl) that it does not depend on. Tested with 0.6.12.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")

import flashinfer
from flashinfer.xqa import xqa

__all__ = ["flashinfer", "xqa"]

"""torch, the CUDA context and FlashInfer, begun in a thread while the main thread imports the rest.

They wait for a disk and a driver, often without the GIL. What fails here fails again, with its
message, where it is really needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from contextlib import suppress


def preload() -> None:
    """Start, and return at once. For commands that may use a CUDA device."""
    threading.Thread(target=_preload, name="asyncllm-preload", daemon=True).start()


def _preload() -> None:
    with suppress(Exception):
        import torch

        if torch.cuda.is_available():
            torch.cuda.init()
            torch.cuda.synchronize()  # makes the context
            if importlib.util.find_spec("flashinfer") is not None:
                importlib.import_module("asyncllm.attention.flashinfer")

"""Imports FlashInfer the one way that this project has tested. Import it from here only.

FlashInfer compiles a module that it does not find, silently and for minutes: here it says so first.
Tested with 0.6.12.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

import flashinfer
import flashinfer.prefill
from flashinfer.jit.core import JitSpec
from flashinfer.xqa import xqa

logger = logging.getLogger("asyncllm")


def _announce_compilation() -> None:
    """Log one line before FlashInfer compiles a module; another version may have other methods."""
    compile_module = getattr(JitSpec, "build", None)
    if compile_module is None:
        logger.warning("this FlashInfer compiles its kernels in a way unknown to asyncllm")
        return

    @wraps(compile_module)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_compiled:
            logger.info("compiling the FlashInfer kernels %s, this once: minutes", self.name)
        compile_module(self, *args, **kwargs)

    JitSpec.build = build


_announce_compilation()

__all__ = ["flashinfer", "xqa"]

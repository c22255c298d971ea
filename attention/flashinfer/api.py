"""FlashInfer's names, public and private: the one file that imports it, for one tested version.

The public ones are required: where they cannot be imported, importing this raises an `ImportError`
that says why, and `auto` takes the next backend. The private one saves time on the host and is
called with the arguments of `TESTED_VERSION`: with any other, or where it is gone, it is None and
the public calls do the work. The compiler's (`jit`) are used with any version that has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

logger = logging.getLogger("asyncllm")

TESTED_VERSION = "0.6.12"

try:
    import flashinfer
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
except Exception as error:  # its dependencies raise what they like
    raise ImportError(f"FlashInfer cannot be imported: {error!r}") from error


class Jit(NamedTuple):
    """FlashInfer's compiler: what makes modules, lists them, and knows where they are."""

    registry: Any
    env: ModuleType
    gen_batch_prefill_module: Callable[..., Any]


def _find_prefill_module() -> Callable[..., Any] | None:
    version = getattr(flashinfer, "__version__", None)
    reason = f"it is version {version}, {TESTED_VERSION} was tested"
    if version == TESTED_VERSION:
        try:
            from flashinfer.prefill import get_batch_prefill_module
        except ImportError as error:
            reason = str(error)
        else:
            return get_batch_prefill_module
    logger.warning("falling back to FlashInfer's public calls, which are slower: %s", reason)
    return None


def _find_jit() -> Jit | None:
    try:
        from flashinfer.jit import env, gen_batch_prefill_module
        from flashinfer.jit.core import JitSpec, jit_spec_registry

        _announce_compilation(JitSpec)
    except (ImportError, AttributeError) as error:
        logger.warning("FlashInfer compiles its kernels unannounced and unlisted: %s", error)
        return None
    return Jit(jit_spec_registry, env, gen_batch_prefill_module)


def _announce_compilation(spec: Any) -> None:
    """Log a line before a module is compiled: FlashInfer does it silently, and for minutes."""
    compile_module, _ = spec.build, spec.is_compiled  # raises here where one is gone

    @wraps(compile_module)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_compiled:
            logger.info("compiling the FlashInfer kernels %s, this once: minutes", self.name)
        compile_module(self, *args, **kwargs)

    spec.build = build


# Gives the compiled module that the public calls look up and check each time.
get_batch_prefill_module = _find_prefill_module()
jit = _find_jit()

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "get_batch_prefill_module", "jit"]

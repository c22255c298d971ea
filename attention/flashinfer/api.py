"""The only file that imports FlashInfer: its public and private names, for one tested version.

The public names are required. If they cannot be imported, this module raises an `ImportError` that
says why, and `auto` uses the next backend. The private function saves time on the host; it is
called with the arguments of `TESTED_VERSION`. With another version, or if it is missing, it is None
and public calls are used. The compiler (`jit`) is used with any version that has it.
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
except Exception as error:  # its dependencies may raise anything
    raise ImportError(f"FlashInfer cannot be imported: {error!r}") from error


class Jit(NamedTuple):
    """FlashInfer's compiler, its registry of modules, and its folders."""

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
    """Log a line before a module is compiled, which FlashInfer does silently, for minutes."""
    compile_module, _ = spec.build, spec.is_compiled  # raises here if one is missing

    @wraps(compile_module)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_compiled:
            logger.info("compiling the FlashInfer kernels %s, this once: minutes", self.name)
        compile_module(self, *args, **kwargs)

    spec.build = build


# Returns the compiled module, which public calls look up and check each time.
get_batch_prefill_module = _find_prefill_module()
jit = _find_jit()

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "get_batch_prefill_module", "jit"]

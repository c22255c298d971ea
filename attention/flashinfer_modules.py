"""Which FlashInfer modules a model needs on a device, and making those that are not there.

FlashInfer compiles a module at its first use, for minutes, into a cache keyed by its version and
the architecture (~/.cache/flashinfer, or FLASHINFER_WORKSPACE_BASE); a package of ready-made ones
is looked at first. Listed here is what attention/flashinfer.py calls; `asyncllm kernels build` says
what a start loaded besides.
The generators are FlashInfer's own surface, tested with 0.6.12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

import torch
from flashinfer.jit import env, gen_batch_prefill_module
from flashinfer.jit.core import jit_spec_registry
from flashinfer.jit.xqa import gen_xqa_module

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.flashinfer import xqa_supports
from asyncllm.attention.flashinfer_prefill import prefill_backend

PARALLEL_BUILDS = 4  # each runs its own compilers side by side


class Buildable(Protocol):
    """A library that can be compiled ahead: FlashInfer's or our own."""

    @property
    def name(self) -> str: ...
    @property
    def is_built(self) -> bool: ...
    def build(self) -> Buildable: ...


class Module:
    """One compiled library of FlashInfer."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.name: str = spec.name

    @property
    def is_built(self) -> bool:
        return bool(self._spec.is_compiled)

    def build(self) -> Module:
        """Compile it. Raises `RuntimeError` with the compiler's words."""
        self._spec.build(verbose=False)
        return self


def modules_for(
    layers: list[AttentionLayer], dtype: torch.dtype, block_size: int, capability: tuple[int, int]
) -> list[Module]:
    """What a model with these layers needs; none of it is built or loaded by asking."""
    specs = []
    dim = layers[0].head_dim
    for window in sorted({layer.window for layer in layers}, key=lambda w: w or 0):
        backend = prefill_backend(capability, window)
        has_window = window is not None
        dtypes = (dtype, dtype, dtype, torch.int32)
        specs.append(
            gen_batch_prefill_module(backend, *dtypes, dim, dim, 0, has_window, False, False)
        )
        if xqa_supports(capability, dim, block_size):
            group = layers[0].num_heads // layers[0].num_kv_heads
            specs.append(gen_xqa_module(dtype, dtype, block_size, dim, group, has_window, dtype))
    return [Module(spec) for spec in specs]


def build_all(modules: Sequence[Buildable]) -> Iterator[Buildable]:
    """Compile, several at a time; yields each when it is there."""
    with ThreadPoolExecutor(PARALLEL_BUILDS, "asyncllm-build") as threads:
        for future in as_completed([threads.submit(module.build) for module in modules]):
            yield future.result()


def used_modules() -> set[str]:
    """Names of all modules that this process has asked for."""
    return set(jit_spec_registry.get_all_specs())


def cache_folder() -> Path:
    return Path(env.FLASHINFER_JIT_DIR)

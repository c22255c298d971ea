"""The FlashInfer modules that a model needs on a device, for compiling them ahead.

FlashInfer compiles a module at its first use, for minutes, into a cache keyed by its version and
the architecture (~/.cache/flashinfer, or FLASHINFER_WORKSPACE_BASE), unless a package of prebuilt
modules has it. This lists the modules that asyncllm calls; `asyncllm kernels build` reports others
that a start has loaded. Without FlashInfer's compiler (`jit` in api.py) the list is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.flashinfer.api import jit
from asyncllm.attention.flashinfer.prefill import position_mode, prefill_backend
from asyncllm.attention.layer_kinds import LayerKinds

PARALLEL_BUILDS = 4  # each runs several compiler processes


class Buildable(Protocol):
    """A library that can be compiled ahead, FlashInfer's or our own."""

    @property
    def name(self) -> str: ...
    @property
    def is_built(self) -> bool: ...
    def build(self) -> Buildable: ...


class Module:
    """A compiled library of FlashInfer."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.name: str = spec.name

    @property
    def is_built(self) -> bool:
        return bool(self._spec.is_compiled)

    def build(self) -> Module:
        """Compile it. Raises `RuntimeError` with the compiler's output."""
        self._spec.build(verbose=False)
        return self


def modules_for(
    layers: list[AttentionLayer],
    dtype: torch.dtype,
    capability: tuple[int, int],
    kv_dtype: torch.dtype | None = None,
) -> list[Module]:
    """All modules for a model with these layers; builds and loads none. kv_dtype: the pages'; None:
    that of the model."""
    kv_dtype = kv_dtype or dtype
    if jit is None:
        return []
    specs: dict[str, Any] = {}  # by name, as layers that differ in other ways share a module
    for layer in LayerKinds([each for each in layers if each.latent_dim is None]).layers:
        dim, has_window = layer.head_dim, layer.window is not None
        spec = jit.gen_batch_prefill_module(
            prefill_backend(capability, layer, kv_dtype.itemsize == 1), dtype, kv_dtype, dtype,
            torch.int32, dim, dim, position_mode(layer), has_window, layer.soft_cap is not None,
            False,
        )  # fmt: skip
        specs[spec.name] = spec
    return [Module(spec) for spec in specs.values()]


def build_all(modules: Sequence[Buildable]) -> Iterator[Buildable]:
    """Compile several modules at a time; yields each when it is done."""
    with ThreadPoolExecutor(PARALLEL_BUILDS, "asyncllm-build") as threads:
        for future in as_completed([threads.submit(module.build) for module in modules]):
            yield future.result()


def used_modules() -> set[str]:
    """Names of all modules that this process has requested."""
    return set() if jit is None else set(jit.registry.get_all_specs())


def cache_folder() -> Path | None:
    return None if jit is None else Path(jit.env.FLASHINFER_JIT_DIR)

"""`asyncllm kernels build|list MODEL`: the CUDA kernels of a model, made before the first start.

FlashInfer's modules and our own are compiled side by side, each into their own cache; then the
engine starts once with made-up weights, which compiles the Triton kernels into Triton's. The caches
are keyed by version and architecture, and the next start finds everything there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from asyncllm.commands.triton_kernels import print_compiled, read_list, write_list
from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.host import cache_folder

if TYPE_CHECKING:
    from asyncllm.attention.flashinfer.modules import Buildable

HELP = "make or list the CUDA kernels that a model needs"
SMALL: dict[str, Any] = {"load_format": "dummy", "swap_space": 0.0, "skip_tokenizer_init": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("build", "list"), metavar="build|list")


def run(engine_args: EngineArgs, options: argparse.Namespace) -> int:
    config = engine_args.create_engine_config()
    if (reason := nothing_to_build(config)) is not None:
        print(f"nothing to build: {reason}")
        return 0
    modules = modules_of(config)
    for module in modules:
        print(f"{'built  ' if module.is_built else 'missing'} {module.name}")
    missing = [module for module in modules if not module.is_built]
    if options.action == "list":
        is_whole = _print_triton(config) and not missing
        _print_folders()
        return 0 if is_whole else 1
    _build(missing)
    _compile_triton(engine_args, config)
    return 0


def nothing_to_build(config: EngineConfig) -> str | None:
    """Why this device and these flags need no compiled kernels; None where they do."""
    if config.device != "cuda":
        return "there is no CUDA device here; the CPU runs torch's own kernels"
    if config.dtype == "float32":
        return "float32 runs torch's own kernels"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'asyncllm[cuda]'); torch's kernels run"
    return None


def modules_of(config: EngineConfig) -> list[Buildable]:
    """FlashInfer's modules and ours for this model on the first CUDA device."""
    import torch

    from asyncllm.attention.flashinfer.modules import modules_for
    from asyncllm.kernels.registry import libraries
    from asyncllm.models.registry import settle
    from asyncllm.worker.kernel_prewarm import early_start

    config, _ = settle(config)
    start = early_start(config, torch.device("cuda"))
    capability = torch.cuda.get_device_capability()
    modules = modules_for(list(start.layers), start.dtype, capability, start.kv_dtype)
    return [*modules, *libraries(start)]


def _build(missing: list[Buildable]) -> None:
    from asyncllm.attention.flashinfer.modules import build_all

    start = time.perf_counter()
    for number, module in enumerate(build_all(missing), 1):
        seconds = time.perf_counter() - start
        print(f"[{number}/{len(missing)}] {seconds:6.1f} s  {module.name}", flush=True)


def _compile_triton(engine_args: EngineArgs, config: EngineConfig) -> None:
    """By starting the engine with made-up weights, as `serve` would start it with real ones."""
    from asyncllm.attention.flashinfer import modules
    from asyncllm.engine.async_engine import AsyncLLMEngine

    print("Triton kernels, by a start with made-up weights:", flush=True)

    async def start() -> dict[str, Any]:
        args = {**vars(engine_args), **SMALL}
        async with AsyncLLMEngine.from_engine_args(EngineArgs(**args)) as engine:
            return engine.startup

    with print_compiled() as launched:
        startup = asyncio.run(start())
    write_list(config, launched)
    print(f"{len(set(launched))} are there")
    unlisted = modules.used_modules() - {module.name for module in modules_of(config)}
    if unlisted:
        print(f"also loaded: {', '.join(sorted(unlisted))}")
    print(f"start: {startup['seconds']}\nFlashInfer's cache: {modules.cache_folder()}")


def _print_triton(config: EngineConfig) -> bool:
    """Whether all of Triton's are there."""
    kernels = read_list(config)
    if kernels is None:
        print("missing Triton's kernels: no build of this model has been here")
        return False
    names = Counter((kernel.is_built, kernel.name) for kernel in kernels)
    for (is_built, name), number in sorted(names.items()):
        variants = f", {number} variants" if number > 1 else ""
        print(f"{'built  ' if is_built else 'missing'} {name} (Triton{variants})")
    return all(kernel.is_built for kernel in kernels)


def _print_folders() -> None:
    from triton import knobs

    from asyncllm.attention.flashinfer import modules

    print(f"FlashInfer's cache: {modules.cache_folder()}")
    print(f"Triton's cache: {knobs.cache.dir}\nour own: {cache_folder()}")

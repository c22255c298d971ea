"""`asyncllm doctor [MODEL]`: what this machine has, what is missing, and what a model takes of it.

Each check is one line: ok, a note (works, could be better), or MISSING, which ends with exit code 1
and says what to install. Version ranges are those of the installed package itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from asyncllm.commands import kernels
from asyncllm.config import GIB, EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.host import num_cores
from asyncllm.hub.files import Part, missing_parts
from asyncllm.model_config import hub_repo

HELP = "say what this machine has, what is missing, and what a model needs"
State = Literal["ok", "note", "MISSING"]
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
CPU_FEATURES_ARM = ("asimd", "bf16", "i8mm", "sve")
MIN_CAPABILITY = (8, 0)
MAX_MODULES_WITHOUT_BYTECODE = 50
# Distribution -> the import that proves it, the extra that brings it.
GPU_PACKAGES = {"flashinfer-python": ("flashinfer", "cuda"), "flash-attn": ("flash_attn", "")}


@dataclass(frozen=True, slots=True)
class Finding:
    section: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(engine_args: EngineArgs, options: argparse.Namespace) -> int:
    findings = list(examine(engine_args))
    missing = [finding for finding in findings if finding.state == "MISSING"]
    if options.json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not missing, "findings": rows}))
    else:
        _print(findings)
    return 1 if missing else 0


def examine(engine_args: EngineArgs) -> Iterator[Finding]:
    """Every check, in the order of its printing."""
    yield from _machine()
    yield from _packages()
    yield from _gpu()
    yield from _model(engine_args)
    yield _bytecode()


def _bytecode() -> Finding:
    """Counts among what the checks above have imported, which is most of what a start imports."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    cached = [spec.cached for spec in specs if spec is not None and spec.cached is not None]
    missing = sum(not Path(file).exists() for file in cached)
    if missing <= MAX_MODULES_WITHOUT_BYTECODE:
        return Finding("start", "bytecode", "there")
    advice = f"each start compiles them; python -m compileall -q {sysconfig.get_path('purelib')}"
    return Finding("start", "bytecode", f"missing for {missing} modules", "note", advice)


# --- the machine ------------------------------------------------------------------------------


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", f"{platform.system()} {platform.machine()}")
    yield _in_range("python", platform.python_version(), _own_metadata().get("Requires-Python", ""))
    model, flags = _cpu_info()
    wanted = CPU_FEATURES if platform.machine() == "x86_64" else CPU_FEATURES_ARM
    has = [name for name in wanted if name in flags]
    yield Finding(
        "machine", "cpu", f"{model}, {num_cores()} cores, {' '.join(has) or 'no features'}"
    )
    yield Finding("machine", "memory", f"{_memory_bytes() / GIB:.1f} GiB")


def _cpu_info() -> tuple[str, set[str]]:
    """Name and feature flags; where the system does not say, the architecture and none."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    entries = dict(reversed([_split(line) for line in lines if ":" in line]))
    flags = entries.get("flags", entries.get("Features", ""))
    return entries.get("model name", platform.machine()), set(flags.split())


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- packages ---------------------------------------------------------------------------------


def _own_metadata() -> Any:
    return importlib.metadata.metadata("asyncllm")


def _packages() -> Iterator[Finding]:
    """Every dependency against the range that this version of the package was tested with."""
    from packaging.requirements import Requirement

    yield Finding("packages", "asyncllm", importlib.metadata.version("asyncllm"))
    for text in importlib.metadata.requires("asyncllm") or []:
        requirement = Requirement(text)
        extra = requirement.marker is not None
        if extra and requirement.name not in GPU_PACKAGES:
            continue
        if (found := _version(requirement.name)) is not None:
            yield _in_range(requirement.name, found, str(requirement.specifier), "packages")
        elif not extra:
            advice = f"pip install '{requirement}'"
            yield Finding("packages", requirement.name, "not installed", "MISSING", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_range(name: str, found: str, specifier: str, section: str = "machine") -> Finding:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(specifier).contains(found, prereleases=True):
        return Finding(section, name, found)
    advice = f"tested with {specifier}"
    return Finding(section, name, found, "note", advice)


# --- GPU --------------------------------------------------------------------------------------


def _gpu() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return  # said above, as a missing package
    import torch

    driver = _driver()
    if driver is not None:
        yield Finding("gpu", "driver", driver)
    if not torch.cuda.is_available():
        yield _no_gpu(driver, torch.version.cuda)
        return
    yield Finding("gpu", "cuda", f"{torch.version.cuda} of torch {torch.__version__}")
    for index in range(torch.cuda.device_count()):
        yield _device(torch.cuda.get_device_properties(index), index)
    if importlib.util.find_spec("flashinfer") is None:
        advice = "pip install 'asyncllm[cuda]': without it torch's attention runs, slowly"
        yield Finding("gpu", "flashinfer", "not installed", "MISSING", advice)
    for tool, why in {"nvcc": "compiles FlashInfer's kernels", "ninja": "the same"}.items():
        found = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
        advice = "" if found else f"{why} where no ready-made ones are installed"
        yield Finding("gpu", tool, found or "not found", "ok" if found else "note", advice)


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    return (
        file.read_text().splitlines()[0].removeprefix("NVRM version: ") if file.exists() else None
    )


def _no_gpu(driver: str | None, torch_cuda: str | None) -> Finding:
    if driver is None:
        return Finding("gpu", "device", "none: the CPU is used")
    if torch_cuda is None:
        advice = "install the torch build for CUDA (pytorch.org says which for this driver)"
        return Finding("gpu", "device", "this torch is built without CUDA", "MISSING", advice)
    advice = f"torch needs CUDA {torch_cuda}: update the driver, or install an older CUDA build"
    return Finding("gpu", "device", "torch finds none", "MISSING", advice)


def _device(properties: Any, index: int) -> Finding:
    capability = properties.major, properties.minor
    text = (
        f"{properties.name}, sm_{capability[0]}{capability[1]}, "
        f"{properties.total_memory / GIB:.1f} GiB, {properties.multi_processor_count} SMs"
    )
    if capability < MIN_CAPABILITY:
        return Finding("gpu", f"device {index}", text, "MISSING", "needs sm_80 (Ampere) or newer")
    return Finding("gpu", f"device {index}", text)


# --- a model ----------------------------------------------------------------------------------


def _model(engine_args: EngineArgs) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    from asyncllm.models.registry import settle

    try:
        # Dummy weights: what is on the hub is judged by its small files, before all of it is here.
        asked = replace(engine_args, load_format="dummy").create_engine_config()
        config, model = settle(asked)
        name = Finding("model", "name", f"{config.model.path} ({config.model.architecture})")
        found = [*_files(engine_args, config.model.path), *_needs(config, model)]
    except (ModelLoadError, ValueError) as error:  # which may come late: one line in any case
        yield Finding("model", "name", str(error), "MISSING", "another folder, or another flag")
        return
    fallback = config.model.fallback
    state: State = "note" if fallback else "ok"
    implementation = config.model.implementation
    yield from (name, Finding("model", "implementation", implementation, state, fallback), *found)
    if left_out := getattr(model, "left_out", ()):
        text = f"text alone, without {', '.join(left_out)}"
        yield Finding("model", "towers", text, "note", "images and sound are not served")
    if kernels.nothing_to_build(config) is None:
        modules = kernels.modules_of(config)
        absent = [module.name for module in modules if not module.is_built]
        state = "note" if absent else "ok"
        advice = "asyncllm kernels build MODEL: else the first start compiles them"
        built = f"{len(modules) - len(absent)} of {len(modules)} FlashInfer modules built"
        yield Finding("model", "kernels", built, state, advice if absent else "")


def _files(engine_args: EngineArgs, folder: Path) -> Iterator[Finding]:
    """Whether weights and tokenizer are there, where they are wanted."""
    needs: list[Part] = [] if engine_args.load_format == "dummy" else ["weights"]
    if not (engine_args.skip_tokenizer_init or engine_args.tokenizer):
        needs.append("tokenizer")
    missing = missing_parts(folder, needs)
    if not missing:
        yield Finding("model", "files", "there")
    elif hub_repo(engine_args.model, engine_args.revision) is not None:
        advice = f"asyncllm pull {engine_args.model}, or the first start downloads it"
        yield Finding("model", "files", f"no {' and '.join(missing)} here yet", "note", advice)
    else:
        advice = "safetensors and a tokenizer.json; see --load-format, --tokenizer"
        yield Finding("model", "files", f"no {' and '.join(missing)}", "MISSING", advice)


def _needs(config: Any, model: Any) -> Iterator[Finding]:
    """Weights, KV bytes per token, and how many tokens fit beside the weights. `model`: without
    memory."""
    import torch

    from asyncllm.attention.cache_spec import CacheLayout
    from asyncllm.attention.state_cache import StateLayout
    from asyncllm.cache_group import num_blocks_that_fit
    from asyncllm.worker.memory import CPU_KV_SHARE, GRAPH_RESERVE_BYTES, plan_snapshots

    weights = sum(load.num_bytes for load in model.loads())
    kv_dtype = getattr(torch, config.kv_cache_dtype)
    layout = CacheLayout(model.attention_layers, config.block_size, kv_dtype)
    per_token = layout.windows.count(None) * layout.page_bytes // config.block_size
    windows = ", ".join(f"{w} tokens" for w in dict.fromkeys(layout.windows) if w is not None)
    beside = f", and for each sequence a window of {windows}" if windows else ""
    yield Finding("model", "weights", f"{weights / GIB:.2f} GiB in {config.dtype}")
    yield Finding("model", "kv per token", f"{per_token} bytes{beside}")
    if config.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        room = total * config.gpu_memory_utilization - weights - GRAPH_RESERVE_BYTES
    else:
        total = _memory_bytes()
        room = min(total * CPU_KV_SHARE, total - weights)
    states = StateLayout(model.state_layers)
    num_snapshots = plan_snapshots(config, states, int(room))
    state_bytes = (config.num_slots + num_snapshots) * states.row_bytes
    if states.row_bytes:
        sizes = f"{states.row_bytes} bytes, for {config.num_slots} slots, {num_snapshots} snapshots"
        yield Finding("model", "state per sequence", f"{sizes}: {state_bytes / GIB:.2f} GiB")
    num_pages = max(0, layout.num_pages_in(int(room) - state_bytes))
    groups = layout.groups(config.max_num_batched_tokens)
    tokens = num_blocks_that_fit(groups, num_pages, num_pages) * config.block_size
    least = config.max_model_len or config.block_size
    fits: State = "ok" if tokens >= least else "MISSING"
    advice = "" if fits == "ok" else f"needs {least}: a smaller model, or a larger device"
    if fits != "ok" and states.row_bytes:
        advice += ", or a lower --max-num-seqs"
    text = f"about {tokens} of KV cache in {total / GIB:.1f} GiB (activations not counted)"
    yield Finding("model", "tokens that fit", text, fits, advice)
    if kernels.nothing_to_build(config) is None and config.attention_backend != "torch":
        yield from _attention(config, model.attention_layers)


def _attention(config: Any, layers: Sequence[Any]) -> Iterator[Finding]:
    """Which kernel decodes which layers on the first CUDA device, and why not another."""
    import torch

    from asyncllm.attention.layer_kinds import LayerKinds
    from asyncllm.kernels import balanced_decode

    kinds, capability = LayerKinds(layers), torch.cuda.get_device_capability()
    for number, layer in enumerate(kinds.layers):
        limit = balanced_decode.limit(
            layer, getattr(torch, config.kv_cache_dtype), config.block_size
        )
        if capability not in balanced_decode.KERNEL.capabilities:
            limit = f"compute capability {capability}"
        kernel = "paged_decode" if limit else "balanced_decode"
        if layer.latent_dim is not None:
            kernel, limit = "latent_attention", "latents"
        reason = f"balanced_decode does not do {limit}" if limit else ""
        alike = [index for index, other in kinds.number_of.items() if other == number]
        text = f"{kernel} decodes {len(alike)} layers like layer {layer.index}"
        yield Finding("model", f"attention {number}", text, advice=reason)


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(section)
        advice = f"  <- {finding.advice}" if finding.advice else ""
        print(f"  {finding.state:8}{finding.name:{width}}  {finding.value}{advice}")
    sys.stdout.flush()

"""`asyncllm doctor [MODEL]`: what this machine has, what is missing, and what a model takes of it.

Each check is one line: ok, a note (works, could be better), or MISSING, which ends with exit code 1
and says what to install. Version ranges are those of the installed package itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncllm.commands.doctor_model import Finding, examine_model
from asyncllm.config import GIB, EngineArgs
from asyncllm.host import memory_bytes, num_cores

HELP = "say what this machine has, what is missing, and what a model needs"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
CPU_FEATURES_ARM = ("asimd", "bf16", "i8mm", "sve")
MIN_CAPABILITY = (8, 0)
MAX_MODULES_WITHOUT_BYTECODE = 50
GPU_PACKAGES = ("flashinfer-python", "flash-attn")  # whose ranges are checked where installed


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
    yield from examine_model(engine_args)
    yield _bytecode()


def _bytecode() -> Finding:
    """Counts among what the checks above have imported, which is most of what a start imports."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    cached = [(spec.cached, spec.origin) for spec in specs if spec is not None and spec.cached]
    missing = [origin for file, origin in cached if not Path(file).exists()]
    if len(missing) <= MAX_MODULES_WITHOUT_BYTECODE:
        return Finding("start", "bytecode", "there")
    roots = (sysconfig.get_path("purelib"), str(Path(__file__).parents[2]))  # or a checkout
    folders = [
        root for root in dict.fromkeys(roots) if any(str(file).startswith(root) for file in missing)
    ]
    advice = f"each start compiles them; python -m compileall -q {' '.join(folders)}"
    return Finding("start", "bytecode", f"missing for {len(missing)} modules", "note", advice)


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
    yield Finding("machine", "memory", f"{memory_bytes() / GIB:.1f} GiB")


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


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(section)
        advice = f"  <- {finding.advice}" if finding.advice else ""
        print(f"  {finding.state:8}{finding.name:{width}}  {finding.value}{advice}")

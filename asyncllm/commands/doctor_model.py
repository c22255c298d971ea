"""A model's part of `asyncllm doctor MODEL`: its files, what it takes here, its kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from asyncllm.commands import kernels
from asyncllm.config import GIB, EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.host import memory_bytes
from asyncllm.hub.files import Part, missing_parts
from asyncllm.model_config import hub_repo

State = Literal["ok", "note", "MISSING"]


@dataclass(frozen=True, slots=True)
class Finding:
    section: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def examine_model(engine_args: EngineArgs) -> Iterator[Finding]:
    """Say what a model has, what it takes of this machine, and which kernels run it."""
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
        yield Finding("model", "name", str(error), "MISSING")
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
        total = memory_bytes()
        room = min(total * CPU_KV_SHARE, total - weights)
    room = config.kv_cache_memory_bytes or room
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

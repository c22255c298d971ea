"""Weights into a model, by a walk over its table of (checkpoint name, view to fill).

Everything that can be wrong with names, shapes and dtypes is found from the files' headers, before
the first weight is read. Then each tensor goes from its file straight into its view: on CUDA by
weight_stream.py where its bytes go as they are, else from the mapped file, converted on the way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncllm.config import LoadFormat
from asyncllm.errors import ModelLoadError
from asyncllm.models.base import CausalLM
from asyncllm.models.checkpoint import Checkpoint, list_keys
from asyncllm.models.weight_stream import Span, stream_weights
from asyncllm.progress import DELAY_S, ProgressBar

BUFFERS = ("rotary_emb.inv_freq",)  # no weights, but old checkpoints hold them
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """`bytes` are the weights' on the device; dummy weights come from 0 files."""

    bytes: int
    files: int
    seconds: float


def load_weights(
    model: CausalLM, folder: Path, load_format: LoadFormat, seed: int, progress: bool
) -> LoadSummary:
    """Fill every weight of `model`; "auto" and "safetensors" are the same.

    seed: of the dummy weights. progress: show a bar where loading takes more than two seconds.
    Raises `ModelLoadError` naming file and key.
    """
    start = time.perf_counter()
    views = dict(model.checkpoint_tensors())
    if load_format == "dummy":
        num_files = 0
        _fill_dummy(views, seed)
    else:
        checkpoint = Checkpoint(folder)
        num_files = checkpoint.num_files
        _check(checkpoint, views, model.aliases)
        _copy(checkpoint, views, progress)
    num_bytes = sum(view.nbytes for view in views.values())
    return LoadSummary(num_bytes, num_files, time.perf_counter() - start)


def _copy(checkpoint: Checkpoint, views: Mapping[str, torch.Tensor], progress: bool) -> None:
    with ProgressBar(
        total=sum(view.nbytes for view in views.values()),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        delay=DELAY_S,
        disable=not progress,
    ) as bar:
        streamed = {name: view for name, view in views.items() if _streams(checkpoint, name, view)}
        for name, view in views.items():
            if name not in streamed:
                view.copy_(checkpoint.read(name))
                bar.update(view.nbytes)
        if streamed:
            device = next(iter(streamed.values())).device
            spans = [Span(*checkpoint.place(name), view) for name, view in streamed.items()]
            for num_bytes in stream_weights(spans, device):
                bar.update(num_bytes)


def _streams(checkpoint: Checkpoint, name: str, view: torch.Tensor) -> bool:
    """Whether the file's bytes are the view's, on a device that is worth a pinned buffer."""
    same_dtype = DTYPES.get(checkpoint.header(name)[1]) == view.dtype
    return view.device.type == "cuda" and same_dtype and view.is_contiguous()


def _check(
    checkpoint: Checkpoint, views: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> None:
    """That the checkpoint is exactly what the model takes, copies and old buffers aside."""
    if missing := views.keys() - checkpoint.names:
        raise ModelLoadError(f"{checkpoint.source}: missing tensors: {list_keys(missing)}")
    if unexpected := {
        name
        for name in checkpoint.names - views.keys() - aliases.keys()
        if not name.endswith(BUFFERS)
    }:
        file = checkpoint.file(min(unexpected))
        raise ModelLoadError(f"{file}: unexpected tensors: {list_keys(unexpected)}")
    for name, view in views.items():
        shape, dtype = checkpoint.header(name)
        if shape != list(view.shape):
            raise _misfit(
                checkpoint, name, f"has shape {shape}, config.json says {list(view.shape)}"
            )
        if dtype not in DTYPES:
            raise _misfit(checkpoint, name, f"has dtype {dtype}, not one of {', '.join(DTYPES)}")
    for alias in aliases.keys() & checkpoint.names:
        if not torch.equal(checkpoint.read(alias), checkpoint.read(aliases[alias])):
            raise _misfit(
                checkpoint, alias, f"differs from {aliases[alias]}, to which config.json ties it"
            )


def _misfit(checkpoint: Checkpoint, name: str, message: str) -> ModelLoadError:
    return ModelLoadError(f"{checkpoint.file(name)}: {name} {message}")


def _fill_dummy(views: Mapping[str, torch.Tensor], seed: int) -> None:
    """Normal values, and ones for the norms, which are the one-dimensional weights. In place."""
    device = next(iter(views.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in views.items():
        if view.dim() == 1 and name.endswith(".weight"):
            view.fill_(1.0)
        else:
            view.normal_(0.0, DUMMY_STD, generator=generator)

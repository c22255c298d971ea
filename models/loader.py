"""Loads weights into a model, by its `Load`s.

Names, shapes and dtypes are checked by the files' headers before the first weight is read. Then
each tensor is read into its view: on CUDA by weight_stream.py, if its bytes need no conversion,
else from the memory-mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from tqdm import tqdm

from asyncllm.config import LoadFormat
from asyncllm.errors import ModelLoadError
from asyncllm.gguf_file import LINK
from asyncllm.models.base import CausalLM, Load
from asyncllm.models.checkpoint import Checkpoint, list_keys
from asyncllm.models.gguf_checkpoint import GGUFCheckpoint
from asyncllm.models.weight_stream import Span, stream_weights

AnyCheckpoint = Checkpoint | GGUFCheckpoint
BUFFERS = ("rotary_emb.inv_freq",)  # not weights, but in old checkpoints
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")  # of an FP8 KV cache
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
PLAIN_FLOATS = frozenset(FLOATS.values())
DTYPES = {**FLOATS, **INTEGERS, "F8_E4M3": torch.float8_e4m3fn}
STREAMED_DEVICES = ("cuda",)
# Ends of names, the latter two of stacked experts. What else is made of a file are scales.
WEIGHTS = ".weight", ".bias", "_proj", "_proj_bias"
DUMMY_STD = 0.02
DUMMY_EXPONENTS = 118, 122  # exponents of numbers of about this size
DELAY_S = 2.0


class ProgressBar(tqdm):
    """A progress bar without tqdm's monitor thread, which would outlive the engine."""

    monitor_interval = 0


def load_weights(
    model: CausalLM, folder: Path, load_format: LoadFormat, seed: int, progress: bool
) -> None:
    """Fill every weight of `model`; "auto" and "safetensors" are the same.

    seed: for dummy weights. progress: show a bar if loading takes longer than two seconds.
    Raises `ModelLoadError` naming file and key.
    """
    loads = list(model.loads())
    if load_format == "dummy":
        _fill_dummy(loads, seed)
    else:
        checkpoint = open_checkpoint(folder)
        _check(checkpoint, loads, model.aliases)
        _copy(checkpoint, loads, progress)
    model.finish_loading()


def open_checkpoint(folder: Path) -> AnyCheckpoint:
    """Raises `ModelLoadError` naming the file."""
    file = folder / LINK
    return GGUFCheckpoint(file) if file.is_file() else Checkpoint(folder)


def stored_names(folder: Path) -> Set[str]:
    """Names of all tensors; none if there is no readable checkpoint, which `load_weights`
    raises."""
    try:
        return open_checkpoint(folder).names
    except ModelLoadError:
        return frozenset()


def _copy(checkpoint: AnyCheckpoint, loads: Sequence[Load], progress: bool) -> None:
    with ProgressBar(
        total=sum(load.view.nbytes for load in loads),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        delay=DELAY_S,
        disable=not progress,
    ) as bar:
        spans = []
        for load in loads:
            if isinstance(checkpoint, Checkpoint) and _streams(checkpoint, load):
                spans.append(_span(checkpoint, load))
            else:
                load.view.copy_(_read(checkpoint, load))
                bar.update(load.view.nbytes)
        for num_bytes in stream_weights(spans, loads[0].view.device):
            bar.update(num_bytes)


def _streams(checkpoint: Checkpoint, load: Load) -> bool:
    """Whether the file has the view's bytes, contiguously, and the device is CUDA."""
    view = load.view
    same_dtype = DTYPES.get(checkpoint.header(load.name)[1]) == view.dtype
    is_plain = load.transform is None and len(load.part) <= 1 and view.is_contiguous()
    return view.device.type in STREAMED_DEVICES and same_dtype and is_plain


def _span(checkpoint: Checkpoint, load: Load) -> Span:
    """The bytes of a load that `_streams`: a whole tensor, or some of its rows."""
    file, offset = checkpoint.place(load.name)
    for rows, num_rows in zip(load.part, checkpoint.header(load.name)[0], strict=False):
        offset += range(num_rows)[rows].start * load.view.nbytes // max(1, len(load.view))
    return Span(file, offset, load.view)


def _read(checkpoint: AnyCheckpoint, load: Load) -> torch.Tensor:
    """The view's contents; without a transform, on the CPU and in the file's dtype."""
    tensor = checkpoint.read(load.name)[load.part]
    if load.transform is not None:
        try:
            tensor = load.transform(tensor.to(load.view.device))
        except ValueError as error:
            raise _misfit(checkpoint, load.name, str(error)) from error
    assert tensor.shape == load.view.shape, f"{load.name}: {tensor.shape} for {load.view.shape}"
    return tensor


def _check(
    checkpoint: AnyCheckpoint, loads: Sequence[Load], aliases: Mapping[str, str | None]
) -> None:
    """The checkpoint must have exactly the tensors of the model, besides `aliases` and buffers."""
    names = {load.name for load in loads}
    if missing := names - checkpoint.names:
        raise ModelLoadError(f"{checkpoint.source}: missing tensors: {list_keys(missing)}")
    if unexpected := {
        name
        for name in checkpoint.names - names - aliases.keys()
        if not name.endswith(BUFFERS + KV_SCALES)
    }:
        file = checkpoint.file(min(unexpected))
        raise ModelLoadError(f"{file}: unexpected tensors: {list_keys(unexpected)}")
    for load in loads:
        _check_header(checkpoint, load)
    for alias in aliases.keys() & checkpoint.names:
        of = aliases[alias]
        if of is not None and not torch.equal(checkpoint.read(alias), checkpoint.read(of)):
            raise _misfit(checkpoint, alias, f"differs from {of}, to which config.json ties it")


def _check_header(checkpoint: AnyCheckpoint, load: Load) -> None:
    """The file's tensor must have the shape and dtype that the load expects."""
    shape, dtype = checkpoint.header(load.name)
    wanted_shape = list(load.view.shape if load.file_shape is None else load.file_shape)
    if shape != wanted_shape:
        raise _misfit(checkpoint, load.name, f"has shape {shape}, config.json says {wanted_shape}")
    wanted = load.file_dtype or load.view.dtype
    takes = [n for n, d in DTYPES.items() if d == wanted or {d, wanted} <= {*FLOATS.values()}]
    if dtype not in takes:
        raise _misfit(checkpoint, load.name, f"has dtype {dtype}, not one of {', '.join(takes)}")
    sliced = [len(range(size)[part]) for size, part in zip(shape, load.part, strict=False)]
    fits = [*sliced, *shape[len(sliced) :]] == list(load.view.shape)
    assert fits or load.transform is not None, f"{load.name}: {load.part} for {load.view.shape}"


def _misfit(checkpoint: AnyCheckpoint, name: str, message: str) -> ModelLoadError:
    return ModelLoadError(f"{checkpoint.file(name)}: {name} {message}")


def _fill_dummy(loads: Sequence[Load], seed: int) -> None:
    """Fill weights with normal values, and norms, which are one-dimensional, with ones. A transform
    gets such values, too, unless it makes numbers of codes, which need other tensors."""
    generator = torch.Generator(loads[0].view.device).manual_seed(seed)
    for load in loads:
        view, is_plain = load.view, load.view.dtype in PLAIN_FLOATS
        if not view.numel():
            continue  # it would only be checked, or is another rank's
        if view.dtype == torch.int32:  # an order of columns
            view.copy_(torch.arange(view.shape[-1]))
        elif is_plain and not (load.file_dtype or view.dtype).is_floating_point:
            view.normal_(0.0, DUMMY_STD, generator=generator).abs_().add_(DUMMY_STD)
        elif load.transform is not None:
            view.copy_(load.transform(_dummy_file(load, generator)[load.part]))
        elif view.dim() == 1 and load.name.endswith(".weight"):
            view.fill_(1.0)
        elif is_plain:
            view.normal_(0.0, DUMMY_STD, generator=generator)
        else:
            view.copy_(_dummy_file(load, generator)[load.part])


def _dummy_file(load: Load, generator: torch.Generator) -> torch.Tensor:
    """A dummy tensor of a file: normal weights, random integers, positive scales."""
    shape = tuple(load.view.shape) if load.file_shape is None else load.file_shape
    dtype, device = load.file_dtype or load.view.dtype, load.view.device
    if not dtype.is_floating_point:
        least, above = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        if load.name.endswith(("_scale", "_scales")):  # exponents
            least, above = DUMMY_EXPONENTS
        return torch.randint(least, above, shape, dtype=dtype, device=device, generator=generator)
    values = torch.empty(shape, device=device).normal_(0.0, DUMMY_STD, generator=generator)
    if load.name.endswith(WEIGHTS):
        return (values if dtype in PLAIN_FLOATS else values / DUMMY_STD).to(dtype)
    return values.abs_().add_(DUMMY_STD).to(dtype)  # scales

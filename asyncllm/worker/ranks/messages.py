"""Messages between rank 0 and another rank: frames of msgpack, a length before each.

Rank 0 says what is to be done, in the order in which it does it itself; the other side does it in
that order, but for adapters' files, which it reads beside, and answers what asks for an answer.
Numbers, texts and arrays of int32 travel, nothing that names code; who receives checks the shape
of what it gets.
"""

from __future__ import annotations

import enum
import hashlib
import os
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError
from asyncllm.frames import frame
from asyncllm.generation_config import GenerationDefaults
from asyncllm.mesh_config import ClusterConfig, MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.step_plan import CommonStep, StateMoves
from asyncllm.worker.packed_step import (
    NO_CHANGES,
    NO_EXTRAS,
    PackedStep,
    PromptLogprobsRow,
    SamplingExtras,
    SlotChanges,
)


class Kind(enum.IntEnum):
    """The first field of a message. From rank 0:"""

    START = 0  # settings; addresses of the store, and of that of all engines
    # The next have a number of their place after the kind, from 0 on without a gap.
    STEP = 1  # a `PackedStep`
    SAMPLE = 2  # the rest of a `HostStep`: whether it was sampled by masks
    CLEAR_PAGES = 3  # page ids
    READ_ADAPTER = 4  # folder, place
    LOAD_ADAPTER = 5  # place, slot
    CAPTURE_GRAPH = 6
    SYNC = 7  # the calls of the mesh so far
    PING = 8  # has no place
    # To rank 0:
    JOINS = 9  # it is about to connect its mesh
    READY = 10  # the number of its pages
    FAILED = 11  # why; it ends
    DONE = 12  # place of a READ_ADAPTER, LOAD_ADAPTER or SYNC; an error's text, or ""
    PONG = 13  # messages done, calls of the mesh done


Message = tuple[Any, ...]  # a Kind, and what belongs to it


def encode(kind: Kind, *content: Any) -> bytes:
    """A frame."""
    return frame(_ENCODER.encode((int(kind), *content)))


def decode(body: bytes) -> Message:
    """Raises `ValueError` for what is no message."""
    try:
        kind, *content = msgspec.msgpack.decode(body)
        return Kind(kind), *content
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"a message of {len(body)} bytes: {error}") from error


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32, f"{value.dtype} does not travel"
        return value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} does not travel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)


# --- steps ---------------------------------------------------------------------------------------


def step_content(step: PackedStep) -> Message:
    """The content of a STEP, without how rows are sampled, which only rank 0 needs."""
    prefills = step.prefills
    return (
        step.decode_slots,
        step.decode_positions,
        step.sampled_slots,
        (step.tokens, step.samples, *_columns(prefills)) if step.has_prompts else None,
        (step.swap_out, step.page_copies, step.swap_in, *step.states),
        None if step.changes is NO_CHANGES else (step.changes.records, step.changes.entries),
        step.features,
        step.extras.prompt_targets,
        [(row.first_token, row.num_targets, row.num_top) for row in step.prompt_logprobs],
        step.common,
        step.needs_host,
        step.adapters,
    )


def _columns(prefills: PrefillRows) -> tuple[np.ndarray, ...]:
    return tuple(getattr(prefills, column.name) for column in fields(PrefillRows))


def decode_step(content: list[Any]) -> PackedStep:
    """The opposite of `step_content`."""
    slots, positions, sampled, prompts, moves, changes, features, targets, logprobs, *rest = content
    step = PackedStep(_array(slots), _array(positions), _array(sampled))
    if prompts is not None:
        tokens, samples, *columns = map(_array, prompts)
        step = step._replace(tokens=tokens, samples=samples, prefills=PrefillRows(*columns))
    swap_out, page_copies, swap_in, *states = (tuple(map(tuple, pairs)) for pairs in moves)
    common, needs_host, adapters = rest
    extras: SamplingExtras[np.ndarray] = NO_EXTRAS
    if targets is not None:
        extras = SamplingExtras(prompt_targets=_array(targets))
    return step._replace(
        swap_out=swap_out,
        page_copies=page_copies,
        swap_in=swap_in,
        states=StateMoves(*states),
        changes=NO_CHANGES if changes is None else SlotChanges(*map(_array_or_none, changes)),
        features=features,
        extras=extras,
        prompt_logprobs=tuple(PromptLogprobsRow(0, *row) for row in logprobs),
        needs_host=needs_host,
        adapters=adapters,
        common=None if common is None else msgspec.convert(common, CommonStep),
    )


def _array(sent: Any) -> np.ndarray:
    shape, numbers = sent
    return np.frombuffer(bytearray(numbers), np.int32).reshape(shape)  # that torch may write to


def _array_or_none(sent: Any) -> np.ndarray | None:
    return None if sent is None else _array(sent)


# --- settings ------------------------------------------------------------------------------------

# Of no interest to who only repeats steps; or made here of what is sent.
_RANK_0 = {"tokenizer_path", "logits_processors", "generation_defaults", "chat_template", "cluster"}
_MADE = {"model", "mesh"}
MODEL_SUFFIXES = {".safetensors", ".gguf"}
SAMPLE_BYTES = 1 << 16  # of a file's end, which a header does not fill


def encode_config(config: EngineConfig) -> dict[str, Any]:
    """A settled one."""
    model = config.model
    plain = {f.name for f in fields(EngineConfig)} - _RANK_0 - _MADE
    return {
        **{name: getattr(config, name) for name in plain},
        "model": (
            str(model.path),
            model.implementation,
            model.quantization,
            sample_model(model.path),
        ),
        "mesh": astuple(replace(config.mesh, rank=0)),
    }


def sample_model(path: Path) -> str:
    """A digest of the configuration, and of each weights' file its name, size and end: the hosts of
    ranks read the model each for itself."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.suffix in MODEL_SUFFIXES or file.name == "config.json":
            with file.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(max(size - SAMPLE_BYTES, 0))
                digest.update(f"{file.name} {size} ".encode() + opened.read())
    return digest.hexdigest()


def decode_config(sent: dict[str, Any], rank: int) -> EngineConfig:
    """As rank 0 settled it, so that all do the same. Raises `ModelLoadError`."""
    path, implementation, quantization, sample = sent["model"]
    if sample_model(Path(path)) != sample:
        raise ModelLoadError(f"{path}: its files are not those that rank 0 has there")
    model = replace(ModelConfig.from_folder(Path(path), implementation), quantization=quantization)
    rest: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in sent.items()
        if name not in _MADE
    }
    return EngineConfig(
        model=model,
        mesh=replace(MeshConfig(*sent["mesh"]), rank=rank),
        tokenizer_path=None,
        logits_processors=(),
        generation_defaults=GenerationDefaults(),
        chat_template=None,
        cluster=ClusterConfig(),
        **rest,
    )

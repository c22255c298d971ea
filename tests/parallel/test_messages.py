"""A message to another rank comes out as it went in, and what is none is refused."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest

import asyncllm
from asyncllm.attention.base import PrefillRows
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.frames import LENGTH, MAX_FRAME_BYTES, Frames, frame
from asyncllm.mesh_config import MeshConfig
from asyncllm.step_plan import CommonStep, StateMoves, StepKind, StepShape
from asyncllm.worker.packed_step import (
    Feature,
    PackedStep,
    PromptLogprobsRow,
    SamplingExtras,
    SlotChanges,
)
from asyncllm.worker.ranks.messages import (
    Kind,
    Message,
    decode,
    decode_config,
    decode_step,
    encode,
    encode_config,
    step_content,
)

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny"


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def received(sent: bytes) -> list[Message]:
    return [*map(decode, Frames().feed(sent))]


DECODES = PackedStep(int32(1, 2), int32(7, 8), int32(1, 2), adapters=True)
MIXED = PackedStep(
    int32(3),
    int32(9),
    int32(3, 4),
    tokens=np.arange(20, dtype=np.int32).reshape(4, 5),
    samples=np.arange(6, dtype=np.int32).reshape(3, 2),
    prefills=PrefillRows(
        int32(0, 5), int32(5), int32(0, 2), int32(6, 7)[None], int32(4), int32(0, 4, 9)[None]
    ),
    swap_out=((1, 2), (3, 4)),
    page_copies=((5, 6),),
    swap_in=((7, 8),),
    states=StateMoves(((1, 2),), ((3, 4), (5, 6)), ((7, 8),), ((9, 1),)),
    changes=SlotChanges(np.ones((2, 13), np.int32), None),
    features=Feature.MASK | Feature.LOGPROBS,
    extras=SamplingExtras(prompt_targets=int32(1, 2, 3)),
    prompt_logprobs=(PromptLogprobsRow(0, 1, 3, 2),),
    needs_host=True,
    common=CommonStep(StepShape(StepKind.MIXED, 8, adapters=True), in_graph=True),
)


@pytest.mark.parametrize("step", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_step_arrives_as_it_was(step: PackedStep) -> None:
    (message,) = received(encode(Kind.STEP, *step_content(step)))
    assert message[0] is Kind.STEP
    arrived = decode_step(list(message[1:]))
    assert arrived.has_prompts == step.has_prompts and arrived.shape == step.shape
    assert repr(arrived) == repr(step)


def test_no_field_of_a_step_is_forgotten() -> None:
    """A new one is to be set in MIXED, and then to travel."""
    only_rank_0 = {"num_top_logprobs", "num_padding"}
    for name, default in PackedStep._field_defaults.items():
        is_set = getattr(MIXED, name) is not default or getattr(DECODES, name) is not default
        assert is_set or name in only_rank_0, name


def test_frames_come_in_any_pieces() -> None:
    sent = encode(Kind.CLEAR_PAGES, [1, 2]) + encode(Kind.PING) + encode(Kind.DONE, "why")
    frames = Frames()
    found = [decode(body) for byte in sent for body in frames.feed(bytes([byte]))]
    assert found == [(Kind.CLEAR_PAGES, [1, 2]), (Kind.PING,), (Kind.DONE, "why")]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([99])]
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        received(frame(body))


def test_a_frame_has_a_limit() -> None:
    with pytest.raises(ValueError, match="over"):
        received(LENGTH.pack(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_model_at_the_same_path_is_refused(name: str, tmp_path: Path) -> None:
    """Ranks of two hosts would compute nonsense, and nothing would fail."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    args = EngineArgs(str(folder), device="cpu", tensor_parallel_size=2)
    sent = encode_config(args.create_engine_config())
    assert decode_config(sent, 1).model.path == folder
    changed = bytearray((folder / name).read_bytes())
    changed[-3] ^= 1
    (folder / name).write_bytes(changed)
    with pytest.raises(ModelLoadError, match="are not those that rank 0 has"):
        decode_config(sent, 1)


def test_settings_arrive_as_rank_0_has_them() -> None:
    args = EngineArgs("tiny", device="cpu", tensor_parallel_size=2, max_num_seqs=7, swap_space=0.5)
    config = args.create_engine_config()
    ((_, sent),) = received(encode(Kind.START, encode_config(config)))
    arrived = decode_config(sent, 1)
    assert arrived.mesh == MeshConfig(2, 1)
    only_rank_0 = {"mesh", "model", "tokenizer_path", "logits_processors", "chat_template"}
    for field in fields(config):
        if field.name not in only_rank_0 | {"generation_defaults", "cluster"}:
            assert getattr(arrived, field.name) == getattr(config, field.name), field.name
    assert arrived.model.path == config.model.path
    assert arrived.model.hf_config.to_dict() == config.model.hf_config.to_dict()

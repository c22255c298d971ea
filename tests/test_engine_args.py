"""`EngineArgs` from Python: nothing converts what a user passes, so its type is checked too."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncllm import EngineArgs
from asyncllm.model_config import BUILTIN_MODELS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enable_prefix_caching", "no", "of type bool, got 'no'"),
        ("enforce_eager", 1, "of type bool, got 1"),
        ("max_model_len", True, "of type int | None, got True"),
        ("max_num_seqs", "8", "of type int, got '8'"),
        ("max_num_seqs", None, "of type int, got None"),
        ("max_num_seqs", 8.0, "of type int, got 8.0"),
        ("block_size", None, "of type int, got None"),
        ("swap_space", "4", "of type float, got '4'"),
        ("gpu_memory_utilization", None, "of type float, got None"),
        ("watchdog_timeout", False, "of type float, got False"),
        ("cuda_graph_sizes", 8, "of type list[int] | None, got 8"),
        ("cuda_graph_sizes", ["8"], "of type list[int] | None, got ['8']"),
        ("served_model_name", "tiny", "of type list[str] | None, got 'tiny'"),
        ("logits_processors", [3], "of type list[str | type] | None, got [3]"),
        ("model", None, "of type str, got None"),
        ("dtype", 16, "one of auto, float32, bfloat16, float16, half, float, got 16"),
    ],
)
def test_a_wrong_type_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineArgs(**{name: value}).create_engine_config()
    assert str(error.value) == f"{name} must be {said}"


def test_a_window_of_minus_one_is_the_default() -> None:
    assert EngineArgs(max_model_len=-1).create_engine_config().max_model_len is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_model_len", 1, "at least 2, got 1"),  # a prompt and an answer
        ("max_num_seqs", 0, "at least 1, got 0"),
        ("max_num_seqs", 4097, "at most 4096, got 4097"),
        ("max_lora_rank", 513, "at most 512, got 513"),
        ("gpu_memory_utilization", 0.0, "above 0, got 0.0"),
        ("gpu_memory_utilization", 1.1, "at most 1, got 1.1"),
        ("max_queue_seconds", float("nan"), "above 0, got nan"),
        ("watchdog_timeout", float("inf"), "below inf, got inf"),
        ("swap_space", float("nan"), "at least 0, got nan"),
    ],
)
def test_a_number_out_of_its_limits_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineArgs(**{name: value}).create_engine_config()
    assert str(error.value) == f"{name} must be {said}"


@pytest.mark.parametrize("name", [field.name for field in fields(EngineArgs)])
def test_every_field_has_a_type_that_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        EngineArgs(**{name: object()}).create_engine_config()


def test_what_stands_for_a_type_is_taken() -> None:
    config = EngineArgs(
        model=BUILTIN_MODELS["tiny"],  # type: ignore[arg-type]  # a path
        tokenizer=Path(BUILTIN_MODELS["tiny"]),  # type: ignore[arg-type]
        cuda_graph_sizes=(1, 2),  # type: ignore[arg-type]
        swap_space=1,
        max_queue_seconds=float("inf"),
        max_num_seqs=2,
    ).create_engine_config()
    assert config.cuda_graph_sizes == (1, 2)
    assert config.swap_space_bytes == 2**30
    assert config.model.path == config.tokenizer_path


def test_no_decode_size_to_capture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cuda_graph_sizes must be between 1 and .* got \[\]"):
        EngineArgs(cuda_graph_sizes=[]).create_engine_config()


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    """It is refused before the model is loaded."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num"):
        EngineArgs(max_num_seqs=8, max_num_batched_tokens=7).create_engine_config()

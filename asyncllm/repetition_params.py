"""When an answer that repeats itself is ended: vLLM's parameters, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.param_checks import require, require_int, shown

MAX_REPETITION_PATTERN_SIZE = 2048
MAX_REPETITION_COUNT = 1024


@dataclass(slots=True)
class RepetitionDetectionParams:
    """End an answer whose last tokens are one pattern, `min_count` times in a row.

    Patterns of `min_pattern_size` (0: 1) to `max_pattern_size` tokens count; a `max_pattern_size`
    of 0 is off. Raises `InvalidRequestError`. Source: vllm.sampling_params.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        param, most = "repetition_detection", MAX_REPETITION_PATTERN_SIZE
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            require_int(param, getattr(self, name), f"{param}.{name}")
        for name in ("max_pattern_size", "min_pattern_size"):
            value = getattr(self, name)
            require(0 <= value <= most, param, value, f"between 0 and {most}", f"{param}.{name}")
        require(self.min_pattern_size <= self.max_pattern_size, param, self.min_pattern_size,
                 f"at most max_pattern_size ({self.max_pattern_size})",
                 f"{param}.min_pattern_size")  # fmt: skip
        least = 2 if self.max_pattern_size else 0
        require(least <= self.min_count <= MAX_REPETITION_COUNT, param, self.min_count,
                 f"between {least} and {MAX_REPETITION_COUNT}", f"{param}.min_count")  # fmt: skip


def checked_repetition(given: Any) -> RepetitionDetectionParams | None:
    """Checks a request's field, which may be a dict; None where it is off."""
    if isinstance(given, dict):
        try:
            given = RepetitionDetectionParams(**given)
        except TypeError:
            raise InvalidRequestError(
                "repetition_detection has the fields max_pattern_size, min_pattern_size and "
                f"min_count, got {shown(given)}",
                "repetition_detection",
            ) from None
    require(isinstance(given, RepetitionDetectionParams),
             "repetition_detection", given, "RepetitionDetectionParams")  # fmt: skip
    return given if given.max_pattern_size else None

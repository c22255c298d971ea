"""A model's `generation_config.json`: sampling values, and ids that end a text.

As in vLLM: `do_sample` is ignored (false does not mean greedy), `max_new_tokens` is the default of
max_tokens, and the ending ids count even where the sampling values are not wanted. Read once, with
the configuration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`sampling` holds fields of `SamplingParams`."""

    sampling: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int | None:
        return self.sampling.get("max_tokens")


def read_generation_defaults(
    wanted: str, model: Path, override: dict[str, Any] | None = None
) -> GenerationDefaults:
    """wanted: 'auto', 'vllm' or a folder; model: its folder; override: of SAMPLING_KEYS.

    Raises `ModelLoadError`, and `ValueError` for what cannot be overridden.
    """
    defaults = _read_defaults(wanted, model)
    if unknown := sorted(set(override or ()) - SAMPLING_KEYS.keys()):
        known = ", ".join(SAMPLING_KEYS)
        raise ValueError(f"override_generation_config: {unknown[0]!r} is none of {known}")
    changes = {SAMPLING_KEYS[key]: value for key, value in (override or {}).items()}
    sampling = {k: v for k, v in (defaults.sampling | changes).items() if v is not None}
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ValueError(f"override_generation_config: {error}") from error
    return GenerationDefaults(sampling, defaults.eos_token_ids)


def _read_defaults(wanted: str, model: Path) -> GenerationDefaults:
    if wanted in ("auto", "vllm"):
        file = model / FILE_NAME
        if not file.is_file():
            return GenerationDefaults()
    else:
        file = Path(wanted).expanduser() / FILE_NAME
    values = _read(file)
    sampling = {
        name: values[key] for key, name in SAMPLING_KEYS.items() if values.get(key) is not None
    }
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return GenerationDefaults(
        {} if wanted == "vllm" else sampling, _eos_ids(values.get("eos_token_id"), file)
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object")
    return values


def _eos_ids(value: object, file: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelLoadError(f"{file}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(ids)

"""A model's `generation_config.json`: default sampling parameters, and EOS token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.model_config import read_json_object
from asyncllm.sampling_params import SamplingParams

GENERATION_FILE = "generation_config.json"
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
    """The contents of a model's `generation_config.json`.

    As in vLLM, `do_sample` is ignored (false does not mean greedy), `max_new_tokens` is the default
    of max_tokens, and EOS token ids are used even if the sampling defaults are not.

    max_tokens_limit: the most that a request of the server gets, which only the operator sets.
    """

    sampling: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`
    eos_token_ids: tuple[int, ...] = ()
    max_tokens_limit: int | None = None

    @property
    def max_tokens(self) -> int | None:
        return self.sampling.get("max_tokens")


def read_generation_defaults(
    wanted: str, model: Path, override: dict[str, Any] | None = None
) -> GenerationDefaults:
    """wanted: 'auto', 'vllm' or a folder. model: the model's folder. override: values of
    SAMPLING_KEYS.

    Raises `ModelLoadError`, or `ValueError` for an invalid override.
    """
    is_folder = wanted not in ("auto", "vllm")
    file = (Path(wanted).expanduser() if is_folder else model) / GENERATION_FILE
    values = read_json_object(file) if is_folder or file.is_file() else {}
    own = {name: values[k] for k, name in SAMPLING_KEYS.items() if values.get(k) is not None}
    eos_token_ids = _eos_ids(values.get("eos_token_id"), file)
    if unknown := sorted(set(override or ()) - SAMPLING_KEYS.keys()):
        known = ", ".join(SAMPLING_KEYS)
        raise ValueError(f"override_generation_config: {unknown[0]!r} is none of {known}")
    changes = {SAMPLING_KEYS[key]: value for key, value in (override or {}).items()}
    changed = {} if wanted == "vllm" else own
    changed = {name: v for name, v in (changed | changes).items() if v is not None}
    for source, sampling in ((file, own), ("override_generation_config", changed)):
        try:
            SamplingParams(**sampling)
        except InvalidRequestError as error:
            error_type = ModelLoadError if source is file else ValueError
            raise error_type(f"{source}: {error}") from error
    limit = (changed if is_folder else changes).get("max_tokens")
    return GenerationDefaults(changed, eos_token_ids, limit)


def _eos_ids(value: object, file: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelLoadError(f"{file}: eos_token_id must be an id or a list of ids, got {value!r}")
    return tuple(ids)

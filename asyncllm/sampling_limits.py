"""The type and the limits of each field of `SamplingParams`; rules between fields are in
`sampling_params.py`.

All checks raise `InvalidRequestError` naming the parameter. A message shortens the value, which may
be huge, nested or hostile. Limits that the documentation or tests use have names.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.structured_outputs import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_ID_DIGITS = 18  # of a token id written out
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MAX_LENGTH_PENALTY = 10.0
MAX_ALLOWED_TOKEN_IDS = 2**18  # no vocabulary is larger
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGITS_PROCESSORS = 64
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite
MAX_REPETITION_PENALTY = 10
MAX_REPETITION_PATTERN_SIZE = 2048
MAX_REPETITION_COUNT = 1024


def require(ok: bool, param: str, value: object, wanted: str, name: str = "") -> None:
    """`name` is used in the message instead of `param`, for a part of `param`."""
    if not ok:
        raise InvalidRequestError(f"{name or param} must be {wanted}, got {shown(value)}", param)


def shown(value: object) -> str:
    """A short repr, also of values that are huge, nested, or ints with too many digits to print."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return type(value).__name__


def require_int(param: str, value: object, name: str = "") -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and abs(value) <= MAX_SEED + 1, param, value, "a 64-bit integer", name)  # type: ignore[arg-type]


def require_finite(param: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and abs(value) < float("inf"), param, value, "a finite number")  # type: ignore[arg-type]


def _check_strings(
    param: str, texts: Any, most: int, most_chars: int, wanted: str = "a list"
) -> None:
    require(isinstance(texts, list), param, texts, wanted)
    require(len(texts) <= most, param, len(texts), f"at most {most} strings")
    for text in texts:
        is_good = isinstance(text, str) and 0 < len(text) <= most_chars
        require(is_good, param, text, f"strings of 1 to {most_chars} characters")


def _check_token_ids(param: str, ids: Any, most: int, may_be_empty: bool = False) -> None:
    require(isinstance(ids, list), param, ids, "a list")
    require(len(ids) <= most, param, len(ids), f"at most {most} ids")
    if set(map(type, ids)) - {int}:  # no Python loop over a good list, which may be long
        for token_id in ids:
            require_int(param, token_id)
    least, greatest = min(ids, default=0), max(ids, default=0)
    require(least >= 0, param, least, "token ids of at least 0")
    require_int(param, greatest)
    if not (ids or may_be_empty):
        raise InvalidRequestError(f"{param} must not be empty", param)


def token_id_of_key(key: object) -> int:
    """The token id of a key of logit_bias; JSON has string keys, which must be all digits."""
    is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
    is_int = isinstance(key, int) and not isinstance(key, bool) and 0 <= key <= MAX_SEED
    if not (is_text or is_int):
        raise InvalidRequestError(
            f"logit_bias keys must be token ids, got {shown(key)}", "logit_bias"
        )
    return int(key)  # type: ignore[call-overload]


def check_value(name: str, annotation: str, value: Any) -> None:
    """Check a field whose annotation in `SamplingParams` reads `annotation`."""
    if value is None and annotation.endswith("| None"):
        return
    check = _CHECKS.get(name) or _CHECK_OF_TYPE.get(annotation.removesuffix(" | None"))
    if check is not None:
        check(name, value)
    if (limits := _LIMITS.get(name)) is not None:
        is_within, wanted = limits
        require(is_within(value), name, value, wanted)


def checked_bias(given: Any) -> dict[int, float]:
    require(isinstance(given, dict), "logit_bias", given, "a map of token ids to biases")
    require(len(given) <= MAX_LOGIT_BIAS_ENTRIES, "logit_bias", f"{len(given)} entries",
             f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")  # fmt: skip
    checked: dict[int, float] = {}
    for key, bias in given.items():
        require_finite("logit_bias", bias)
        require(-100 <= bias <= 100, "logit_bias", bias, "between -100 and 100")
        checked[token_id_of_key(key)] = float(bias)
    require(len(checked) == len(given), "logit_bias", "one token twice",
             "a map of distinct token ids")  # fmt: skip
    return checked


def num_positional(function: Callable[..., Any]) -> int | None:
    """The number of positional parameters; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in parameters)


def _check_logits_processors(name: str, value: Any) -> None:
    processors = value or []
    require(isinstance(processors, list), name, processors, "a list of callables")
    require(len(processors) <= MAX_LOGITS_PROCESSORS, name, f"{len(processors)} callables",
             f"at most {MAX_LOGITS_PROCESSORS} callables")  # fmt: skip
    for processor in processors:
        require(callable(processor), name, processor, "a list of callables")
        require(num_positional(processor) in (2, 3), name, processor,
                 "callables of (output_token_ids, logits) or "
                 "(prompt_token_ids, output_token_ids, logits)")  # fmt: skip


_CHECK_OF_TYPE: dict[str, Callable[[str, Any], None]] = {
    "int": require_int,
    "bool": lambda name, value: require(isinstance(value, bool), name, value, "a bool"),
    "float": require_finite,
}
# field -> its own check, instead of that of its type
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "stop": partial(
        _check_strings,
        most=MAX_STOP_STRINGS,
        most_chars=MAX_STOP_STRING_CHARS,
        wanted="a string or a list",
    ),
    "bad_words": partial(_check_strings, most=MAX_BAD_WORDS, most_chars=MAX_BAD_WORD_CHARS),
    "stop_token_ids": partial(_check_token_ids, most=MAX_STOP_TOKEN_IDS, may_be_empty=True),
    "allowed_token_ids": partial(_check_token_ids, most=MAX_ALLOWED_TOKEN_IDS),
    "logprob_token_ids": partial(_check_token_ids, most=MAX_LOGPROB_TOKEN_IDS),
    "logits_processors": _check_logits_processors,
}
# field -> whether a value of the right type is good, and the words for the message
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: 1 <= n <= MAX_N, f"between 1 and {MAX_N}"),
    "length_penalty": (
        lambda penalty: abs(penalty) <= MAX_LENGTH_PENALTY,
        f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
    ),
    "presence_penalty": (lambda penalty: -2 <= penalty <= 2, "between -2 and 2"),
    "frequency_penalty": (lambda penalty: -2 <= penalty <= 2, "between -2 and 2"),
    "repetition_penalty": (
        lambda penalty: MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY,
        f"between {MIN_REPETITION_PENALTY} and {MAX_REPETITION_PENALTY}",
    ),
    "temperature": (lambda t: 0 <= t <= 100, "between 0 and 100"),
    "structured_outputs": (
        lambda value: isinstance(value, StructuredOutputsParams), StructuredOutputsParams.__name__
    ),
    "early_stopping": (
        lambda value: isinstance(value, bool) or value == "never", 'true, false or "never"'
    ),
    "truncation_side": (lambda side: side in ("left", "right"), '"left" or "right"'),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "top_k": (lambda k: k >= -1, "-1 or 0 (off) or at least 1"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 and 1"),
    "seed": (lambda seed: -MAX_SEED - 1 <= seed <= MAX_SEED, "a 64-bit integer"),
    "max_tokens": (lambda number: number >= 1, "at least 1"),
    "min_tokens": (lambda number: number >= 0, "at least 0"),
    "logprobs": (lambda number: number >= -1, "-1 (the whole vocabulary) or at least 0"),
    "prompt_logprobs": (lambda number: number >= -1, "-1 (the whole vocabulary) or at least 0"),
    "thinking_token_budget": (lambda budget: budget >= -1, "-1 (no limit) or at least 0"),
    "truncate_prompt_tokens": (
        lambda number: number >= 1 or number == -1, "-1 (the context window) or at least 1"
    ),
}  # fmt: skip

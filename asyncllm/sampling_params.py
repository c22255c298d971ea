"""What a request may ask of the sampler: vLLM's names, defaults and ranges, checked once.

This is the one validator: HTTP and Python both end here. It knows no model, so limits that depend
on the vocabulary or the context window are checked by the input processor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Literal

from asyncllm.errors import InvalidRequestError
from asyncllm.param_checks import (
    MAX_SEED,
    check_strings,
    check_token_ids,
    require,
    require_bool,
    require_finite,
    require_int,
    token_id_of_key,
)
from asyncllm.repetition_params import RepetitionDetectionParams, checked_repetition
from asyncllm.structured_outputs import StructuredOutputsParams

GREEDY_BELOW_TEMPERATURE = 1e-5
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
# What a beam search takes: its own, how the answer is shown, and what only drawing needs.
BEAM_SEARCH_FIELDS = frozenset(
    [
        *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
        *("max_tokens", "ignore_eos", "stop_token_ids", "truncate_prompt_tokens"),
        *("logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"),
        *("extra_args", "temperature", "top_p", "top_k", "min_p", "seed"),
    ]
)
EarlyStopping = bool | Literal["never"]


class RequestOutputKind(Enum):
    """What each yielded `RequestOutput` holds: all so far, the news only, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request, checked when made.

    Raises `InvalidRequestError` (a `ValueError`) naming the field that is out of range.
    `temperature=0` is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch the filter off.
    `max_tokens=None` means up to the end of the context window. `logprobs=k` returns the k most
    likely tokens and the sampled one, as natural logarithms of the raw distribution (before
    temperature, penalties and filters); `logprob_token_ids` returns those of these tokens instead
    of the most likely. A `seed` makes a request's tokens independent of what else is in its batch;
    -1 is none. `thinking_token_budget` is the most tokens of reasoning, -1 is no limit.
    `repetition_detection` may be a dict of its fields. Source: vllm.SamplingParams.

    `best_of` answers are made and the `n` with the highest mean log-probability returned, at the
    end. With `use_beam_search` it is the width of the search (None: `n`), which draws nothing:
    temperature, filters and seed are without effect, and the `n` beams with the highest
    log-probability / length ** `length_penalty` are returned. `early_stopping` as in transformers:
    True ends at the first `best_of` finished beams, False when by a heuristic none can be better,
    "never" when none can be.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: list[Callable[..., Any]] | None = field(default=None, repr=False)
    extra_args: dict[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        # What is the default itself needs no check: that is most of every request.
        for name in compress(_NAMES, map(is_not, _values_of(self), _DEFAULTS)):
            _check_value(name, getattr(self, name))
        self._check_together()

    @property
    def num_sequences(self) -> int:
        """How many are generated, to return `n` of them."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def num_logprobs(self) -> int | None:
        """How many tokens are reported beside each sampled one; None: no logprobs at all."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def _check_together(self) -> None:
        """What hangs on several fields, each of them good; -1 and dicts become what they mean."""
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens ({self.max_tokens})")  # fmt: skip
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        if self.repetition_detection is not None:
            self.repetition_detection = checked_repetition(self.repetition_detection)
        self._check_search()

    def _check_search(self) -> None:
        if self.best_of is not None:
            require(self.n <= self.best_of <= MAX_N, "best_of", self.best_of,
                     f"between n ({self.n}) and {MAX_N}")  # fmt: skip
        if self.use_beam_search:
            self._check_beam_search()
            self.temperature = 0.0
            return
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != neutral:
                raise InvalidRequestError(f"{name} needs use_beam_search", name)

    def _check_beam_search(self) -> None:
        """Refuse what would change the scores or the ends of beams."""
        for given in fields(self):
            value = getattr(self, given.name)
            is_neutral = value is None or value == [] or value == given.default
            if given.name not in BEAM_SEARCH_FIELDS and not is_neutral:
                raise InvalidRequestError(
                    f"{given.name} cannot be combined with use_beam_search", given.name
                )


_NAMES = tuple(given.name for given in fields(SamplingParams))
_DEFAULTS = tuple(given.default for given in fields(SamplingParams))
_values_of = attrgetter(*_NAMES)


def _check_value(name: str, value: Any) -> None:
    """What one field's value must be, whatever the others are."""
    if (check := _TYPE_CHECKS.get(name)) is not None:
        check(name, value)
    if value is not None and (limits := _LIMITS.get(name)) is not None:
        is_within, wanted = limits
        require(is_within(value), name, value, wanted)


def _check_if_given(name: str, value: object) -> None:
    if value is not None:
        require_int(name, value)


def _words(most: int, most_chars: int, wanted: str = "a list") -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        require(value is None or isinstance(value, list), name, value, wanted)
        check_strings(name, value or [], most, most_chars)

    return check


def _token_ids(most: int, *, may_be_empty: bool) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        require(value is None or isinstance(value, list), name, value, "a list")
        check_token_ids(name, value, most)
        if value == [] and not may_be_empty:
            raise InvalidRequestError(f"{name} must not be empty", name)

    return check


def _check_structured_outputs(name: str, value: object) -> None:
    wanted = StructuredOutputsParams | None
    require(isinstance(value, wanted), name, value, "StructuredOutputsParams")


def _check_early_stopping(name: str, value: object) -> None:
    is_known = isinstance(value, bool) or value == "never"
    require(is_known, name, value, 'true, false or "never"')


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


def _checked_bias(given: Any) -> dict[int, float]:
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


# By the annotations of the fields, and of the fields that have checks of their own.
_CHECK_OF_TYPE: dict[object, Callable[[str, Any], None]] = {
    "int": require_int,
    "int | None": _check_if_given,
    "bool": require_bool,
    "float": require_finite,
}
_TYPE_CHECKS: dict[str, Callable[[str, Any], None]] = {
    given.name: _CHECK_OF_TYPE[given.type]
    for given in fields(SamplingParams)
    if given.type in _CHECK_OF_TYPE
} | {
    "stop": _words(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS, "a string or a list"),
    "bad_words": _words(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "stop_token_ids": _token_ids(MAX_STOP_TOKEN_IDS, may_be_empty=True),
    "allowed_token_ids": _token_ids(MAX_ALLOWED_TOKEN_IDS, may_be_empty=False),
    "logprob_token_ids": _token_ids(MAX_LOGPROB_TOKEN_IDS, may_be_empty=False),
    "structured_outputs": _check_structured_outputs,
    "early_stopping": _check_early_stopping,
    "logits_processors": _check_logits_processors,
}
# field -> whether a value of its type is good, and how to say it
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
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "top_k": (lambda k: k >= -1, "-1 or 0 (off) or at least 1"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 and 1"),
    "seed": (lambda seed: -MAX_SEED - 1 <= seed <= MAX_SEED, "a 64-bit integer"),
    "max_tokens": (lambda number: number >= 1, "at least 1"),
    "min_tokens": (lambda number: number >= 0, "at least 0"),
    "logprobs": (lambda number: number >= 0, "at least 0"),
    "prompt_logprobs": (lambda number: number >= 0, "at least 0"),
    "thinking_token_budget": (lambda budget: budget >= -1, "-1 (no limit) or at least 0"),
    "truncate_prompt_tokens": (
        lambda number: number >= 1 or number == -1, "-1 (the context window) or at least 1"
    ),
}  # fmt: skip


def num_positional(function: Callable[..., Any]) -> int | None:
    """How many positional parameters it has; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in parameters)

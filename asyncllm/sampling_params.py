"""The sampling parameters of a request, with vLLM's names, defaults and ranges.

Requests from HTTP and from Python are validated here; `sampling_limits.py` has the limits of the
single fields. Limits that depend on the model's vocabulary or context window are checked by the
input processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Literal

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_limits import (
    MAX_N,
    MAX_REPETITION_COUNT,
    MAX_REPETITION_PATTERN_SIZE,
    check_value,
    checked_bias,
    require,
    require_int,
    shown,
)
from asyncllm.structured_outputs import StructuredOutputsParams

GREEDY_BELOW_TEMPERATURE = 1e-5
# Fields that a beam search accepts: its own, those of the output, and those of random sampling,
# which have no effect.
BEAM_SEARCH_FIELDS = frozenset(
    [
        *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
        *("max_tokens", "ignore_eos", "stop_token_ids", "truncate_prompt_tokens"),
        "truncation_side",
        *("logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"),
        *("extra_args", "temperature", "top_p", "top_k", "min_p", "seed"),
    ]
)
TruncationSide = Literal["left", "right"]
EarlyStopping = bool | Literal["never"]


class RequestOutputKind(Enum):
    """Each `RequestOutput` holds everything so far or only the new part, or only one comes."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class RepetitionDetectionParams:
    """End an answer whose last tokens repeat one pattern `min_count` times.

    A pattern has `min_pattern_size` (0 means 1) to `max_pattern_size` tokens; a `max_pattern_size`
    of 0 switches the detection off. Raises `InvalidRequestError`. Source: vllm.sampling_params.
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


@dataclass(slots=True)
class SamplingParams:
    """The sampling parameters of one request, checked by the constructor.

    Raises `InvalidRequestError` (a `ValueError`) naming the field that is out of range.
    `temperature=0` is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch the filter off.
    `max_tokens=None` means up to the end of the context window. `logprobs=k` returns the k most
    likely tokens and the sampled one, as natural logarithms of the raw distribution (before
    temperature, penalties and filters); -1 returns the whole vocabulary. `logprob_token_ids`
    returns the logprobs of these tokens instead of the most likely ones. A `seed` makes a request's
    tokens independent of the other requests in its batch; -1 means no seed. `thinking_token_budget`
    is the maximum number of reasoning tokens; -1 means no limit.
    `repetition_detection` may be a dict of its fields. Source: vllm.SamplingParams.

    `best_of` answers are generated; at the end the `n` with the highest mean log-probability are
    returned. With `use_beam_search`, `best_of` is the beam width (None: `n`) and the `n` beams with
    the highest log-probability / length ** `length_penalty` are returned; temperature, filters and
    seed have no effect. `early_stopping` is that of transformers: True ends the search at the first
    `best_of` finished beams, False when a heuristic says that no better beam can come, "never" when
    no better beam is possible.
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
    truncation_side: TruncationSide = "left"  # the end of the prompt that is cut off
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
        # Fields that hold the default object, most of every request, need no check.
        for name in compress(_NAMES, map(is_not, _values_of(self), _DEFAULTS)):
            check_value(name, _TYPES[name], getattr(self, name))
        self._check_together()

    @property
    def num_sequences(self) -> int:
        """The number of answers that are generated; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred before change the logits."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(penalties) or self.repetition_penalty != 1

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens reported beside each sampled one; None means no logprobs."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def checked_copy(self) -> SamplingParams:
        """A copy that later changes do not reach. Raises `InvalidRequestError` for earlier ones."""
        values = zip(_NAMES, _values_of(self), strict=True)
        own: dict[str, Any] = {k: v.copy() for k, v in values if isinstance(v, list | dict)}
        for name in ("repetition_detection", "structured_outputs"):
            given = getattr(self, name)
            if isinstance(given, RepetitionDetectionParams | StructuredOutputsParams):
                own[name] = replace(given)  # the constructor checks
        return replace(self, **own)

    def _check_together(self) -> None:
        """Check the fields against each other, and replace -1 and dicts by what they stand for."""
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
            self.logit_bias = checked_bias(self.logit_bias)
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
        """Refuse fields that would change the scores or the ends of beams."""
        for given in fields(self):
            value = getattr(self, given.name)
            is_neutral = value is None or value == [] or value == given.default
            if given.name not in BEAM_SEARCH_FIELDS and not is_neutral:
                raise InvalidRequestError(
                    f"{given.name} cannot be combined with use_beam_search", given.name
                )


_NAMES = tuple(given.name for given in fields(SamplingParams))
_TYPES = {given.name: str(given.type) for given in fields(SamplingParams)}
_DEFAULTS = tuple(given.default for given in fields(SamplingParams))
_values_of = attrgetter(*_NAMES)


@dataclass(slots=True)
class BeamSearchParams:
    """A beam search with vLLM's names; `sampling_params()` converts it for the engine.

    All `beam_width` beams are returned, best first. `temperature` is accepted but has no effect:
    the search uses the model's own log-probabilities.
    Source: vllm.BeamSearchParams; `early_stopping` from transformers' GenerationConfig.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidRequestError`."""
        require_int("beam_width", self.beam_width)
        require(1 <= self.beam_width <= MAX_N, "beam_width", self.beam_width,
                 f"between 1 and {MAX_N}")  # fmt: skip
        given = asdict(self)
        return SamplingParams(n=given.pop("beam_width"), use_beam_search=True, **given)


def checked_repetition(given: Any) -> RepetitionDetectionParams | None:
    """Check the field of a request, which may be a dict; None if the detection is off."""
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


def check_sampling_params(params: object) -> None:
    """Raise `TypeError` for anything else, such as a dict of the fields."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")

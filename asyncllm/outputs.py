"""The results of a request: vLLM's `RequestOutput`, `CompletionOutput` and their parts.

Plain records without references into the engine: callers may keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One token's natural log-probability under the raw distribution; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# For each position: token id -> Logprob, the sampled (or prompt) token first.
SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = Sequence[dict[int, Logprob] | None]


@dataclass(slots=True)
class RequestMetrics:
    """The times of one request in seconds of `time.monotonic()`; None before the event."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers. In a delta, `text`, `token_ids` and `logprobs` hold new ones only."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request; `finished` means that every completion has a finish_reason."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None  # raised by `generate`; finish_reason is "error"
    num_unreturned_tokens: int = 0  # tokens of answers that `best_of` left out


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. As in vLLM, `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float  # cum_logprob / number of new tokens ** length_penalty
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first: the result of `LLM.beam_search`."""

    sequences: list[BeamSearchSequence]

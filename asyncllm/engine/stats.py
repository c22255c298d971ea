"""The records that observers get, once per finished step and never per token.

The records carry vLLM's meanings; `recorder.py` adds them up, /metrics publishes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from asyncllm.outputs import FinishReason

if TYPE_CHECKING:  # numpy is behind it, and --help prints no step
    from asyncllm.step_plan import StepKind

AbortCause = Literal["application", "disconnect", "slow_reader", "shutdown", "server_error"]


@dataclass(slots=True)
class SchedulerStats:
    """Gauges and running totals, read at any time."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_pages: int = 0  # the padding page not counted
    num_groups: int = 1  # of layers, in each of which a block takes a page
    num_used_pages: int = 0
    num_host_pages: int = 0
    num_used_host_pages: int = 0
    prefix_cache_queries: int = 0  # tokens asked for, total
    prefix_cache_hits: int = 0  # tokens found, total
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0

    @property
    def kv_cache_usage(self) -> float:
        return self.num_used_pages / self.num_pages if self.num_pages else 0.0


@dataclass(slots=True, frozen=True)
class FinishedRequestStats:
    """One request at its end. Times in seconds; None where the stage was never reached."""

    request_id: str
    finish_reason: FinishReason  # of its first sequence
    num_prompt_tokens: int
    num_generation_tokens: int  # all sequences
    max_num_generation_tokens: int  # of its longest sequence
    num_cached_tokens: int
    max_tokens: int
    n: int
    e2e_time: float
    queue_time: float | None
    prefill_time: float | None  # first scheduled to first token
    decode_time: float | None  # first to last token
    time_to_first_token: float | None
    time_per_output_token: float | None  # decode_time / (tokens of the first sequence - 1)


@dataclass(slots=True)
class StepRecord:
    """One finished step, as the device saw it and as the host paid for it. Times in seconds."""

    step_id: int
    kind: StepKind
    rows: int  # decodes and prefill chunks
    tokens: int  # computed by them
    prefill_tokens: int  # of these, in prefill chunks
    start: float  # the device began, time.monotonic()
    duration: float  # on the device
    launch_lead: float | None  # end of the step before minus launch; None after idleness
    starved: float  # the device stood still before it, with work at hand
    num_swap_out: int = 0  # pages
    num_swap_in: int = 0


@dataclass(slots=True)
class IterationStats:
    """Tokens, latencies and ends of requests that one step brought."""

    num_prompt_tokens: int = 0  # of the requests whose first token this step gave
    num_cached_tokens: int = 0  # of these, taken from the prefix cache
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    step: StepRecord | None = None  # None for what happened between steps: aborts


class StatLogger(Protocol):
    """An observer; it must not block. One that raises gets no more."""

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None: ...

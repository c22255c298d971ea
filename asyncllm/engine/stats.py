"""The records that observers get once per finished step, never per token.

They mean the same as in vLLM. `recorder.py` adds them up, /metrics publishes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from asyncllm.outputs import FinishReason

if TYPE_CHECKING:  # it imports numpy, which --help does not need
    from asyncllm.step_plan import StepKind

AbortCause = Literal["application", "disconnect", "slow_reader", "shutdown", "server_error"]


@dataclass(slots=True)
class SchedulerStats:
    """Gauges and running totals. May be read at any time."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_pages: int = 0  # without the padding page
    num_groups: int = 1  # cache groups; a block takes a page in each
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
    """A finished request. Times in seconds; None if the stage was not reached."""

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
    """A finished step, with times on the device and on the host in seconds."""

    step_id: int
    kind: StepKind
    rows: int  # decodes and prefill chunks
    tokens: int  # computed tokens
    prefill_tokens: int  # computed tokens of prefill chunks
    start: float  # when the device began, by time.monotonic()
    duration: float  # on the device
    launch_lead: float | None  # end of the step before minus launch; None after an idle time
    starved: float  # idle time of the device before it, although there was work
    num_swap_out: int = 0  # pages
    num_swap_in: int = 0


@dataclass(slots=True)
class IterationStats:
    """Tokens, latencies and finished requests of one step."""

    num_prompt_tokens: int = 0  # of requests that got their first token in this step
    num_cached_tokens: int = 0  # the part of these from the prefix cache
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    step: StepRecord | None = None  # None for events between steps, such as aborts


class StatLogger(Protocol):
    """An observer. It must not block; if it raises, it gets no more records."""

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None: ...

"""The vocabulary: what the scheduler, the pipeline, the worker and the outputs say to each other.

No torch and nothing of ours but the public records. Each word means the same everywhere:

  page (block)  `block_size` consecutive token positions of one sequence's KV cache
  slot          a sequence's row in the device-resident state, held while it runs; 0 is padding
  row           one sequence's share of a step
  prefill       a row whose input tokens come from the host (prompt, or recomputed output)
  decode        a row whose one input token is already on the device, in its slot
  chunk         the part of a prefill that one step computes
  in flight     launched, its tokens not yet known on the host
  host row      a row whose sampling needs the tokens before it on the host: grammars, processors

A `StepPlan` (step_plan.py) is immutable. A `Sequence` is mutable and owned by the scheduler, except
`token_ids` and `num_in_flight`, which move only in its `finish_step` and `jump_forward`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncllm.outputs import FinishReason, RequestMetrics
from asyncllm.sampling_params import SamplingParams

PADDING_SLOT = 0
NON_FINITE_TOKEN = -1  # the device's word for a row whose logits are NaN or infinite
NO_TOKEN_LEFT = -2  # and for one all of whose tokens its own request forbids
PADDING_PAGE = 0
NO_ADAPTER = 0  # the adapter slot of requests without one


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # owns nothing, or (preempted, to be recomputed) only its tokens
    SWAPPED = enum.auto()  # its pages are in CPU memory
    RUNNING = enum.auto()  # owns a slot and pages
    FINISHED = enum.auto()


class TokenConstraint(Protocol):
    """The tokens that a grammar allows next in one sequence. Owned by the engine; not thread-safe.

    The engine calls `accept_many` with the tokens that are known on the host since the last call,
    then `fill_many` before the next are sampled, both in a worker thread, with all rows of a step,
    so that these may be spread over threads. All constraints are of one class.
    """

    @staticmethod
    def accept_many(constraints: list[Any], token_ids: list[list[int]]) -> list[Exception | None]:
        """Take each row's tokens, in order: for each what is wrong, as a token not allowed."""
        ...

    @staticmethod
    def fill_many(constraints: list[Any], bitmasks: np.ndarray) -> list[Exception | None]:
        """Write int32 [rows, ceil(V / 32)], and return for each row what is wrong.

        Bit i % 32 of a row's word i // 32 is set where token i may come.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, whatever the model says; none where it has a choice."""
        ...


# Decides some of one sequence's tokens instead of the model: from all its tokens the one that must
# follow, or None where the model decides. Not thread-safe.
TokenForcer = Callable[[list[int]], int | None]


@dataclass(slots=True, eq=False)
class Request:
    """A validated, tokenised request.

    `max_tokens` is resolved (never None) and prompt + max_tokens fits the window. `stop_token_ids`
    are those that end a sequence, EOS included unless ignored. `bad_words_ids` are token sequences.
    `cache_key` separates prefix caches: by salt, and by the prompt's length where KV depends on it
    (dynamic RoPE past its window). `batch_processors`: which of the engine's logits processors it
    needs. Where answers are chosen by score (`best_of`, beam search) `sampling_params.logprobs` is
    what the choice needs, and `num_shown_logprobs` what the client asked for. `parent`: the beam
    search for which this is one token of a beam; its times and tokens are counted there.
    `adapter_slot`: where the device has the request's LoRA adapter, for as long as it lives.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    metrics: RequestMetrics
    priority: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    cache_key: bytes = b""
    num_shown_logprobs: int | None = None
    batch_processors: tuple[int, ...] = ()
    parent: Request | None = None
    adapter_slot: int = NO_ADAPTER
    sequences: list[Sequence] = field(default_factory=list)

    def use_adapter(self, slot: int, content: bytes) -> None:
        """`content`: of the adapter's files. Its KV is shared with requests of equal files only."""
        self.adapter_slot = slot
        self.cache_key = hashlib.sha256(self.cache_key + content).digest()

    @property
    def needs_host(self) -> bool:
        """Each of its samplings depends on the output tokens before it, known on the host."""
        params = self.sampling_params
        processed = bool(self.batch_processors or params.logits_processors)
        may_be_forced = params.thinking_token_budget is not None
        return processed or may_be_forced or any(len(word) > 1 for word in self.bad_words_ids)

    @property
    def finished(self) -> bool:
        return all(s.status is SequenceStatus.FINISHED for s in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's `n` answers in the making.

    token_ids      prompt, then the output tokens known on the host
    num_in_flight  output tokens sampled by launched steps, not yet known on the host (0 or 1
                   between steps, one more while a step is planned ahead)
    num_computed   positions whose KV is written by launched steps
    num_to_compute those until its last token is sampled, if it goes on to max_tokens
    num_prefill    tokens known when it was admitted, or jumped to: it decodes once num_computed has
                   reached them
    num_to_drop    of the samples in flight, those whose token is known already
    num_accepted   output tokens that the constraint has been told; its thread's own
    """

    seq_id: int
    request: Request
    index: int
    seed: int
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = PADDING_SLOT
    num_in_flight: int = 0
    num_computed: int = 0
    num_prefill: int = 0
    num_cached_tokens: int = 0  # of the prompt, served by the prefix cache at first admission
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    constraint: TokenConstraint | None = None
    forcer: TokenForcer | None = None  # only with a request that needs_host
    num_to_drop: int = 0
    num_accepted: int = 0
    num_prompt_tokens: int = field(init=False)
    num_to_compute: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_to_compute = self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def needs_host(self) -> bool:
        """Whether its rows are host rows."""
        return self.constraint is not None or self.request.needs_host

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known on the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether its prefill reports the prompt's logprobs, and so must compute all of it.

        A request's first sequence does, until its first token: siblings, and what is computed again
        after a preemption, may read the prefix cache.
        """
        wanted = self.request.sampling_params.prompt_logprobs is not None
        return wanted and self.index == 0 and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        """All tokens, those in flight included."""
        return len(self.token_ids) + self.num_in_flight


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: of the token itself, its rank, and others.

    The others are the most likely, in order, or those that the request named.
    """

    logprob: float
    rank: int
    top_ids: SequenceOf[int]
    top_logprobs: SequenceOf[float]


@dataclass(slots=True, frozen=True)
class StepResult:
    """A finished step. `token_ids[i]` belongs to `plan.sampled[i]`.

    `logprobs[i]` is None for a row that did not ask. `prompt_logprobs[seq_id]` holds, for a
    prefill row that asked, one entry per prompt position start+1 .. start+len that is inside the
    prompt (the logprob of that position's token given all before it). `failures[i]`: what the
    logits processors of row i raised; its token means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)


# What `Scheduler.finish_step` made of one sampled token: an update for the output processor. As the
# rows come, without a class of its own: to make 256 of one costs as much as all else done to them.
TokenUpdate = tuple[Sequence, int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Measured by the worker at start; decides between swapping and recomputing a sequence."""

    seconds_per_page: float  # one page, in one direction
    seconds_per_token: float  # of prefill
    seconds_per_state: float = 0.0  # of recurrent layers, in one direction


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured by the worker at start; decides how much prefill goes beside running decodes."""

    seconds_per_step: float  # of the smallest decode step
    seconds_per_token: float  # of prefill

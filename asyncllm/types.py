"""The vocabulary that scheduler, pipeline, worker and output processing share.

It imports neither torch nor anything of asyncllm but the public records. Each word has one meaning:

  page (block)  `block_size` consecutive token positions of one sequence's KV cache
  slot          a sequence's row in the device state, held while the sequence runs; 0 is padding
  row           one sequence's share of a step
  prefill       a row whose input tokens come from the host (a prompt, or output to recompute)
  decode        a row with one input token, which is on the device already, in the slot
  chunk         the part of a prefill that one step computes
  in flight     launched, but its tokens are not known on the host yet
  host row      a row that is sampled only when the host knows the tokens before it, because a
                grammar or a logits processor needs them

A `StepPlan` (step_plan.py) is immutable. A `Sequence` is mutable and belongs to the scheduler;
while it runs, only `Scheduler.finish_step` and `Scheduler.jump_forward` append to its `token_ids`.
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
NON_FINITE_TOKEN = -1  # sampled from logits that are NaN or infinite
NO_TOKEN_LEFT = -2  # sampled where the request's own parameters forbid every token
PADDING_PAGE = 0
NO_ADAPTER = 0  # the adapter slot of requests without one


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # owns neither slot nor pages: new, or preempted to be recomputed
    SWAPPED = enum.auto()  # its pages are in CPU memory
    RUNNING = enum.auto()  # owns a slot and pages
    FINISHED = enum.auto()


class TokenConstraint(Protocol):
    """The tokens that a grammar allows next in one sequence. Not thread-safe.

    Before each sampling the engine calls `accept_many` with the tokens that it has learnt since the
    last call, then `fill_many`. Both run in a worker thread and take all rows of a step at once, so
    that an implementation may use several threads. All constraints are of one class.
    """

    @staticmethod
    def accept_many(constraints: list[Any], token_ids: list[list[int]]) -> list[Exception | None]:
        """Advance each row by its tokens. Returns an error where they are not allowed, else
        None."""
        ...

    @staticmethod
    def fill_many(constraints: list[Any], bitmasks: np.ndarray) -> list[Exception | None]:
        """Fill int32 [rows, ceil(V / 32)]; returns an error, or None, for each row.

        Bit i % 32 of a row's word i // 32 is set where token i is allowed.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        ...


# All tokens of a sequence -> the token that must follow, or None where the model decides. Not
# thread-safe.
TokenForcer = Callable[[list[int]], int | None]


@dataclass(slots=True, eq=False)
class Request:
    """A validated, tokenised request.

    max_tokens          resolved (never None); prompt + max_tokens fits the context window
    stop_token_ids      tokens that end a sequence, EOS included unless it is ignored
    bad_words_ids       one token sequence for each forbidden word
    cache_key           part of every block hash: requests with different keys share no KV. It holds
                        the salt, the adapter, and the prompt's length where KV depends on it
                        (dynamic RoPE past its window)
    num_shown_logprobs  the number that the client asked for. `sampling_params.logprobs` may be
                        larger, where answers are chosen by score (`best_of`, beam search)
    batch_processors    indices of the engine's logits processors that it needs
    parent              the beam search that this request computes one token for; the search counts
                        its tokens and times
    adapter_slot        the device slot of its LoRA adapter, held until the request ends
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
        """content: a hash of the adapter's files; only requests with equal files share KV."""
        self.adapter_slot = slot
        self.cache_key = hashlib.sha256(self.cache_key + content).digest()

    @property
    def needs_host(self) -> bool:
        """Whether the host must know all output tokens before it can sample the next."""
        params = self.sampling_params
        processed = bool(self.batch_processors or params.logits_processors)
        may_be_forced = params.thinking_token_budget is not None
        return processed or may_be_forced or any(len(word) > 1 for word in self.bad_words_ids)

    @property
    def finished(self) -> bool:
        return all(s.status is SequenceStatus.FINISHED for s in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's `n` answers while it is generated.

    token_ids       the prompt, then the output tokens that the host knows
    num_in_flight   tokens sampled by launched steps that the host does not know yet: 0 or 1, and 2
                    while the next step is planned
    num_computed    positions whose KV is written by launched steps
    num_to_compute  the same at the end, if it runs to max_tokens
    num_prefill     tokens known at admission, or after a jump-forward; the sequence decodes once
                    num_computed has reached this
    num_to_drop     samples in flight to ignore, as jump-forward has appended their tokens already
    num_accepted    output tokens that the constraint has accepted; used by its thread alone
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
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had at its first admission
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
        """Whether its prefill reports prompt logprobs, and so must compute the whole prompt.

        Only a request's first sequence does, until its first token. Siblings, and a sequence that
        is recomputed after preemption, may use the prefix cache.
        """
        wanted = self.request.sampling_params.prompt_logprobs is not None
        return wanted and self.index == 0 and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.token_ids) + self.num_in_flight


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature, penalties and filters: the token's,
    its rank, and those of the most likely tokens or of `logprob_token_ids`."""

    logprob: float
    rank: int
    top_ids: SequenceOf[int]
    top_logprobs: SequenceOf[float]


@dataclass(slots=True, frozen=True)
class StepResult:
    """The output of a finished step. `token_ids[i]` belongs to `plan.sampled[i]`.

    `logprobs[i]` is None for a row that did not ask. `prompt_logprobs[seq_id]` has one entry per
    prompt position from start + 1 to start + len of a prefill row that asked: the logprob of that
    position's token. `failures[i]` is what a logits processor raised for row i, whose token is
    then meaningless.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceTimes:
    """When the device worked on a step: seconds of `time.monotonic()`."""

    started: float = 0.0
    ended: float = 0.0


class LaunchedStep(Protocol):
    """A step that the device has been given: all of it, or its forward pass."""

    async def wait(self) -> StepResult:
        """The step's tokens, once it is done. Raises what the device raised."""
        ...

    def device_times(self) -> DeviceTimes:
        """Valid after `wait`."""
        ...


# One new token of a sequence, from `Scheduler.finish_step` to the output processor. A plain tuple:
# making 256 instances of a class would cost as much as all other work on them.
TokenUpdate = tuple[Sequence, int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Measured by the worker at start; chooses between swapping and recomputing a sequence."""

    seconds_per_page: float  # in one direction
    seconds_per_token: float  # of prefill
    seconds_per_state: float = 0.0  # recurrent state of one sequence, in one direction


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured by the worker at start; sets the prefill chunk of steps that also decode."""

    seconds_per_step: float  # the smallest decode step by the layers' kernels
    seconds_per_token: float  # of prefill

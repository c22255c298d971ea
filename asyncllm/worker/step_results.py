"""A step's results on their way back to the host.

`fetch` enqueues the copies into pinned memory; the function that it returns reads them, to be
called after the step's end.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from asyncllm.graphs.pool import Recorded
from asyncllm.models.base import CausalLM
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult, TokenLogprobs
from asyncllm.worker.executor import Collect
from asyncllm.worker.packed_step import DeviceExtras, PackedStep, PromptLogprobs
from asyncllm.worker.sampler import LogprobTensors, gather_logprobs

PROMPT_LOGPROB_ROWS = 128  # rows of logits at once, for prompt logprobs


class ResultBuffers:
    """Pinned buffers of `capacity` int32 tokens: the most rows that a step samples.

    One per step in flight, kept for the next ones: pinned memory from torch's allocator costs an
    event per tensor. A buffer is free again once it was read, so that of a step that failed is
    simply never reused. On the CPU the tokens are where they should be.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._pinned = device.type == "cuda"
        self._free: list[_TokenBuffer] = []

    def fetch(self, tokens: torch.Tensor, num_rows: int) -> Callable[[], list[int]]:
        """Enqueue the copy of `tokens`, int32; call the result once, after the step's end. What is
        behind the first `num_rows` is padding."""
        if not self._pinned:
            return tokens[:num_rows].tolist
        buffer = self._free.pop() if self._free else _TokenBuffer(self._allocate())
        host = buffer.first(len(tokens))
        host.copy_(tokens, non_blocking=True)

        def read() -> list[int]:
            token_ids: list[int] = host.tolist()
            self._free.append(buffer)
            return token_ids[:num_rows]

        return read

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int32, pin_memory=True)


class _TokenBuffer:
    """A buffer and views of its first tokens, made once each: captured steps have few sizes."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._first: dict[int, torch.Tensor] = {}

    def first(self, number: int) -> torch.Tensor:
        if number not in self._first:
            self._first[number] = self._whole[:number]
        return self._first[number]


class Forwarded(NamedTuple):
    """The outputs of the forward pass that sampling reads, on the device. More rows than the step's
    are padding, behind them."""

    logits: torch.Tensor  # [rows, V], raw
    slots: torch.Tensor  # int32 [rows]
    positions: torch.Tensor | None  # int32 [rows], of the new tokens; None: as the slots say
    tokens: torch.Tensor | None  # int32 [rows], sampled plainly already, the slots advanced
    extras: DeviceExtras
    prompt_logprobs: SequenceOf[LogprobTensors]  # the pieces of all rows that want them, in order
    # Tokens of all rows, by masks that were uploaded for all; None where that is not captured.
    resample: Recorded | None = None

    def first(self, num_rows: int) -> Forwarded:
        """The step's rows alone."""
        return self._replace(
            logits=self.logits[:num_rows],
            slots=self.slots[:num_rows],
            positions=None if self.positions is None else self.positions[:num_rows],
            tokens=None if self.tokens is None else self.tokens[:num_rows],
        )


def fetch(
    step: PackedStep,
    plan: StepPlan,
    forwarded: Forwarded,
    tokens: torch.Tensor,
    failures: dict[int, Exception],
    buffers: ResultBuffers,
) -> Collect:
    """tokens: int32 [rows or more]. failures: of logits processors, by row."""
    token_ids = buffers.fetch(tokens, len(step.sampled_slots))
    logprobs = None
    if step.num_top_logprobs is not None:
        tensors = gather_logprobs(
            forwarded.logits, tokens, step.num_top_logprobs, forwarded.extras.logprob_ids
        )
        logprobs = _logprobs_to_host(tensors)
    prompt = [_logprobs_to_host(tensors) for tensors in forwarded.prompt_logprobs]

    def collect() -> StepResult:
        params = [seq.request.sampling_params for seq in plan.sampled] if logprobs else []
        return StepResult(
            token_ids(),
            _sample_logprobs(params, logprobs) if logprobs is not None else None,
            _split_prompt_logprobs(step.prompt_logprobs, prompt),
            failures,
        )

    return collect


def prompt_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    wanted: SequenceOf[PromptLogprobs],
    extras: DeviceExtras,
) -> list[LogprobTensors]:
    """In pieces: logits of a whole prompt would not fit beside the KV cache.

    hidden: of the step's tokens, [tokens, hidden_size].
    """
    pieces: list[LogprobTensors] = []
    if not wanted:
        return pieces
    assert extras.prompt_targets is not None
    targets = extras.prompt_targets.split([row.num_targets for row in wanted])
    for row, of_row in zip(wanted, targets, strict=True):
        for start in range(0, row.num_targets, PROMPT_LOGPROB_ROWS):
            piece = of_row[start : start + PROMPT_LOGPROB_ROWS]
            first = row.first_token + start
            logits = model.compute_logits(hidden[first : first + len(piece)])
            pieces.append(gather_logprobs(logits, piece, row.num_top))
    return pieces


def _logprobs_to_host(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors._make(None if each is None else _to_host(each) for each in tensors)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    columns = tensors.logprobs, tensors.ranks, tensors.top_ids, tensors.top_logprobs
    entries = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenLogprobs(*entry) for entry in entries]


def _sample_logprobs(
    wanted: SequenceOf[SamplingParams], tensors: LogprobTensors
) -> list[TokenLogprobs | None]:
    """Per sampled row what its request asked for: the top few, or the tokens that it named."""
    entries = _token_logprobs(tensors)
    named = None if tensors.named_logprobs is None else tensors.named_logprobs.tolist()
    result: list[TokenLogprobs | None] = []
    for row, (entry, params) in enumerate(zip(entries, wanted, strict=True)):
        num_others = params.num_logprobs
        if num_others is None:
            result.append(None)
            continue
        others: tuple[SequenceOf[int], SequenceOf[float]] = entry.top_ids, entry.top_logprobs
        if params.logprob_token_ids:
            assert named is not None, "a row named tokens, and none were looked up"
            others = params.logprob_token_ids, named[row]
        ids, logprobs = others
        result.append(
            TokenLogprobs(entry.logprob, entry.rank, ids[:num_others], logprobs[:num_others])
        )
    return result


def _split_prompt_logprobs(
    rows: SequenceOf[PromptLogprobs], pieces: list[LogprobTensors]
) -> dict[int, list[TokenLogprobs]]:
    """seq_id -> entries, from the pieces of all rows in order."""
    entries = iter([entry for piece in pieces for entry in _token_logprobs(piece)])
    return {row.seq_id: [next(entries) for _ in range(row.num_targets)] for row in rows}

"""A step's results on their way back to the host.

`fetch` enqueues the copies into pinned memory; the function that it returns reads them, to be
called after the step's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from asyncllm.models.base import CausalLM
from asyncllm.types import StepResult, TokenLogprobs
from asyncllm.worker.executor import Collect
from asyncllm.worker.result_buffers import ResultBuffers
from asyncllm.worker.sampler import LogprobTensors, gather_logprobs
from asyncllm.worker.step_inputs import PromptLogprobs, StepInputs

PROMPT_LOGPROB_ROWS = 128  # rows of logits at once, for prompt logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's forward pass and sampling gave, on the device."""

    tokens: torch.Tensor  # int32 [rows or more]
    logits: torch.Tensor  # [rows, V], raw; more where no logprobs are wanted
    logprob_ids: torch.Tensor | None  # int32 [rows, ids]: named for logprobs
    prompt_logprobs: SequenceOf[LogprobTensors]  # the pieces of all rows that want them, in order
    failures: dict[int, Exception]  # of logits processors, by row


def fetch(inputs: StepInputs, sampled: Sampled, buffers: ResultBuffers) -> Collect:
    token_ids = buffers.fetch(sampled.tokens, len(inputs.sampled_slots))
    logprobs = None
    if inputs.wants_logprobs:
        num_top = max(
            0 if params.logprob_token_ids else params.logprobs or 0
            for params in inputs.wants_logprobs
        )
        tensors = gather_logprobs(sampled.logits, sampled.tokens, num_top, sampled.logprob_ids)
        logprobs = _logprobs_to_host(tensors)
    prompt = [_logprobs_to_host(tensors) for tensors in sampled.prompt_logprobs]

    def collect() -> StepResult:
        return StepResult(
            token_ids(),
            _sample_logprobs(inputs, logprobs) if logprobs is not None else None,
            _split_prompt_logprobs(inputs, prompt),
            sampled.failures,
        )

    return collect


def prompt_logprobs_of(
    model: CausalLM,
    hidden: torch.Tensor,
    wanted: PromptLogprobs,
    tensors: Mapping[str, torch.Tensor],
) -> list[LogprobTensors]:
    """In pieces: logits of a whole prompt would not fit beside the KV cache.

    hidden: of the step's tokens, [tokens, hidden_size]. tensors: what was uploaded.
    """
    targets = tensors[wanted.array_name]
    pieces = []
    for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        piece = targets[start : start + PROMPT_LOGPROB_ROWS]
        first = wanted.first_token + start
        logits = model.compute_logits(hidden[first : first + len(piece)])
        pieces.append(gather_logprobs(logits, piece, wanted.num_top))
    return pieces


def _logprobs_to_host(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(
        _to_host(tensors.logprobs),
        _to_host(tensors.ranks),
        _to_host(tensors.top_ids),
        _to_host(tensors.top_logprobs),
        None if tensors.named_logprobs is None else _to_host(tensors.named_logprobs),
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(*entry)
        for entry in zip(
            tensors.logprobs.tolist(),
            tensors.ranks.tolist(),
            tensors.top_ids.tolist(),
            tensors.top_logprobs.tolist(),
            strict=True,
        )
    ]


def _sample_logprobs(inputs: StepInputs, tensors: LogprobTensors) -> list[TokenLogprobs | None]:
    """Per sampled row what its request asked for: the top few, or the tokens that it named."""
    entries = _token_logprobs(tensors)
    named = None if tensors.named_logprobs is None else tensors.named_logprobs.tolist()
    result: list[TokenLogprobs | None] = []
    for row, (entry, params) in enumerate(zip(entries, inputs.wants_logprobs, strict=True)):
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
    inputs: StepInputs, pieces: list[LogprobTensors]
) -> dict[int, list[TokenLogprobs]]:
    """seq_id -> entries, from the pieces of all rows in order."""
    entries = iter([entry for piece in pieces for entry in _token_logprobs(piece)])
    return {
        wanted.seq_id: [next(entries) for _ in range(wanted.num_targets)]
        for wanted in inputs.prompt_logprobs
    }

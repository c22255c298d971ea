"""Grammar masks and forced tokens (jump-forward) for a step's rows.

    loop     finish N |  ....   | emit N    .............................. | jump_forward, plan ...
    thread            | accept  |   fill   | launch the sampling of N+1 | forced |
    device    ... N+1's forward pass ...       | its sampling

It runs in a thread, and changes nothing but the constraints. If a constraint raises, the error is
returned with its sequence, and its row is sampled without a mask, to be ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncllm.step_plan import StepPlan
from asyncllm.types import Sequence, SequenceStatus

# Forced tokens are computed as a prefill, so the step is a mixed one, not a captured decode step.
# This is assumed to cost a sixth of a step for all rows (not measured yet). It saves its row a step
# for each token but the first, whose sample is in flight anyway. A single stream gains from two on.
JUMP_FORWARD_COST = 1 / 6

# A row with a forced token allows only that one: all words of its mask but one are 0. Looking at
# this many of a row's first words rules out nearly all other rows.
FIRST_WORDS = 64


@dataclass(frozen=True, slots=True)
class Constrained:
    """forced: tokens to append to a sequence without sampling."""

    forced: list[tuple[Sequence, list[int]]]
    failures: list[tuple[Sequence, Exception]]
    seconds: float  # time that this took


def constrain(
    plan: StepPlan,
    buffer: Callable[[], np.ndarray],
    sample: Callable[[np.ndarray], None],
    filling: Callable[[], object],
) -> Constrained:
    """Fill the masks of a step, launch its sampling, and find forced tokens. All tokens before the
    step are known.

    buffer: returns the mask buffer, int32 [rows or more, ceil(V / 32)]. sample: launches the
    sampling; it takes the rows of `plan.sampled` that the buffer's first masks are for, int32
    [masked]. filling: called when masks start to be filled, which releases the GIL.
    """
    start = time.monotonic()
    rows = [
        (row, seq)
        for row, seq in enumerate(plan.sampled)
        if seq.constraint is not None and seq.status is not SequenceStatus.FINISHED
    ]
    if not rows:
        sample(np.zeros(0, np.int32))
        return Constrained([], [], time.monotonic() - start)
    seqs = [seq for _, seq in rows]
    bits = buffer()[: len(rows)]
    failures = _advance(seqs, bits, filling)
    sample(np.array([row for row, _ in rows], np.int32))
    forced, unanswered = _forced_tokens(seqs, bits, len(plan.sampled))
    return Constrained(forced, failures + unanswered, time.monotonic() - start)


def _advance(
    seqs: list[Sequence], bits: np.ndarray, filling: Callable[[], object]
) -> list[tuple[Sequence, Exception]]:
    """Advance each constraint by its tokens, and fill its mask. A row with an error allows all."""
    constraints = [seq.constraint for seq in seqs if seq.constraint is not None]
    kind = constraints[0]  # all are of one class
    accept_errors = kind.accept_many(constraints, [_take_unaccepted(seq) for seq in seqs])
    filling()
    fill_errors = kind.fill_many(constraints, bits)
    failures: list[tuple[Sequence, Exception]] = []
    for i, seq in enumerate(seqs):
        if error := accept_errors[i] or fill_errors[i]:  # ends this request only
            bits[i].fill(-1)
            failures.append((seq, error))
    return failures


def _take_unaccepted(seq: Sequence) -> list[int]:
    token_ids = seq.token_ids[seq.num_prompt_tokens + seq.num_accepted :]
    seq.num_accepted += len(token_ids)
    return token_ids


def _forced_tokens(
    seqs: list[Sequence], bits: np.ndarray, num_rows: int
) -> tuple[list[tuple[Sequence, list[int]]], list[tuple[Sequence, Exception]]]:
    """Forced tokens, unless they save less than a mixed step costs; and errors."""
    found: list[tuple[Sequence, list[int]]] = []
    failures: list[tuple[Sequence, Exception]] = []
    for seq in (seqs[i] for i in _single_words(bits)):
        if may_jump_forward(seq):
            assert seq.constraint is not None
            try:
                num_left = seq.request.max_tokens - seq.num_output_tokens
                forced = seq.constraint.forced_tokens()[:num_left]
            except Exception as error:  # its sample, already launched, is ignored
                failures.append((seq, error))
                continue
            if len(forced) > 1:
                found.append((seq, forced))
    num_saved = sum(len(forced) - 1 for _, forced in found)
    return found if num_saved >= JUMP_FORWARD_COST * num_rows else [], failures


def _single_words(bits: np.ndarray) -> list[int]:
    """Rows with one nonzero word; rows with a forced token are among them."""
    few = np.flatnonzero(np.count_nonzero(bits[:, :FIRST_WORDS], axis=1) <= 1)
    return [row for row in few.tolist() if np.count_nonzero(bits[row] != 0) == 1]


def may_jump_forward(seq: Sequence) -> bool:
    """Whether no logprobs or logits processors need the logits of each position."""
    params = seq.request.sampling_params
    wants_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
    processed = params.logits_processors or seq.request.batch_processors
    return not (wants_logprobs or processed)

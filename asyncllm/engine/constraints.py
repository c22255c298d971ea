"""Masks and forced tokens for a step's rows, from their grammars: the engine's jump-forward.

    loop     finish N |  ....   | emit N    .............................. | jump_forward, plan ...
    thread            | accept  |   fill   | launch the sampling of N+1 | forced |
    device    ... N+1's forward pass ...       | its sampling

It runs in a thread, and changes nothing but the constraints. A constraint that raises is reported
with its sequence; its row is sampled freely, for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncllm.step_plan import StepPlan
from asyncllm.types import Sequence, SequenceStatus

# Forced tokens are computed as a prefill, so the step is a mixed one and not a captured decode.
# That is taken to cost all of its rows a sixth of a step (not measured yet); it saves a row one
# step for each token but the first, for which it is in flight anyway. A stream alone gains by two.
JUMP_FORWARD_COST = 1 / 6

# What forces a token allows it alone: all words of its mask but one are 0. So many of a row's first
# words rule out nearly all other rows.
FIRST_WORDS = 64


@dataclass(frozen=True, slots=True)
class Constrained:
    """`forced`: tokens that follow the known ones of a sequence, to be appended unsampled."""

    forced: list[tuple[Sequence, list[int]]]
    failures: list[tuple[Sequence, Exception]]
    seconds: float  # that it took


def constrain(
    plan: StepPlan,
    buffer: Callable[[], np.ndarray],
    sample: Callable[[np.ndarray], None],
    filling: Callable[[], object],
) -> Constrained:
    """For a step that is about to be sampled, all tokens before it known; `sample` launches it.

    `buffer` gives int32 [rows or more, ceil(V / 32)], to be overwritten; `sample` gets the places
    in `plan.sampled` of the rows that its first masks are for, int32 [masked]. `filling` is called
    when masks begin to be filled, which is where it lets go of the GIL.
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
    """Each takes its tokens, and its mask goes into its row. What cannot be filled allows all."""
    constraints = [seq.constraint for seq in seqs if seq.constraint is not None]
    kind = constraints[0]  # there is one class of them
    accept_errors = kind.accept_many(constraints, [_take_unaccepted(seq) for seq in seqs])
    filling()
    fill_errors = kind.fill_many(constraints, bits)
    failures: list[tuple[Sequence, Exception]] = []
    for i, seq in enumerate(seqs):
        if error := accept_errors[i] or fill_errors[i]:  # its own grammar: it ends its own request
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
    """Forced tokens, none where all save less than a mixed step costs; and what was raised."""
    found: list[tuple[Sequence, list[int]]] = []
    failures: list[tuple[Sequence, Exception]] = []
    for seq in (seqs[i] for i in _single_words(bits)):
        if may_jump_forward(seq):
            assert seq.constraint is not None
            try:
                num_left = seq.request.max_tokens - seq.num_output_tokens
                forced = seq.constraint.forced_tokens()[:num_left]
            except Exception as error:  # as in `constrain`; its sampling is launched, for nobody
                failures.append((seq, error))
                continue
            if len(forced) > 1:
                found.append((seq, forced))
    num_saved = sum(len(forced) - 1 for _, forced in found)
    return found if num_saved >= JUMP_FORWARD_COST * num_rows else [], failures


def _single_words(bits: np.ndarray) -> list[int]:
    """Rows with one word that is not 0: who has one token to come is among them."""
    few = np.flatnonzero(np.count_nonzero(bits[:, :FIRST_WORDS], axis=1) <= 1)
    return [row for row in few.tolist() if np.count_nonzero(bits[row] != 0) == 1]


def may_jump_forward(seq: Sequence) -> bool:
    """Not whose logits somebody wants to see, or to change, at each position."""
    params = seq.request.sampling_params
    wants_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
    processed = params.logits_processors or seq.request.batch_processors
    return not (wants_logprobs or processed)

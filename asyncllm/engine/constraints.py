"""What the constraints of a step's rows say: masks, and tokens that must come whatever is sampled.

    loop     finish N | awaits ........................ | jump, plan N+2 ...
    thread            | accept, fill | launch the sampling of N+1 | forced |
    device    ... N+1's forward pass ...     | its sampling

It runs in a thread, and changes nothing but the constraints. A constraint that raises is reported
with its sequence; its row is sampled freely, for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np

from asyncllm.types import NO_MASKS, Sequence, SequenceStatus, StepPlan, TokenMasks

# Forced tokens are computed as a prefill, so the step is a mixed one and not a captured decode.
# That is taken to cost all of its rows a sixth of a step (not measured yet); it saves a row one
# step for each token but the first, for which it is in flight anyway. A stream alone jumps for two.
JUMP_COST = 1 / 6

FillMany = Callable[[list[object], np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Constrained:
    """`jumps`: tokens that follow the known ones of a sequence, to be appended unsampled."""

    jumps: list[tuple[Sequence, list[int]]]
    failures: list[tuple[Sequence, Exception]]


class MaskBuffer(Protocol):
    def host(self) -> np.ndarray:
        """int32 [rows or more, ceil(V / 32)], to be overwritten."""
        ...


def constrain(
    plan: StepPlan, buffer: MaskBuffer, sample: Callable[[TokenMasks], None]
) -> Constrained:
    """For a step that is about to be sampled, all tokens before it known; `sample` launches it."""
    failures: list[tuple[Sequence, Exception]] = []
    rows: list[tuple[int, Sequence]] = []
    for row, seq in enumerate(plan.sampled):
        if seq.constraint is None or seq.status is SequenceStatus.FINISHED:
            continue
        try:
            _accept_known(seq)
        except Exception as error:  # its own grammar: it ends its own request
            failures.append((seq, error))
        else:
            rows.append((row, seq))
    if not rows:
        sample(NO_MASKS)
        return Constrained([], failures)
    rows.sort(key=lambda row: id(_kind(row[1])))  # those of one class together
    seqs = [seq for _, seq in rows]
    bits = buffer.host()[: len(rows)]
    failures += _fill(seqs, bits)
    sample(TokenMasks(np.array([row for row, _ in rows], np.int32), bits))
    jumps, unanswered = _jumps(seqs, bits, len(plan.sampled))
    return Constrained(jumps, failures + unanswered)


def _accept_known(seq: Sequence) -> None:
    assert seq.constraint is not None
    for token_id in seq.token_ids[seq.num_prompt_tokens + seq.num_accepted :]:
        seq.constraint.accept(token_id)
        seq.num_accepted += 1


def _fill(seqs: list[Sequence], bits: np.ndarray) -> list[tuple[Sequence, Exception]]:
    """Each sequence's mask into its row; neighbours of one class in one call."""
    failures: list[tuple[Sequence, Exception]] = []
    begin = 0
    for kind, group in groupby(seqs, _kind):
        alike = list(group)
        failures += _fill_alike(kind, alike, bits[begin : begin + len(alike)])
        begin += len(alike)
    return failures


def _kind(seq: Sequence) -> type[object]:
    return type(seq.constraint)


def _fill_alike(
    kind: type[object], seqs: list[Sequence], bits: np.ndarray
) -> list[tuple[Sequence, Exception]]:
    """What cannot be filled allows everything."""
    fill_many: FillMany | None = getattr(kind, "fill_many", None)
    if fill_many is not None:
        try:
            fill_many([seq.constraint for seq in seqs], bits)
            return []
        except Exception:  # whose it is shows below
            pass
    failures: list[tuple[Sequence, Exception]] = []
    for seq, row in zip(seqs, bits, strict=True):
        assert seq.constraint is not None
        try:
            seq.constraint.fill(row)
        except Exception as error:
            row.fill(-1)
            failures.append((seq, error))
    return failures


def _jumps(
    seqs: list[Sequence], bits: np.ndarray, num_rows: int
) -> tuple[list[tuple[Sequence, list[int]]], list[tuple[Sequence, Exception]]]:
    """Jumps, none where together they save less than a mixed step costs; and what was raised."""
    # Who has one token to come has one word that is not 0: few are asked for more.
    candidates = np.flatnonzero(np.count_nonzero(bits, axis=1) == 1).tolist()
    jumps: list[tuple[Sequence, list[int]]] = []
    failures: list[tuple[Sequence, Exception]] = []
    for seq in (seqs[i] for i in candidates):
        if may_jump(seq):
            assert seq.constraint is not None
            try:
                forced = seq.constraint.forced_tokens()[: _num_tokens_left(seq)]
            except Exception as error:  # as in `constrain`; its sampling is launched, for nobody
                failures.append((seq, error))
                continue
            if len(forced) > 1:
                jumps.append((seq, forced))
    num_saved = sum(len(forced) - 1 for _, forced in jumps)
    return jumps if num_saved >= JUMP_COST * num_rows else [], failures


def may_jump(seq: Sequence) -> bool:
    """Not whose logits somebody wants to see, or to change, at each position."""
    params = seq.request.sampling_params
    wants_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
    processed = params.logits_processors or seq.request.batch_processors
    return not (wants_logprobs or processed)


def _num_tokens_left(seq: Sequence) -> int:
    return seq.request.max_tokens - seq.num_output_tokens

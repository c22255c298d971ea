"""The right answer of a sequence, from its tokens alone: no pages, slots, steps or neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.outputs import FinishReason
from asyncllm.types import Request, Sequence
from tests.engine.automaton import Automaton
from tests.engine.fake_device import (
    banned_tokens,
    first_cell,
    kv_cell,
    masked_tokens,
    next_token,
)

STOP_SUM = 9  # two tokens whose sum is a multiple of it are the "stop string" of some requests


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None


def generate_alone(seq: Sequence, has_stop_string: bool) -> Answer:
    """The whole answer of `seq`, however much of it the engine has computed."""
    request = seq.request
    params = request.sampling_params
    cells = cells_of(request, [])
    output_ids: list[int] = []
    while True:
        banned = banned_tokens(request, output_ids)
        if isinstance(seq.constraint, Automaton):
            banned = masked_tokens(banned, seq.constraint.forbidden(len(output_ids)))
        token_id = next_token(cells, seq.seed, banned)
        output_ids.append(token_id)
        cells.append(kv_cell(token_id, cells))
        may_stop = len(output_ids) >= params.min_tokens or seq.constraint is not None
        if may_stop and token_id in request.stop_token_ids:
            asked_for = token_id in (params.stop_token_ids or ())
            return Answer(output_ids, "stop", token_id if asked_for else None)
        if len(output_ids) >= request.max_tokens:
            return Answer(output_ids, "length", None)
        if has_stop_string and ends_with_stop_string(output_ids):
            return Answer(output_ids, "stop", "string")


def cells_of(request: Request, output_ids: list[int]) -> list[int]:
    cells = [first_cell(request.cache_key)]
    for token_id in [*request.prompt_token_ids, *output_ids]:
        cells.append(kv_cell(token_id, cells))
    return cells


def ends_with_stop_string(output_ids: list[int]) -> bool:
    return len(output_ids) >= 2 and sum(output_ids[-2:]) % STOP_SUM == 0

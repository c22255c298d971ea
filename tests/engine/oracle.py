"""The right answer of a sequence, from its tokens alone: no pages, slots, steps or neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.outputs import FinishReason
from asyncllm.types import Request, Sequence
from tests.engine.automaton import Automaton
from tests.engine.fake_device import (
    ZERO_STATE,
    Seen,
    banned_tokens,
    first_cell,
    kv_cells,
    masked_tokens,
    moved_state,
    next_token,
    seen_from,
)

STOP_SUM = 9  # two tokens whose sum is a multiple of it are the "stop string" of some requests


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None


class Memory:
    """The KV of one sequence in each group, nothing of it ever given back."""

    def __init__(self, request: Request, windows: tuple[int | None, ...], has_states: bool) -> None:
        self._first, self._windows = first_cell(request.cache_key), windows
        self._state, self._has_states = ZERO_STATE, has_states
        self._cells: list[list[int]] = [[] for _ in windows]
        for token_id in request.prompt_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        new = kv_cells(token_id, self._seen(len(self._cells[0])))
        for cells, cell in zip(self._cells, new, strict=True):
            cells.append(cell)
        if self._has_states:
            self._state = moved_state(self._state, token_id)

    def last(self) -> Seen:
        """The tokens that the last one sees."""
        return self._seen(len(self._cells[0]) - 1)

    def _seen(self, position: int) -> Seen:
        groups = zip(self._cells, self._windows, strict=True)
        first = self._first, self._state
        return first, *(tuple(c[seen_from(window, position) :]) for c, window in groups)


def generate_alone(
    seq: Sequence,
    has_stop_string: bool,
    windows: tuple[int | None, ...] = (None,),
    has_states: bool = False,
) -> Answer:
    """The whole answer of `seq`, however much of it the engine has computed."""
    request = seq.request
    params = request.sampling_params
    memory = Memory(request, windows, has_states)
    output_ids: list[int] = []
    while True:
        banned = banned_tokens(request, output_ids)
        if isinstance(seq.constraint, Automaton):
            banned = masked_tokens(banned, seq.constraint.forbidden(len(output_ids)))
        token_id = next_token(memory.last(), seq.seed, banned)
        output_ids.append(token_id)
        memory.add(token_id)
        may_stop = len(output_ids) >= params.min_tokens or seq.constraint is not None
        if may_stop and token_id in request.stop_token_ids:
            asked_for = token_id in (params.stop_token_ids or ())
            return Answer(output_ids, "stop", token_id if asked_for else None)
        if len(output_ids) >= request.max_tokens:
            return Answer(output_ids, "length", None)
        if has_stop_string and ends_with_stop_string(output_ids):
            return Answer(output_ids, "stop", "string")


def ends_with_stop_string(output_ids: list[int]) -> bool:
    return len(output_ids) >= 2 and sum(output_ids[-2:]) % STOP_SUM == 0

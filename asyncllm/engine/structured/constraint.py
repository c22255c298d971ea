"""One sequence's way through its grammar: a `TokenConstraint` on llguidance's matcher.

The text may end only where the grammar may, and then it must where nothing else may come. Before
`min_tokens`, and with `ignore_eos`, it ends only where it must.
Where the library gives up (a limit, a state from which nothing leads on) it would say "end here";
that is an error here, so that no text passes for complete that is not.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher

from asyncllm.errors import RequestFailedError, one_line

MAX_FILL_SECONDS = 0.1  # of one thread's own time; usual ones take 0.05 ms


class GrammarConstraint:
    """Until `min_tokens` are accepted, `ends_early` come only where nothing else may; always so
    for `ends_ignored`."""

    __slots__ = ("_ends_early", "_ends_ignored", "_matcher", "_num_tokens_left")

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        min_tokens: int = 0,
        ends_early: Collection[int] = (),
        ends_ignored: Collection[int] = (),
    ) -> None:
        self._matcher = matcher
        self._num_tokens_left = min_tokens
        self._ends_early = ends_early
        self._ends_ignored = ends_ignored

    def accept(self, token_id: int) -> None:
        self._num_tokens_left -= 1
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id}: {self._complaint()}")

    def fill(self, bitmask: np.ndarray) -> None:
        """Raises `RequestFailedError` where the grammar cannot be followed any further."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if self._matcher.is_error():
            raise RequestFailedError(f"structured output: {self._complaint()}")
        if time.thread_time() - begin > MAX_FILL_SECONDS:
            raise RequestFailedError(
                "structured output: the grammar is too complex: finding the next token took more "
                f"than {MAX_FILL_SECONDS} s"
            )
        held_back = self._ends_early if self._num_tokens_left > 0 else self._ends_ignored
        if held_back:
            _clear_unless_last(bitmask, held_back)

    def forced_tokens(self) -> list[int]:
        if self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def _complaint(self) -> str:
        return f"{one_line(ValueError(self._matcher.get_error())):.300}"


def _clear_unless_last(bitmask: np.ndarray, token_ids: Collection[int]) -> None:
    """Take these tokens out, unless no others are left."""
    before = bitmask.copy()
    words = bitmask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not bitmask.any():
        bitmask[:] = before

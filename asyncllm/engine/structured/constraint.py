"""The state of a sequence in its grammar: a `TokenConstraint` with llguidance's matcher.

A text may end only where the grammar may end, and must end where no other token is allowed. If the
library gives up (at one of its limits, or in a state without a next token) it would allow the end;
here this is an error, so that no incomplete text looks complete. The client's grammar is the cause,
so it is an `InvalidRequestError`, raised while the request runs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLExecutor, LLMatcher

from asyncllm.errors import InvalidRequestError, RequestFailedError, one_line

_PANIC = "panic:"  # an error of the library
_NOT_ALLOWED = "doesn't satisfy the grammar"  # an error of ours, as masks only allow such tokens


class GrammarConstraint:
    """lexer: the number of the lexer that its matcher shares with others. param: the field of the
    request. ignored_ends: tokens that end the text, allowed only where no other token is.
    """

    __slots__ = ("_executor", "_ignored_ends", "_lexer", "_matcher", "_param")

    def __init__(
        self,
        matcher: LLMatcher,
        lexer: int,
        executor: LLExecutor,
        param: str,
        ignored_ends: Collection[int] = (),
    ) -> None:
        self._matcher = matcher
        self._lexer = lexer
        self._executor = executor
        self._param = param
        self._ignored_ends = ignored_ends

    @staticmethod
    def accept_many(
        constraints: list[GrammarConstraint], token_ids: list[list[int]]
    ) -> list[Exception | None]:
        """Accept each sequence's tokens. An error is a `ValueError` for a token that was not
        allowed, else as of `fill_many`."""
        rows = range(len(constraints))
        accepted = [True] * len(rows)
        # Usually one token each, accepted in parallel on several cores; more are forced tokens.
        single = [row for row in _by_lexer(constraints) if len(token_ids[row]) == 1]
        if single:
            pairs = [(constraints[row]._matcher, token_ids[row][0]) for row in single]
            results = constraints[0]._executor.consume_token_par(pairs)
            for row, is_accepted in zip(single, results, strict=True):
                accepted[row] = is_accepted
        for row in rows:
            if len(token_ids[row]) > 1:
                accepted[row] = constraints[row]._matcher.consume_tokens(token_ids[row])
        return [None if accepted[i] else constraints[i]._refusal(token_ids[i]) for i in rows]

    @staticmethod
    def fill_many(
        constraints: list[GrammarConstraint], bitmasks: np.ndarray
    ) -> list[Exception | None]:
        """Fill masks on several cores. An error is an `InvalidRequestError` if the grammar has no
        next token."""
        constraints[0]._executor.unsafe_compute_mask_ptr(
            [(constraints[row]._matcher, row) for row in _by_lexer(constraints)],
            bitmasks.ctypes.data,
            bitmasks.strides[0],
            len(constraints),
        )
        return [each._seal(row) for each, row in zip(constraints, bitmasks, strict=True)]

    def forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _seal(self, bitmask: np.ndarray) -> Exception | None:
        """Apply `ignored_ends` to a mask. Returns an error if the library could not fill it."""
        if self._matcher.is_error():
            return self._end()
        if self._ignored_ends:
            _clear_unless_last(bitmask, self._ignored_ends)
        return None

    def _end(self) -> Exception:
        """The error of a sequence that ends before its text may."""
        complaint = self._complaint()
        if complaint.startswith(_PANIC):
            return RequestFailedError(f"structured output: {complaint}")
        if is_dead_end(complaint):
            complaint = "the text came to a place from where nothing satisfies it"
        return InvalidRequestError(f"{self._param}: {complaint}", self._param)

    def _refusal(self, token_ids: list[int]) -> Exception:
        if _NOT_ALLOWED not in self._complaint():
            return self._end()
        return ValueError(f"token {', '.join(map(str, token_ids))}: {self._complaint()}")

    def _complaint(self) -> str:
        complaint = self._matcher.get_error().replace("<non-verbose/>", "")
        return f"{one_line(ValueError(complaint)):.300}"


def is_dead_end(complaint: str) -> bool:
    """Whether the library says that no next token exists."""
    return complaint.startswith("NoExtensionBias")


def _by_lexer(constraints: list[GrammarConstraint]) -> list[int]:
    """The order of constraints by lexer. The library gives each thread neighbours in the list, and
    those with the same lexer wait for each other anyway."""
    return sorted(range(len(constraints)), key=lambda row: constraints[row]._lexer)


def _clear_unless_last(bitmask: np.ndarray, token_ids: Collection[int]) -> None:
    """Clear the bits of these tokens, unless no others are allowed."""
    words = bitmask.view(np.uint32)
    allowed = [i for i in token_ids if int(words[i // 32]) >> i % 32 & 1]
    if not allowed:  # the usual case, as texts may end in few places
        return
    before = bitmask.copy()
    for token_id in allowed:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not bitmask.any():
        bitmask[:] = before

"""One sequence's place in its grammar: a `TokenConstraint` on llguidance's matcher.

The text may end only where the grammar may, and must where nothing else may come. Where the
library gives up (one of its limits, or a state from which nothing leads on) it would say "end
here"; that is an error here, so that no text passes for complete that is not. It is the grammar's,
and so the client's: an `InvalidRequestError`, which comes late.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLExecutor, LLMatcher

from asyncllm.errors import InvalidRequestError, RequestFailedError, one_line

_PANIC = "panic:"  # the library's own fault
_NOT_ALLOWED = "doesn't satisfy the grammar"  # ours: a mask allows what may come


class GrammarConstraint:
    """`lexer`: a number for the lexer that its matcher shares with others.
    `param`: the field that asked for it.
    `ignored_ends`: tokens that end the text, to come only where nothing else may.
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
        """`ValueError` for a token that was not allowed, else as `fill_many`."""
        rows = range(len(constraints))
        accepted = [True] * len(rows)
        # One token each is the rule, and done together on several cores; more are forced ones.
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
        """On several cores. `InvalidRequestError` where a grammar cannot be followed further."""
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
        """Make our own changes in a mask that the library filled; or say why it could not."""
        if self._matcher.is_error():
            return self._end()
        if self._ignored_ends:
            _clear_unless_last(bitmask, self._ignored_ends)
        return None

    def _end(self) -> Exception:
        """Why it ends before its text may."""
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
    """Whether the library says that no text leads on."""
    return complaint.startswith("NoExtensionBias")


def _by_lexer(constraints: list[GrammarConstraint]) -> list[int]:
    """The library gives each thread neighbours in the list: those that share a lexer wait for each
    other anyway."""
    return sorted(range(len(constraints)), key=lambda row: constraints[row]._lexer)


def _clear_unless_last(bitmask: np.ndarray, token_ids: Collection[int]) -> None:
    """Take these tokens out, unless no others are left."""
    words = bitmask.view(np.uint32)
    allowed = [i for i in token_ids if int(words[i // 32]) >> i % 32 & 1]
    if not allowed:  # nearly always: in most places a text may not end
        return
    before = bitmask.copy()
    for token_id in allowed:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not bitmask.any():
        bitmask[:] = before

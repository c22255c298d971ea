"""One sequence's way through its grammar: a `TokenConstraint` on llguidance's matcher.

The text may end only where the grammar may, and must where nothing else may come. Where the
library gives up (one of its limits, or a state from which nothing leads on) it would say "end
here"; that is an error here, so that no text passes for complete that is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

from asyncllm.errors import RequestFailedError, one_line


class GrammarConstraint:
    """`lexer`: a number for the lexer that its matcher shares with others.
    `ignored_ends`: tokens that end the text, to come only where nothing else may.
    """

    __slots__ = ("_executor", "_ignored_ends", "_lexer", "_matcher")

    def __init__(
        self,
        matcher: LLMatcher,
        lexer: int,
        executor: LLExecutor,
        ignored_ends: Collection[int] = (),
    ) -> None:
        self._matcher = matcher
        self._lexer = lexer
        self._executor = executor
        self._ignored_ends = ignored_ends

    def accept(self, token_id: int) -> None:
        """Raises `ValueError` for a token that was not allowed."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id}: {self._complaint()}")

    def fill(self, bitmask: np.ndarray) -> None:
        """Raises `RequestFailedError` where the grammar cannot be followed any further."""
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        self._check_filled(bitmask)

    @staticmethod
    def fill_many(constraints: Sequence[GrammarConstraint], bitmasks: np.ndarray) -> None:
        """`fill` for each row, on several cores, letting go of the GIL once.

        Raises what one of them would; the others are filled. The library gives each thread
        neighbours in the list: those that share a lexer wait for each other anyway.
        """
        rows = sorted(range(len(constraints)), key=lambda row: constraints[row]._lexer)
        constraints[0]._executor.unsafe_compute_mask_ptr(
            [(constraints[row]._matcher, row) for row in rows],
            bitmasks.ctypes.data,
            bitmasks.strides[0],
            len(constraints),
        )
        for constraint, bitmask in zip(constraints, bitmasks, strict=True):
            constraint._check_filled(bitmask)

    def forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _check_filled(self, bitmask: np.ndarray) -> None:
        if self._matcher.is_error():
            raise RequestFailedError(f"structured output: {self._complaint()}")
        if self._ignored_ends:
            _clear_unless_last(bitmask, self._ignored_ends)

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

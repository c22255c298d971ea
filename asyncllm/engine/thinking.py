"""`thinking_token_budget`: limits the reasoning tokens of an answer by forcing the end marker.

    prompt          output
    ... <think>\n | a b c </think> the answer      budget 4: "\n", a, b and c count, then the end
                          ^ forced                  marker is forced

Reasoning lasts from the start marker, in the prompt or in the output, to the end marker; all its
parts in one answer share the budget. A marker of several tokens is recognised only as the ids that
its text alone encodes to. A grammar that does not allow the end marker takes precedence.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.config import EngineConfig
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.formats import resolve

MAX_TOKENS_AFTER_END = 2  # line breaks that a template writes after an end marker of its own


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The token ids of the start and end markers, both nonempty.

    assumed: the model omits `start`, so reasoning is open unless the prompt closes it.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    assumed: bool = False

    def num_open(self, prompt_ids: list[int]) -> int | None:
        """The number of reasoning tokens if `prompt_ids` end within reasoning, else None."""
        last = {self.start[-1], self.end[-1]}
        for after in range(len(prompt_ids), 0, -1):
            if prompt_ids[after - 1] not in last:
                continue
            if _ends_with(prompt_ids, after, self.end):
                is_fresh = self.assumed and len(prompt_ids) - after > MAX_TOKENS_AFTER_END
                return 0 if is_fresh else None
            if _ends_with(prompt_ids, after, self.start):
                return len(prompt_ids) - after
        return 0 if self.assumed else None


def reasoning_tokens(config: EngineConfig, tokenizer: Tokenizer | None) -> ReasoningTokens | None:
    """The markers of this model's reasoning; None if they are not known."""
    if tokenizer is None:
        return None
    found = resolve(
        tokenizer.chat_template,
        tokenizer.special_tokens,
        reasoning_parser=config.reasoning_parser,
        response_template=tokenizer.response_template,
    )
    marks = found.reasoning if found is not None else None
    if marks is None:
        return None
    start, end = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (marks.begin, marks.end)
    )
    return ReasoningTokens(start, end, marks.assumed) if start and end else None


class ThinkingBudget:
    """Forces the end marker in a sequence that has used its budget. Linear in its tokens."""

    __slots__ = ("_begin", "_is_open", "_num_left", "_num_read", "_tokens")

    def __init__(
        self, tokens: ReasoningTokens, budget: int, num_prompt: int, num_open: int | None
    ) -> None:
        """num_open: `tokens.num_open` of the prompt, which has `num_prompt` ids."""
        self._tokens = tokens
        self._is_open = num_open is not None
        self._num_left = budget - (num_open or 0)
        self._num_read = num_prompt
        self._begin = num_prompt  # where the next marker may begin: markers do not overlap

    def next_token(self, token_ids: list[int]) -> int | None:
        """The token that must follow `token_ids`, prompt included; None if the model decides."""
        while self._num_read < len(token_ids):
            self._num_read += 1
            self._read(token_ids)
        if not self._is_open or self._num_left > 0:
            return None
        end = self._tokens.end
        num_there = next(n for n in reversed(range(len(end))) if self._has(token_ids, end[:n]))
        return end[num_there]

    def _read(self, token_ids: list[int]) -> None:
        """Process the last of the first `_num_read` tokens."""
        self._num_left -= self._is_open
        marker = self._tokens.end if self._is_open else self._tokens.start
        if self._has(token_ids, marker):
            self._begin = self._num_read
            if self._is_open:
                self._num_left += len(marker)  # the end marker does not count
            self._is_open = not self._is_open

    def _has(self, token_ids: list[int], marker: tuple[int, ...]) -> bool:
        """Whether the tokens since the last marker end with this one."""
        is_long_enough = self._num_read - self._begin >= len(marker)
        return is_long_enough and _ends_with(token_ids, self._num_read, marker)


def _ends_with(ids: list[int], after: int, marker: tuple[int, ...]) -> bool:
    """Whether `ids[:after]` ends with the marker."""
    return after >= len(marker) and tuple(ids[after - len(marker) : after]) == marker

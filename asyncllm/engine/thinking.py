"""At most so many tokens of reasoning: `thinking_token_budget`, by the tokens that mark reasoning.

    prompt          output
    ... <think>\n | a b c </think> the answer      budget 4: "\n", a, b and c count, then the end
                          ^ forced                  is forced, whatever the model would have said

Reasoning is open from the start marker, in the prompt or in the output, to the end marker; all its
parts in one answer share the budget. Where a marker is several tokens, only the ids that its text
encodes to by itself are recognised. A grammar that knows no end of reasoning is not broken by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.config import EngineConfig
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.formats import resolve

MAX_TOKENS_AFTER_END = 2  # a template writes line breaks after an end that it writes itself


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The ids that begin and end reasoning, neither of them empty.

    `assumed`: it is open where the prompt does not close it, as the model leaves out `start`.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    assumed: bool = False

    def num_open(self, prompt_ids: list[int]) -> int | None:
        """Tokens of the reasoning that `prompt_ids` leave open; None where they leave none open."""
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
    """How this model marks its reasoning; None where that is not known."""
    if tokenizer is None:
        return None
    found = resolve(
        tokenizer.chat_template,
        tokenizer.special_tokens,
        reasoning_parser=config.reasoning_parser,
    )
    marks = found.reasoning if found is not None else None
    if marks is None:
        return None
    start, end = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (marks.begin, marks.end)
    )
    return ReasoningTokens(start, end, marks.assumed) if start and end else None


class ThinkingBudget:
    """Forces the end of reasoning in one sequence that has thought enough. Linear in its tokens."""

    __slots__ = ("_begin", "_is_open", "_num_left", "_num_read", "_tokens")

    def __init__(
        self, tokens: ReasoningTokens, budget: int, num_prompt: int, num_open: int | None
    ) -> None:
        """`num_open`: what `tokens` say of the prompt of `num_prompt` ids."""
        self._tokens = tokens
        self._is_open = num_open is not None
        self._num_left = budget - (num_open or 0)
        self._num_read = num_prompt
        self._begin = num_prompt  # of what the next marker may consist of: no token is of two

    def next_token(self, token_ids: list[int]) -> int | None:
        """The token that must follow `token_ids`, prompt and all; None where the model decides."""
        while self._num_read < len(token_ids):
            self._num_read += 1
            self._read(token_ids)
        if not self._is_open or self._num_left > 0:
            return None
        end = self._tokens.end
        num_there = next(n for n in reversed(range(len(end))) if self._has(token_ids, end[:n]))
        return end[num_there]

    def _read(self, token_ids: list[int]) -> None:
        """Take the last of the first `_num_read` tokens."""
        self._num_left -= self._is_open
        marker = self._tokens.end if self._is_open else self._tokens.start
        if self._has(token_ids, marker):
            self._begin = self._num_read
            if self._is_open:
                self._num_left += len(marker)  # the end itself is no reasoning
            self._is_open = not self._is_open

    def _has(self, token_ids: list[int], marker: tuple[int, ...]) -> bool:
        """Whether what was read since the last marker ends with this one."""
        is_long_enough = self._num_read - self._begin >= len(marker)
        return is_long_enough and _ends_with(token_ids, self._num_read, marker)


def _ends_with(ids: list[int], after: int, marker: tuple[int, ...]) -> bool:
    """Whether `ids[:after]` ends with it."""
    return after >= len(marker) and tuple(ids[after - len(marker) : after]) == marker

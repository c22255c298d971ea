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

    __slots__ = ("_end", "_is_open", "_num_left", "_num_matched", "_num_read", "_start")

    def __init__(
        self, tokens: ReasoningTokens, budget: int, num_prompt: int, num_open: int | None
    ) -> None:
        """`num_open`: what `tokens` say of the prompt of `num_prompt` ids."""
        self._start = _Marker(tokens.start)
        self._end = _Marker(tokens.end)
        self._is_open = num_open is not None
        self._num_left = budget - (num_open or 0)
        self._num_read = num_prompt
        self._num_matched = 0  # tokens of the end, or where it is not open of the start

    def next_token(self, token_ids: list[int]) -> int | None:
        """The token that must follow `token_ids`, prompt and all; None where the model decides."""
        for token_id in token_ids[self._num_read :]:
            self._read(token_id)
        self._num_read = len(token_ids)
        if self._is_open and self._num_left <= 0:
            return self._end.ids[self._num_matched]
        return None

    def _read(self, token_id: int) -> None:
        marker = self._end if self._is_open else self._start
        self._num_left -= self._is_open
        self._num_matched = marker.advance(self._num_matched, token_id)
        if self._num_matched == len(marker.ids):
            self._num_matched = 0
            if self._is_open:
                self._num_left += len(marker.ids)  # the end itself is no reasoning
            self._is_open = not self._is_open


class _Marker:
    """A sequence of ids, found in a stream by one step of Knuth, Morris and Pratt per id."""

    __slots__ = ("_borders", "ids")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._borders = [0, 0]  # for each number of ids matched, the next shorter match
        for token_id in ids[1:]:
            self._borders.append(self.advance(self._borders[-1], token_id))

    def advance(self, num: int, token_id: int) -> int:
        """How many of its ids the stream ends with after `token_id`; before, `num` but not all."""
        while num and self.ids[num] != token_id:
            num = self._borders[num]
        return num + 1 if self.ids[num] == token_id else num


def _ends_with(ids: list[int], after: int, marker: tuple[int, ...]) -> bool:
    """Whether `ids[:after]` ends with it."""
    return after >= len(marker) and tuple(ids[after - len(marker) : after]) == marker

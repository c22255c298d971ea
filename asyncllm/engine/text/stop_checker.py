"""Searches for stop strings in a text that arrives in pieces.

The longest suffix of the text that is the beginning of a stop string is held back until it is
decided. The stop string that is complete first wins; of two that end with the same character, the
longer one. So the result does not depend on how the text is cut into pieces, as it would if the
first in the list (vLLM) or the leftmost one won.

It takes one step of the Knuth-Morris-Pratt algorithm per character and stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, shared by its sequences. Immutable."""

    __slots__ = ("borders", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first, so the first one found is the longest of those that end together.
        self.strings = sorted(set(strings), key=len, reverse=True)
        self.borders = [_borders(string) for string in self.strings]
        self.first_characters = frozenset(string[0] for string in self.strings)


NO_STOP_STRINGS = StopStrings(())


class StopChecker:
    """The state of one sequence. `push` must be called once per token, with or without text.

    A stop string counts only if a token after the first `min_tokens` completes it.
    """

    __slots__ = ("_held", "_include", "_matched", "_num_tokens_left", "_stops")

    def __init__(
        self, stops: StopStrings, include_stop_str_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        self._stops = stops
        self._include = include_stop_str_in_output
        self._num_tokens_left = min_tokens
        self._matched = [0] * len(stops.strings)  # characters of each at the text's end
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that ended it, or None."""
        may_stop = self._num_tokens_left <= 0
        self._num_tokens_left -= 1
        if not self._held and self._stops.first_characters.isdisjoint(delta):
            return delta, None
        text = self._held + delta
        for position, character in enumerate(delta, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None and may_stop:
                self._held = ""
                return text[: position if self._include else position - len(stop)], stop
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """The text held back, if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Add one character. Returns the longest stop string that it completes."""
        found: str | None = None
        matched = self._matched
        for i, string in enumerate(self._stops.strings):
            borders, num = self._stops.borders[i], matched[i]
            while num and string[num] != character:
                num = borders[num]
            if string[num] == character:
                num += 1
            if num == len(string):
                found = found or string
                num = borders[num]
            matched[i] = num
        return found


def _borders(string: str) -> list[int]:
    """borders[n]: the length of the longest proper prefix of the first n characters that is also
    their suffix."""
    borders = [0] * (len(string) + 1)
    num = 0
    for end in range(1, len(string)):
        while num and string[num] != string[end]:
            num = borders[num]
        if string[num] == string[end]:
            num += 1
        borders[end + 1] = num
    return borders

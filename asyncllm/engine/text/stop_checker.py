"""Stop strings in a text that arrives in pieces.

Nothing that may be the beginning of a stop string leaves before that is decided: the longest suffix
that begins one is held back, exactly that and no more. The stop string that is complete first wins;
of two that end with the same character, the longer. So the result does not depend on how the text
is cut into pieces, which a search for "the first in the list" (vLLM) or "the leftmost" would.

Per character and stop string this is one step of Knuth, Morris and Pratt, however the text is made.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, shared by its sequences. Immutable."""

    __slots__ = ("borders", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first: among those that end together the first found is the one to take.
        self.strings = sorted(set(strings), key=len, reverse=True)
        self.borders = [_borders(string) for string in self.strings]
        self.first_characters = frozenset(string[0] for string in self.strings)


NO_STOP_STRINGS = StopStrings(())


class StopChecker:
    """The state of one sequence. `push` is called once per token, whatever its text.

    A stop string counts only when a token after the first `min_tokens` completes it.
    """

    __slots__ = ("_held", "_include", "_matched", "_num_tokens_left", "_stops")

    def __init__(
        self, stops: StopStrings, include_stop_str_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        self._stops = stops
        self._include = include_stop_str_in_output
        self._num_tokens_left = min_tokens
        self._matched = [0] * len(stops.strings)  # characters of each that the text ends with
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that ended it, if one did."""
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
        """The text held back, when it ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop string that it completes."""
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
    """borders[n]: the longest proper prefix of `string` that also ends its first n characters."""
    borders = [0] * (len(string) + 1)
    num = 0
    for end in range(1, len(string)):
        while num and string[num] != string[end]:
            num = borders[num]
        if string[num] == string[end]:
            num += 1
        borders[end + 1] = num
    return borders

"""A cursor in the text of an answer that is still arriving.

Reading functions are generators that `yield` when they need more text, so a parser is written as if
all text were available. Text that may turn out not to be a call is held while it is read, and
returned by `let_go`. Nothing is read twice, so reading is linear in the length of the text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

from asyncllm.formats.text_markers import MAX_HELD_SPACES, TextMarkers, before_spaces

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

NO_LIMIT = sys.maxsize
_SPACES = re.compile(r"\s*")


class Cursor:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None
        self.ended = False

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._text)

    def push(self, text: str) -> None:
        self._text = text if self.is_empty else self._text[self._at :] + text
        self._at = 0

    # --- holding -----------------------------------------------------------------------------

    def hold(self, text: str = "") -> None:
        """Hold `text`, which was read already, and all that is read from here on."""
        self._held = [text]

    def let_go(self) -> str:
        """Return the held text, and hold nothing from here on."""
        held = "".join(self._held or ())
        self._held = None
        return held

    # --- reading -----------------------------------------------------------------------------

    def take(self, length: int) -> str:
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self._held is not None:
            self._held.append(taken)
        return taken

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end of the text."""
        while self.is_empty and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def has(self, length: int) -> Reading[bool]:
        """Wait until so many characters are unread; False if the text ends before."""
        while len(self._text) - self._at < length and not self.ended:
            yield
        return len(self._text) - self._at >= length

    def spaces(self) -> Reading[None]:
        yield from self.run(_SPACES)

    def feed(self, pattern: re.Pattern[str], emit: Emit, limit: int = NO_LIMIT) -> Reading[int]:
        """Pass on all text that the repeated `pattern` matches. Returns its length.

        Stops after more than `limit` characters.
        """
        length = 0
        while length <= limit and (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None or not match.group():
                break
            emit(self.take(len(match.group())))
            length += len(match.group())
        return length

    def run(self, pattern: re.Pattern[str], limit: int = NO_LIMIT) -> Reading[str]:
        """As `feed`, but returns the text."""
        parts: list[str] = []
        yield from self.feed(pattern, parts.append, limit)
        return "".join(parts)

    def literal(self, word: str) -> Reading[bool]:
        """Read `word` if it is next, else nothing."""
        while True:
            have = self._text[self._at : self._at + len(word)]
            if have == word:
                self.take(len(word))
                return True
            if self.ended or not word.startswith(have):
                return False
            yield

    def literals(self, words: tuple[str, ...]) -> Reading[bool]:
        """Read `words`, with white space before each. Stops at the first one that is not next."""
        for word in words:
            yield from self.spaces()
            if not (yield from self.literal(word)):
                return False
        return True

    def until(
        self,
        markers: TextMarkers,
        emit: Emit,
        max_spaces: int = MAX_HELD_SPACES,
        keeps_half: bool = True,
    ) -> Reading[tuple[str, str] | None]:
        """Pass text on until a marker. Returns the white space before the marker, and the marker.

        Returns None at the end of the text, after all was passed on, including an incomplete marker
        if that is kept.
        """
        while True:
            search = markers.search_last if self.ended else markers.search
            match = search(self._text, self._at)
            if match is not None:
                end = before_spaces(self._text, self._at, match.start(), max_spaces)
                self._pass_on(end, emit)
                gap = self.take(match.start() - end)
                return gap, self.take(len(match.group()))
            if self.ended:
                half = markers.safe_end(self._text, self._at, max_spaces)
                self._pass_on(len(self._text) if keeps_half else half, emit)
                self.take(len(self._text) - self._at)
                return None
            self._pass_on(markers.safe_end(self._text, self._at, max_spaces), emit)
            yield

    def _pass_on(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self.take(end - self._at))

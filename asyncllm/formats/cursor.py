"""The text of an answer as its reader sees it: as far as it has arrived, from where it was read.

Reading functions are generators: they `yield` where they need text that has not come yet, so a
parser reads as if all were there. What may turn out to be no call is held as it is read, and given
back by `let_go`. Nothing is read twice, so all is linear in the length of the text.
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
        """Keep what is read from here on, after `text`, which was read already."""
        self._held = [text]

    def let_go(self) -> str:
        """Return the held text, and hold none from here on."""
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
        """The next character, unread; "" at the end of the text."""
        while self.is_empty and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def has(self, length: int) -> Reading[bool]:
        """Return whether so many characters are unread, now or later."""
        while len(self._text) - self._at < length and not self.ended:
            yield
        return len(self._text) - self._at >= length

    def spaces(self) -> Reading[None]:
        yield from self.run(_SPACES)

    def feed(self, pattern: re.Pattern[str], emit: Emit, limit: int = NO_LIMIT) -> Reading[int]:
        """Passes on all that the repeated `pattern` matches, however it is cut: its length.

        Stops past `limit` characters.
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
        """As `feed`, in one."""
        parts: list[str] = []
        yield from self.feed(pattern, parts.append, limit)
        return "".join(parts)

    def literal(self, word: str) -> Reading[bool]:
        """Reads `word` if it is next; else nothing."""
        while True:
            have = self._text[self._at : self._at + len(word)]
            if have == word:
                self.take(len(word))
                return True
            if self.ended or not word.startswith(have):
                return False
            yield

    def literals(self, words: tuple[str, ...]) -> Reading[bool]:
        """Reads `words` with white space before each; stops at the first that is not next."""
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
        """Passes text on until a marker: returns the white space before it and the marker.

        None at the end of the text, when all was passed on, with half a marker at its end if that
        is kept.
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

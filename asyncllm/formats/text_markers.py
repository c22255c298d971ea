"""A set of markers to look for in text that arrives in pieces, halves of them at its end included.

Everything costs the length of the text, or of the longest marker for what is at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

MAX_HELD_SPACES = 64  # more white space than this is passed on although a marker may follow


class TextMarkers:
    """Finds markers in text; the longest match counts. The markers must not be empty."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted(set(markers), key=len, reverse=True)
        assert all(ordered), "an empty marker is everywhere"
        never = "(?!)"
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or never)
        firsts = "".join(sorted({re.escape(marker[0]) for marker in ordered}))
        self._first = re.compile(f"[{firsts}]" if firsts else never)
        self._heads = {marker[:i] for marker in ordered for i in range(1, len(marker))}
        self._longest = max(map(len, ordered), default=1)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first marker that no further text could make a longer one; none behind such a one."""
        match = self._pattern.search(text, at)
        if match and len(text) - match.start() < self._longest:
            return None if text[match.start() :] in self._heads else match
        return match

    def search_last(self, text: str, at: int) -> re.Match[str] | None:
        """The same where no further text comes."""
        return self._pattern.search(text, at)

    def none_in(self, text: str) -> bool:
        """Return whether text that begins now holds no part of a marker, and no space to keep."""
        return not self._first.search(text) and not text[-1:].isspace()

    def safe_end(self, text: str, at: int, max_spaces: int = MAX_HELD_SPACES) -> int:
        """The end of what is neither half a marker nor white space that may precede one."""
        end = len(text)
        if self._first.search(text, max(at, end - self._longest)):
            for start in range(max(at, end - self._longest), end):
                if text[start:] in self._heads:
                    end = start
                    break
        return before_spaces(text, at, end, max_spaces)


def before_spaces(text: str, at: int, end: int, max_spaces: int) -> int:
    """The index where the last white space of text[at:end] begins, at most `max_spaces` of it."""
    low = max(at, end - max_spaces)
    return low + len(text[low:end].rstrip())


@lru_cache(maxsize=256)
def text_markers(*markers: str) -> TextMarkers:
    """The cached constructor, for the few sets that a format has."""
    return TextMarkers(markers)

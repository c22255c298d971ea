"""Searches text that arrives in pieces for markers, including incomplete ones at its end.

All methods are linear in the length of the text, or in the longest marker for the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

MAX_HELD_SPACES = 64  # more white space is passed on, although a marker may follow


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
        """The first marker, unless more text could make it a longer one; then None."""
        match = self._pattern.search(text, at)
        if match and len(text) - match.start() < self._longest:
            return None if text[match.start() :] in self._heads else match
        return match

    def search_last(self, text: str, at: int) -> re.Match[str] | None:
        """As `search`, when no more text comes."""
        return self._pattern.search(text, at)

    def none_in(self, text: str) -> bool:
        """Whether a text contains no part of a marker, and no white space to hold."""
        return not self._first.search(text) and not text[-1:].isspace()

    def safe_end(self, text: str, at: int, max_spaces: int = MAX_HELD_SPACES) -> int:
        """The index before an incomplete marker, and before white space that may precede one."""
        end = len(text)
        if self._first.search(text, max(at, end - self._longest)):
            for start in range(max(at, end - self._longest), end):
                if text[start:] in self._heads:
                    end = start
                    break
        return before_spaces(text, at, end, max_spaces)


def before_spaces(text: str, at: int, end: int, max_spaces: int) -> int:
    """The index of the white space at the end of text[at:end], of at most `max_spaces`
    characters."""
    low = max(at, end - max_spaces)
    return low + len(text[low:end].rstrip())


@lru_cache(maxsize=256)
def text_markers(*markers: str) -> TextMarkers:
    """A cached `TextMarkers`, as a format has few sets of markers."""
    return TextMarkers(markers)

"""Regular expressions of configuration files, which are matched against the names of modules.

The files are not trusted: what `re` cannot compile, or could match for ever, is refused.
"""

from __future__ import annotations

import re

MAX_CHARS = 1024
MAX_REPEATS = 6  # of alternatives; each may multiply the time by the length of a name
REPEAT = re.compile(r"(?<!\()[*+?{]+")  # "(?" begins a group
REPEATED_GROUP = re.compile(r"\)[*+{]")


def name_pattern(text: str) -> re.Pattern[str]:
    """Raises `ValueError` naming the expression."""
    named = f"pattern {text[:MAX_CHARS]!r}"
    alternatives = [text] if "(" in text else text.split("|")
    repeats = max(len(REPEAT.findall(each)) for each in alternatives)
    if len(text) > MAX_CHARS:
        raise ValueError(f"{named}: {len(text)} characters are more than {MAX_CHARS}")
    if REPEATED_GROUP.search(text):
        raise ValueError(f"{named} repeats a group, which may take for ever")
    if repeats > MAX_REPEATS:
        raise ValueError(f"{named}: {repeats} repetitions are more than {MAX_REPEATS}")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{named}: {error}") from error

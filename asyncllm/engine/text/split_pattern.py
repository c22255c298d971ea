"""The regex by which a byte-level BPE tokenizer splits a text before it merges bytes.

Such tokenizers are of GPT-2's kind, like those of Llama 3 and Qwen. If token ids are in the order
of the merges, the pattern and the tokens' bytes define the tokenizer.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers

# The regex that the library's ByteLevel applies with `use_regex`.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A letter, a digit, a space and another character. If each pair of them is split, pieces are short
# in texts that alternate between them; runs of one kind may be long.
_KINDS = ("a", "1", " ", "-")
_MEETINGS, _MOST_CHARS = 64, 8


def split_pattern(raw: RawTokenizer) -> str | None:
    """The pattern; None for tokenizers of another kind."""
    pattern = _pattern(raw)
    if pattern is None or not all(_cuts_between(raw, *pair) for pair in combinations(_KINDS, 2)):
        return None
    return pattern


def _pattern(raw: RawTokenizer) -> str | None:
    model, steps = raw.model, steps_of(raw.pre_tokenizer, "pretokenizers")
    if not isinstance(model, models.BPE) or model.dropout or model.byte_fallback:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if not isinstance(raw.normalizer, normalizers.NFC | None):
        return None
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    splits, by_itself = steps[:-1], steps[-1]["use_regex"]
    if by_itself:
        return None if splits else GPT2_PATTERN
    return _regex(splits[0]) if len(splits) == 1 else None


def _cuts_between(raw: RawTokenizer, one: str, other: str) -> bool:
    pieces = raw.pre_tokenizer.pre_tokenize_str((one + other) * _MEETINGS)
    return max(end - start for _, (start, end) in pieces) <= _MOST_CHARS


def _regex(step: dict) -> str | None:
    """The pattern of a step that makes pieces of the matches and of the text between them."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


def steps_of(part: Any, name: str) -> list[dict]:
    """The steps of a pre-tokenizer or decoder as the library's JSON; a sequence has them under
    `name`."""
    if part is None:
        return []
    # The pickled state is that JSON. `to_str()` has it too, but with megabytes of vocabulary.
    state = json.loads(part.__getstate__())
    steps: list[dict] = state[name] if state["type"] == "Sequence" else [state]
    return steps

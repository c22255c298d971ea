"""llguidance's own byte-level BPE, for tokenizers for which it gives the same tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer

from asyncllm.engine.text.tokenizer import Tokenizer

# Merging a piece takes time with the square of its length, and a grammar may force 256 KiB of one
# letter. So runs are cut where they are longer than any word.
LONGEST_RUN = 128
_BOUNDED = {"+": f"{{1,{LONGEST_RUN}}}", "*": f"{{0,{LONGEST_RUN}}}"}
# An escape, a class, a quantifier (of a group or not, maybe lazy or possessive), or another
# character. A class within a class ends too early, but its rest contains no quantifier.
_PART = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)?[+*?][+?]*|\{\d+,\}|.", re.DOTALL
)
_ENDLESS = re.compile(r"\)[+*][+?]*|[+*][+?]+|\{\d+,\}")
SAMPLES = 256  # texts of a few tokens that both must tokenize alike
SAMPLE_TOKENS = 4


def byte_bpe(
    tokenizer: Tokenizer,
    tokens: Sequence[bytes],
    special_ids: dict[str, int],
    eos_ids: Iterable[int],
) -> LLTokenizer | None:
    """tokens: the bytes of each id, empty without such a token. special_ids: by text.

    None if the tokenizer is of another kind, or if its ids are not in the order of the merges,
    which is known from nothing else.
    """
    pattern = tokenizer.split_pattern
    pattern = None if pattern is None else bounded(pattern)
    if pattern is None:
        return None
    special = set(special_ids.values())
    pairs = [(token, i) for i, token in enumerate(tokens) if token and i not in special]
    plain = dict(pairs)
    if len(plain) < len(pairs) or any(bytes([byte]) not in plain for byte in range(256)):
        return None
    ll = LLTokenizer.from_tiktoken(
        encoder=plain,
        special_tokens=special_ids,
        pattern=pattern,
        eos_token=list(eos_ids),
        n_vocab=len(tokens),
    )
    return ll if _cuts_alike(ll, tokenizer, list(plain)) else None


def bounded(pattern: str) -> str | None:
    """The pattern with runs of at most LONGEST_RUN; None if a quantifier is no plain + or *."""
    parts = _PART.findall(pattern)
    if "".join(parts) != pattern or any(_ENDLESS.fullmatch(part) for part in parts):
        return None
    return "".join(_BOUNDED.get(part, part) for part in parts)


def _cuts_alike(ll: LLTokenizer, tokenizer: Tokenizer, plain: Sequence[bytes]) -> bool:
    rng = random.Random(0)
    whole = [*tokenizer.special_tokens, *tokenizer.added_texts]  # which BPE does not know
    words = [token.decode() for token in plain if token.isascii()]
    for _ in range(SAMPLES):
        text = "".join(rng.choices(words, k=SAMPLE_TOKENS))
        if any(each in text for each in whole):
            continue
        if ll.tokenize_str(text) != tokenizer.encode(text, add_special_tokens=False):
            return False
    return True

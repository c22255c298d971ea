"""Forbidden words as the token sequences that would write them, as vLLM does it."""

from __future__ import annotations

from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams

PARAM = "bad_words"


def bad_words_ids(params: SamplingParams, encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    """Each word at the beginning of a text and after a space. Raises `InvalidRequestError`."""
    found: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in params.bad_words or ():
        text = word.lstrip() or word
        plain = tuple(encoder.encode(text, False, PARAM))
        spaced = tuple(encoder.encode(f" {text}", False, PARAM))
        if not plain:
            raise InvalidRequestError(f"bad_words: {word!r} has no tokens", PARAM)
        found[plain] = None
        # Where the space is a token by itself, the plain form forbids the word after it too.
        if len(plain) == len(spaced) and plain[:1] != spaced[:1]:
            found[spaced] = None
    for ids in found:
        encoder.check_ids(ids, PARAM)
    return tuple(found)

"""Token ids to text, one token at a time, for one sequence.

The deltas of `push` and of the last `flush` join to the text that the tokenizer decodes from all
output ids where they stand, after the prompt. A character that is split over tokens is held until
it is whole; bytes that can no longer become one turn into U+FFFD at once, those still waiting at
the end in `flush`. It knows no stop strings.

`TableDetokenizer` looks a token up and is the hot path. `WindowDetokenizer` serves every other
decoder: it decodes the last few tokens with and without the new one; the difference is new.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncllm.engine.text.token_pieces import (
    REPLACEMENT_CHARACTER,
    Piece,
    TokenPieces,
    as_bytes,
    strip_leading_spaces,
)

MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that one character is split over
MIN_WINDOW_TOKENS = 6  # of context before the first output token; one would do for most decoders
MAX_WINDOW_TOKENS = 64  # a window whose tokens show nothing is cut here


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often one token's, sometimes none."""
        ...

    def flush(self) -> str:
        """The text held back. Nothing may be pushed after it."""
        ...


class NoDetokenizer:
    """For `detokenize=False`: no text at all."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TableDetokenizer:
    """For decoders that join their tokens' bytes: see `token_pieces`."""

    __slots__ = ("_decoder", "_errors", "_is_plain", "_num_to_strip", "_pieces")

    def __init__(
        self, table: TokenPieces, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._pieces = table.of(skip_special_tokens)
        self._errors = table.errors
        self._decoder: codecs.IncrementalDecoder | None = None  # made when first needed
        # Spaces are stripped off the whole text, so any text in the prompt uses this up.
        starts_text = table.num_stripped > 0 and not any(map(self._piece, prompt_ids))
        self._num_to_strip = table.num_stripped if starts_text else 0
        self._is_plain = not starts_text  # no bytes wait and nothing is to be stripped
        self._take_context(prompt_ids)

    def push(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:  # models pad their vocabulary beyond the tokenizer's
            return ""
        if self._is_plain and type(piece) is str:
            return piece
        return self._push_bytes(as_bytes(piece))

    def flush(self) -> str:
        if self._decoder is None:
            return ""
        return self._strip(self._decoder.decode(b"", True))

    def _push_bytes(self, data: bytes) -> str:
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")(self._errors)
        text = self._strip(self._decoder.decode(data))
        num_waiting = len(self._decoder.getstate()[0])
        self._is_plain = num_waiting == 0 and self._num_to_strip == 0
        return text

    def _strip(self, text: str) -> str:
        if self._num_to_strip and text:
            rest = strip_leading_spaces(text, self._num_to_strip)
            # The first other character ends it: it is only the text's beginning that is stripped.
            self._num_to_strip = 0 if rest else self._num_to_strip - len(text)
            return rest
        return text

    def _take_context(self, prompt_ids: Sequence[int]) -> None:
        """Let a character that the prompt began be completed by the output."""
        tail, pieces = b"", self._pieces
        for token_id in reversed(prompt_ids):
            piece = pieces[token_id] if token_id < len(pieces) else ""
            if piece and type(piece) is str:  # whole characters: what comes before is complete
                break
            tail = as_bytes(piece) + tail
            if len(tail) >= MAX_CHARACTER_BYTES:
                break
        if tail and _ends_within_character(tail):
            self._push_bytes(tail)

    def _piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if token_id < len(self._pieces) else ""


class WindowDetokenizer:
    """For any decoder whose text for a token depends only on tokens close before it.

    window   [ ids whose text is out ][ ids that wait ]
             0                        _num_read
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_shown: Callable[[int], bool],
        prompt_ids: Sequence[int],
        unspaced: dict[int, str],
    ) -> None:
        """`decode` skips what `is_shown` denies. `unspaced`: added tokens by id, with their text,
        of which those that follow each other get no separator from the decoder."""
        self._decode = decode
        self._is_shown = is_shown
        self._unspaced = unspaced
        self._window = self._context(prompt_ids)
        self._num_read = self._num_whole(self._window)
        self._read_text = decode(self._window[: self._num_read])
        self._num_held = len(self._window) - self._num_read  # tokens of an unfinished character
        self._last_is_unspaced = bool(self._window) and self._window[-1] in unspaced

    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT_CHARACTER) and self._num_held < MAX_CHARACTER_BYTES - 1:
            self._num_held += 1
            return ""
        self._num_held = 0
        delta = text[len(self._read_text) :]
        if delta or len(self._window) > MAX_WINDOW_TOKENS:
            self._slide()
        return self._without_space(token_id, delta)

    def flush(self) -> str:
        return self._decode(self._window)[len(self._read_text) :]

    def _slide(self) -> None:
        """The ids just read become the context of the next."""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)

    def _without_space(self, token_id: int, delta: str) -> str:
        is_unspaced = token_id in self._unspaced
        if is_unspaced and self._last_is_unspaced:
            delta = self._unspaced[token_id]
        self._last_is_unspaced = is_unspaced
        return delta

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last shown tokens of the prompt: a decoder treats the first of a text specially."""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == MIN_WINDOW_TOKENS:
                break
            if self._is_shown(token_id):
                context.append(token_id)
        return context[::-1]

    def _num_whole(self, window: list[int]) -> int:
        """How many ids end before a character that the prompt began and left open."""
        for num in range(len(window), max(len(window) - MAX_CHARACTER_BYTES, 0), -1):
            if not self._decode(window[:num]).endswith(REPLACEMENT_CHARACTER):
                return num
        return len(window)


def _ends_within_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0]) > 0

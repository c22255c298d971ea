"""Converts the token ids of one sequence to text, one token at a time.

The deltas of `push` and of the final `flush` join to the text that the tokenizer decodes from all
output ids after the prompt. A character that is split over tokens is held back until it is
complete. Bytes that can no longer become a character turn into U+FFFD at once; those that wait at
the end, in `flush`. Stop strings are handled in stop_checker.py.

`TableDetokenizer` looks tokens up in a table and is the hot path. `WindowDetokenizer` is for all
other decoders: it decodes the last few tokens with and without the new one, and returns the
difference.
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

MAX_CHARACTER_BYTES = 4  # in UTF-8, so a character is split over at most so many tokens
MIN_WINDOW_TOKENS = 6  # of context before the first output token; one is enough for most decoders
MAX_WINDOW_TOKENS = 64  # the most tokens in a window without any text


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The new text that is certain now: often that of one token, sometimes none."""
        ...

    def flush(self) -> str:
        """The text held back. `push` must not be called afterwards."""
        ...


class NoDetokenizer:
    """For `detokenize=False`: it returns no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TableDetokenizer:
    """For decoders that concatenate the bytes of tokens (token_pieces.py)."""

    __slots__ = ("_decoder", "_errors", "_is_plain", "_num_to_strip", "_pieces")

    def __init__(
        self, table: TokenPieces, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._pieces = table.of(skip_special_tokens)
        self._errors = table.errors
        self._decoder: codecs.IncrementalDecoder | None = None  # made at its first use
        # Only the beginning of the whole text is stripped, so not after a prompt with text.
        starts_text = table.num_stripped > 0 and not any(map(self._piece, prompt_ids))
        self._num_to_strip = table.num_stripped if starts_text else 0
        self._is_plain = not starts_text  # no bytes wait, and nothing needs to be stripped
        self._take_context(prompt_ids)

    def push(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:  # the model's vocabulary may be padded
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
            # Only spaces before the first other character are stripped.
            self._num_to_strip = 0 if rest else self._num_to_strip - len(text)
            return rest
        return text

    def _take_context(self, prompt_ids: Sequence[int]) -> None:
        """Let the output complete a character that the prompt began."""
        tail, pieces = b"", self._pieces
        for token_id in reversed(prompt_ids):
            piece = pieces[token_id] if token_id < len(pieces) else ""
            if piece and type(piece) is str:  # whole characters, so all text before is complete
                break
            tail = as_bytes(piece) + tail
            if len(tail) >= MAX_CHARACTER_BYTES:
                break
        if tail and _ends_within_character(tail):
            self._push_bytes(tail)

    def _piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if token_id < len(self._pieces) else ""


class WindowDetokenizer:
    """For decoders whose text for a token depends only on a few tokens before it.

    window   [ ids whose text was returned ][ ids that wait ]
             0                        _num_read
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_shown: Callable[[int], bool],
        prompt_ids: Sequence[int],
        unspaced: dict[int, str],
    ) -> None:
        """decode: skips tokens for which `is_shown` is false. unspaced: the text of added tokens by
        id; the decoder puts no separator between two of them."""
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
        """Make the ids just read the context of the next ones."""
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
        """The last shown tokens of the prompt, as decoders treat the first token of a text
        differently."""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == MIN_WINDOW_TOKENS:
                break
            if self._is_shown(token_id):
                context.append(token_id)
        return context[::-1]

    def _num_whole(self, window: list[int]) -> int:
        """The number of ids before an incomplete character at the end of the prompt."""
        for num in range(len(window), max(len(window) - MAX_CHARACTER_BYTES, 0), -1):
            if not self._decode(window[:num]).endswith(REPLACEMENT_CHARACTER):
                return num
        return len(window)


def _ends_within_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0]) > 0

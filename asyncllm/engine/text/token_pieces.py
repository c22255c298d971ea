"""A table with the text of each token id, for decoders that only concatenate.

Two kinds of decoders concatenate the bytes of tokens and decode them as UTF-8: byte-level ones
(Llama 3, Qwen) and sentencepiece with byte fallback (Llama 2, Mistral, Gemma). For these a list
indexed by token id replaces the decoder. Other decoders have no table.

Invariant: `decode` returns the same text as the `tokenizers` library, with one exception: with byte
fallback only an invalid byte itself is replaced. The library replaces its whole run of bytes, with
complete characters, which a stream has sent already.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer as RawTokenizer

from asyncllm.engine.text.split_pattern import steps_of

REPLACEMENT_CHARACTER = "\ufffd"
REPLACE_EACH_BYTE = "asyncllm.replace_each_byte"  # a codec error handler

# str if the bytes are whole characters; "" for a token that is not shown
Piece = str | bytes

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT_CHARACTER * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """`shown[i]` is the piece of token i; `shown_without_special[i]` is "" for special tokens.

    errors: the codec error handler for invalid bytes. num_stripped: the number of leading spaces
    that the decoder strips off the whole text.
    """

    shown: list[Piece]
    shown_without_special: list[Piece]
    errors: str
    num_stripped: int

    def of(self, skip_special_tokens: bool) -> list[Piece]:
        return self.shown_without_special if skip_special_tokens else self.shown

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`; unknown ids have none."""
        pieces = self.of(skip_special_tokens)
        size = len(pieces)
        data = b"".join(as_bytes(pieces[i]) for i in token_ids if i < size)
        text = data.decode("utf-8", self.errors)
        return strip_leading_spaces(text, self.num_stripped)


def as_bytes(piece: Piece) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def strip_leading_spaces(text: str, most: int) -> str:
    start = 0
    while start < most and text.startswith(" ", start):
        start += 1
    return text[start:]


def build_token_pieces(
    raw: RawTokenizer, tokens: list[str | None], special_ids: frozenset[int]
) -> TokenPieces | None:
    """The table for the tokenizer's decoder; None if the decoder does more than concatenate."""
    decoder = steps_of(raw.decoder, "decoders")
    if [step["type"] for step in decoder] == ["ByteLevel"]:
        return _build(tokens, special_ids, _byte_level_piece, "replace", 0)
    num_stripped = _sentencepiece_strip(decoder)
    if num_stripped is None:
        return None
    return _build(tokens, special_ids, _sentencepiece_piece, REPLACE_EACH_BYTE, num_stripped)


def _build(
    tokens: list[str | None],
    special_ids: frozenset[int],
    piece_of: Callable[[str], Piece],
    errors: str,
    num_stripped: int,
) -> TokenPieces:
    shown: list[Piece] = ["" if token is None else piece_of(token) for token in tokens]
    without_special = list(shown)
    for token_id in special_ids:
        without_special[token_id] = ""
    return TokenPieces(shown, without_special, errors, num_stripped)


def _piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


# --- byte-level: each character of a token stands for one byte ---------------------------------


def _byte_level_alphabet() -> dict[int, int]:
    """GPT-2's code: printable Latin-1 stands for itself, characters from U+0100 for other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(token: str) -> Piece:
    if token.isascii():  # each character stands for itself
        return token
    try:
        return _piece(codecs.charmap_encode(token, "strict", _ALPHABET)[0])
    except UnicodeEncodeError:  # an added token, which is its own text
        return token


# --- sentencepiece: words begin with U+2581, and <0xNN> is a byte ------------------------------


def _sentencepiece_strip(decoder: list[dict]) -> int | None:
    """The number of leading spaces that the chain of steps strips; None for an unknown chain."""
    types = [step["type"] for step in decoder]
    if types[:3] != ["Replace", "ByteFallback", "Fuse"] or types[3:] not in ([], ["Strip"]):
        return None
    replace = decoder[0]
    if replace["pattern"] != {"String": "▁"} or replace["content"] != " ":
        return None
    if not types[3:]:
        return 0
    strip = decoder[3]
    return strip["start"] if strip["content"] == " " and strip["stop"] == 0 else None


def _sentencepiece_piece(token: str) -> Piece:
    token = token.replace("▁", " ")
    byte = _BYTE_TOKEN.fullmatch(token)
    return _piece(bytes([int(byte[1], 16)])) if byte else token

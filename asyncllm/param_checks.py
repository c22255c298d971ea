"""Checks of what somebody sent for a named parameter: all raise `InvalidRequestError` naming it.

A message shows the value shortly, whatever its size: it may be huge, nested or hostile.
"""

from __future__ import annotations

import reprlib

from asyncllm.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_ID_DIGITS = 18  # of a token id written out


def require(ok: bool, param: str, value: object, wanted: str, name: str = "") -> None:
    """`name`: what the message calls it, where it is a part of `param`."""
    if not ok:
        raise InvalidRequestError(f"{name or param} must be {wanted}, got {shown(value)}", param)


def shown(value: object) -> str:
    """A short repr: what was sent may be huge, nested, or an int with too many digits to print."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return type(value).__name__


def require_int(param: str, value: object, name: str = "") -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and abs(value) <= MAX_SEED + 1, param, value, "a 64-bit integer", name)  # type: ignore[arg-type]


def require_bool(param: str, value: object) -> None:
    require(isinstance(value, bool), param, value, "a bool")


def require_finite(param: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and abs(value) < float("inf"), param, value, "a finite number")  # type: ignore[arg-type]


def check_strings(param: str, texts: list[str], most: int, most_chars: int) -> None:
    require(len(texts) <= most, param, len(texts), f"at most {most} strings")
    for text in texts:
        is_good = isinstance(text, str) and 0 < len(text) <= most_chars
        require(is_good, param, text, f"strings of 1 to {most_chars} characters")


def check_token_ids(param: str, ids: list[int] | None, most: int) -> None:
    ids = ids or []
    require(len(ids) <= most, param, len(ids), f"at most {most} ids")
    if set(map(type, ids)) - {int}:  # a list may be as long as a vocabulary: no loop over the good
        for token_id in ids:
            require_int(param, token_id)
    least, greatest = min(ids, default=0), max(ids, default=0)
    require(least >= 0, param, least, "token ids of at least 0")
    require_int(param, greatest)


def token_id_of_key(key: object) -> int:
    """A key of logit_bias: JSON's are strings, of digits alone."""
    is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
    is_int = isinstance(key, int) and not isinstance(key, bool) and 0 <= key <= MAX_SEED
    if not (is_text or is_int):
        raise InvalidRequestError(
            f"logit_bias keys must be token ids, got {shown(key)}", "logit_bias"
        )
    return int(key)  # type: ignore[call-overload]

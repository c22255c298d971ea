"""Converts a client's grammar to Lark, if it is written in GBNF (llama.cpp's notation).

llguidance's converter is Python and takes time with the square of the number of rules. Chains of
terminals take llguidance time with their cube: a minute for 3000. Both are limited.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from asyncllm.engine.structured.lark_terminals import LarkTerminals
from asyncllm.errors import InvalidRequestError

MAX_GBNF_CHARS = 2**14
MAX_TERMINALS = 256
MAX_TERMINAL_DEPTH = 32  # of terminals that name others

_LARK_START = re.compile(r"^\s*(?:%llguidance\b|start\s*(?:\[[^\]]*\]\s*)?:(?!:=))", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def any_to_lark(grammar: str, param: str) -> str:
    """The grammar as Lark. Raises `InvalidRequestError` with `param`."""
    is_gbnf = "::=" in grammar and not _LARK_START.search(grammar)
    lark = _gbnf_to_lark(grammar, param) if is_gbnf else grammar
    terminals = LarkTerminals(lark)
    if len(terminals) > MAX_TERMINALS:
        raise InvalidRequestError(
            f"{param}: at most {MAX_TERMINALS} terminals, got {len(terminals)}", param
        )
    if terminals.depth() > MAX_TERMINAL_DEPTH:
        raise InvalidRequestError(
            f"{param}: terminals may name each other at most {MAX_TERMINAL_DEPTH} deep", param
        )
    return lark


def _gbnf_to_lark(grammar: str, param: str) -> str:
    if len(grammar) > MAX_GBNF_CHARS:
        raise InvalidRequestError(
            f"{param}: a GBNF grammar must be at most {MAX_GBNF_CHARS} characters, "
            f"got {len(grammar)}",
            param,
        )
    try:
        return gbnf_to_lark(_ESCAPE.sub(_as_character, grammar))
    except RecursionError:
        raise InvalidRequestError(f"{param}: nested too deep", param) from None
    except Exception as error:  # the converter raises bare Exception for syntax errors
        raise InvalidRequestError(f"{param}: no GBNF: {error!s:.200}", param) from None


def _as_character(escape: re.Match[str]) -> str:
    """The character of a code point's escape, which the converter would spoil; other escapes are
    unchanged. Raises `ValueError` for an invalid code point.
    """
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    character = chr(int(digits, 16))
    character.encode()
    return f"\\x{ord(character):02x}" if character.isascii() else character

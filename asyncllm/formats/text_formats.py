"""The formats of JSON schema as regular expressions for whole texts, in Rust's syntax.

Texts that match are valid. They exclude rare forms that the standards allow: comments and quotes in
addresses, leap seconds.
"""

from __future__ import annotations

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY_31 = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_DAY_30 = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DAY_28 = "02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"({_YEAR}-({_DAY_31}|{_DAY_30}|{_DAY_28})|{_LEAP}-02-29)"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+\-]{_HOUR_MINUTE})"
_CLOCK = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"  # at most the standard's 253 characters
_WORD = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_HEX = "[0-9A-Fa-f]"
_OF_PATH = f"([A-Za-z0-9\\-._~!$&'()*+,;=:@]|%{_HEX}{_HEX})"
_AUTHORITY = rf"{_HOST}(:[0-9]{{1,5}})?(/{_OF_PATH}*)*"
_AFTER_PATH = rf"(\?({_OF_PATH}|[/?])*)?(#({_OF_PATH}|[/?])*)?"

TEXT_FORMATS = {
    "date": DATE,
    "time": _TIME,
    "date-time": f"{DATE}[Tt]{_TIME}",
    "duration": f"P({_DAYS}(T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_WORD}(\.{_WORD})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*:(//{_AUTHORITY}|{_OF_PATH}+(/{_OF_PATH}*)*){_AFTER_PATH}",
}
ANNOTATIONS = frozenset({"password", "binary", "path"})  # formats without constraints

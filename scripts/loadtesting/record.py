"""The vocabulary: what is sent, what was seen of it, what it means. Imports nothing of ours.

All times are seconds of `time.perf_counter`, which on Linux is one clock for all processes.
A request has two starts: `intended_s`, when it was due, and `sent_s`, when it went.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson

now = time.perf_counter


class LoadTestError(Exception):
    """No run was possible, so there are no figures."""


class RefusedError(LoadTestError):
    """The server takes no request of this workload."""


def reason(error: BaseException) -> str:
    """An error as a user says it."""
    if isinstance(error, KeyError):
        return f"no field {error}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def message_of(body: str | bytes) -> str:
    """The message in an error's body, in the form that most servers use; else the body."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        said = orjson.loads(text)
        error = said.get("error", said)
        return str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, KeyError):
        return text.strip()


@dataclass(frozen=True)
class Request:
    """One request, made before the run."""

    number: int  # from 0
    body: bytes  # JSON; for a later turn of a conversation without the history before it
    num_expected: int | None = None  # output tokens; None: the model may stop
    cancel_after: int | None = None  # chunks; None: read to the end
    slow: bool = False
    shape: str | None = None  # "schema" or "tools": what the answer must be to be well formed
    required: tuple[str, ...] = ()  # keys of a schema's answer


Conversation = Sequence[Request]  # turns, each sent after the answer to the one before


class Failure(NamedTuple):
    kind: str
    message: str


class Capture(NamedTuple):
    """One request as it happened, unparsed: pieces[i] was read at times_s[i]."""

    intended_s: float
    sent_s: float
    times_s: list[float]
    pieces: list[bytes]
    failure: Failure | None = None
    cancelled: bool = False


class Record(NamedTuple):
    """One request, understood. Its chunks start at the first token; it ends at the last chunk.

    A token without text (half a character, a special token) is often sent as no chunk at all, so
    the first chunk may carry more than the first token. chunk_tokens [chunks] says how many, where
    the server counts them in each chunk (`--token-counts`); without it, None.
    """

    intended_s: float
    sent_s: float
    end_s: float
    chunk_times_s: np.ndarray  # [chunks]
    num_output_tokens: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_reads: int = 0
    chunk_tokens: np.ndarray | None = None
    number: int = 0  # of its request
    textless: bool = False
    failure: Failure | None = None
    cancelled: bool = False
    slow: bool = False
    well_formed: bool | None = None  # None: nothing but text was asked for
    text: str | None = None  # None: not decoded, only timed

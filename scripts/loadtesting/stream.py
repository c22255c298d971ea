"""From the bytes of one answer to its record, after they were read.

Two readers make one record (a test holds them equal). `decoded` parses every event. `scanned` does
not: it finds the ends of events by their blank lines and decodes only the head, up to the first
content, and the tail, with finish reason and usage. It is taken where only times count, and gives
up on a stream that is not plain (CR LF, event names, comments within, errors).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson

from loadtesting.record import Capture, Failure, Record, Request, message_of
from loadtesting.shapes import fits_schema, has_well_formed_calls

TIMED_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
TAIL_EVENTS = 4  # finish reason, usage, [DONE], one to spare
DATA = np.frombuffer(b"data:", np.uint8)


class Event(NamedTuple):
    """One JSON event, or one of which only the time is known (choice and usage None)."""

    time_s: float
    choice: dict[str, Any] | None
    usage: dict[str, Any] | None


class Answer(NamedTuple):
    events: list[Event]  # those with a choice, in order, and those with usage alone
    failure: Failure | None
    finished: bool  # [DONE] was seen


def digest(capture: Capture, request: Request, keep_text: bool, count_tokens: bool) -> Record:
    """Parse one stream and judge it."""
    must_decode = keep_text or count_tokens or request.shape is not None
    answer = None if must_decode else scanned(capture)
    answer = answer or decoded(capture)
    usage: dict[str, Any] = {}
    for event in answer.events:
        usage = event.usage or usage
    chosen = [e for e in answer.events if e.choice is not None or e.usage is None]

    # Random weights may repeat an invisible token: that is reported.
    visible = any(e.choice is None or has_content(e.choice) for e in chosen)
    timed = from_first_token(chosen) or chosen
    times_s = np.array([e.time_s for e in timed])
    num_tokens = usage.get("completion_tokens") or 0
    failure = capture.failure or answer.failure
    if failure is None and not capture.cancelled:
        failure = find_fault(request, num_tokens, len(times_s), answer)
    text, calls = assemble(chosen) if must_decode else (None, {})
    return Record(
        capture.intended_s,
        capture.sent_s,
        end_s=chosen[-1].time_s if chosen else capture.sent_s,
        chunk_times_s=times_s,
        num_output_tokens=num_tokens,
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_reads=len(capture.pieces),
        chunk_tokens=tokens_per_chunk(timed) if count_tokens else None,
        number=request.number,
        textless=not visible,
        failure=failure,
        cancelled=capture.cancelled,
        slow=request.slow,
        well_formed=judge_shape(request, text or "", calls),
        text=text if keep_text else None,
    )


def find_fault(
    request: Request, num_tokens: int, num_chunks: int, answer: Answer
) -> Failure | None:
    expected = request.num_expected
    faults = {
        "stream_cut": not answer.finished,
        "empty_stream": num_chunks == 0,
        "no_usage": num_tokens == 0,
        "wrong_token_count": expected is not None and num_tokens != expected,
    }
    of = "" if expected is None else f" of {expected}"
    counts = f"{num_tokens}{of} tokens, {num_chunks} chunks, "
    done = f"{'' if answer.finished else 'no '}[DONE]"
    return next((Failure(kind, counts + done) for kind, found in faults.items() if found), None)


def judge_shape(request: Request, text: str, calls: dict[int, tuple[str, str]]) -> bool | None:
    if request.shape == "schema":
        return fits_schema(text, request.required)
    return has_well_formed_calls(calls) if request.shape == "tools" else None


# ---- Every event parsed --------------------------------------------------------------------------


def split_events(capture: Capture) -> Iterator[tuple[float, bytes]]:
    """The data of each SSE event and the time of the read that completed it; no comments."""
    rest = b""
    times_s = capture.times_s + capture.times_s[-1:]  # the last event may lack its blank line
    for time_s, piece in zip(times_s, [*capture.pieces, b"\n\n"], strict=False):
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for lines in (event.split(b"\n") for event in events):
            if data := b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")):
                yield time_s, data


def decoded(capture: Capture) -> Answer:
    events: list[Event] = []
    failure = None
    for time_s, data in split_events(capture):
        if data == b"[DONE]":
            return Answer(events, failure, True)
        try:
            events.extend(parse_event(time_s, data))
            error = orjson.loads(data).get("error") if b'"error"' in data else None
        except (ValueError, AttributeError):
            text = data.decode(errors="replace")
            return Answer(events, failure or Failure("bad_event", text), False)
        failure = failure or (Failure("error_event", message_of(data)) if error else None)
    return Answer(events, failure, False)


def parse_event(time_s: float, data: bytes) -> list[Event]:
    event = orjson.loads(data)
    usage = event.get("usage")
    choices = event.get("choices") or ()
    if not choices:
        return [Event(time_s, None, usage)] if usage else []
    return [Event(time_s, choice, usage) for choice in choices]


# ---- Only the ends parsed ------------------------------------------------------------------------


def scanned(capture: Capture) -> Answer | None:
    """None: not a plain stream, or one that fails, which only `decoded` can name."""
    stream = b"".join(capture.pieces)
    if capture.cancelled or not stream.endswith(b"data: [DONE]\n\n") or b"\r" in stream:
        return None
    if b'"error":' in stream:
        return None
    ends = np.array([found.end() for found in re.finditer(rb"\n\n", stream)])
    starts = np.concatenate([[0], ends[:-1]])
    piece_ends = np.cumsum([len(piece) for piece in capture.pieces])
    times_s = np.array(capture.times_s)[np.searchsorted(piece_ends, ends, "left")].tolist()
    if not data_starts(stream, starts):
        return None
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))[:-1]  # without [DONE]
    events: list[Event] = []
    tail = max(0, len(spans) - TAIL_EVENTS)
    seen = False
    for i, (start, end) in enumerate(spans):
        if seen and i < tail:
            events.append(Event(times_s[i], None, None))
            continue
        try:
            found = parse_event(times_s[i], stream[start + 5 : end])
        except (ValueError, AttributeError):
            return None
        events.extend(found)
        seen = seen or any(has_content(e.choice) for e in found if e.choice is not None)
    return Answer(events, None, True)


def data_starts(stream: bytes, starts: np.ndarray) -> bool:
    """Each event is one data line: it starts so, and there are no more of them than events."""
    chars = np.frombuffer(stream, np.uint8)
    lines = stream.count(b"\n") == 2 * len(starts)
    return lines and bool((chars[starts[:, None] + np.arange(5)] == DATA).all())


# ---- What events mean ----------------------------------------------------------------------------


def has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(key) for key in TIMED_KEYS)


def from_first_token(events: list[Event]) -> list[Event]:
    """The chunks that bring a token, as far as can be seen; none if no chunk does.

    A token's text may be empty: half a character, a special token. So every chunk counts, as with
    vLLM's client, but for one that only brings a role or finish_reason.
    """
    kept: list[Event] = []
    for event in events:
        choice = event.choice  # None: scanned over, after the first content
        if choice is None or has_content(choice) or not is_frame(choice):
            kept.append(event)
    return kept


def is_frame(choice: dict[str, Any]) -> bool:
    return bool(choice.get("finish_reason")) or "role" in (choice.get("delta") or {})


def tokens_per_chunk(events: list[Event]) -> np.ndarray | None:
    """[chunks] from the running totals in each chunk; None if the server sends none."""
    totals = [(event.usage or {}).get("completion_tokens") for event in events]
    if not totals or any(total is None for total in totals):
        return None
    return np.diff(np.array(totals, dtype=int), prepend=0)


def assemble(events: list[Event]) -> tuple[str, dict[int, tuple[str, str]]]:
    """The text, and (name, arguments) of each tool call by its index."""
    text: list[str] = []
    calls: dict[int, tuple[str, str]] = {}
    for choice in (event.choice for event in events if event.choice is not None):
        delta = choice.get("delta") or {}
        text.append(choice.get("text") or delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            name, arguments = calls.get(call["index"], ("", ""))
            function = call.get("function") or {}
            name += function.get("name") or ""
            calls[call["index"]] = (name, arguments + (function.get("arguments") or ""))
    return "".join(text), calls

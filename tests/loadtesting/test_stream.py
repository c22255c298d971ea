"""From bytes to records: streams made by hand, cut anywhere, read both ways."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from loadtesting.record import Capture, Record, Request
from loadtesting.stream import decoded, digest, scanned

DONE = b"data: [DONE]\n\n"


def frame(**event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def text(content: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return frame(choices=[{"index": 0, "text": content, "finish_reason": finish_reason}], **more)


def delta(**content: Any) -> bytes:
    return frame(choices=[{"index": 0, "delta": content}])


def usage(num_prompt: int, num_output: int, num_cached: int = 0) -> bytes:
    details = {"cached_tokens": num_cached}
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return frame(choices=[], usage={**counts, "prompt_tokens_details": details})


def capture(*timed_pieces: tuple[float, bytes], **more: Any) -> Capture:
    """Meant for 0.5 s and sent at 1 s."""
    times_s = [time_s for time_s, _ in timed_pieces]
    return Capture(0.5, 1.0, times_s, [piece for _, piece in timed_pieces], **more)


def read(
    *timed_pieces: tuple[float, bytes], counts: bool = False, keep_text: bool = False, **asked: Any
) -> Record:
    request = Request(0, b"", **({"num_expected": 3} | asked))
    return digest(capture(*timed_pieces), request, keep_text=keep_text, count_tokens=counts)


def test_chunks_are_timed_and_counts_come_from_usage() -> None:
    record = read(
        (2.0, b": ping\n\n" + text("")),  # a comment, and a token not yet a character
        (3.0, text("a")),
        (4.0, text("")),
        (5.0, text("b") + text("", "length") + usage(7, 3, num_cached=4)),
        (6.0, DONE),
    )
    assert record.failure is None
    assert record.chunk_times_s.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert (record.intended_s, record.sent_s, record.end_s) == (0.5, 1.0, 5.0)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 3)
    assert (record.num_cached_tokens, record.num_reads) == (4, 5)
    assert not record.textless and record.text is None


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("cut_every", [1, 2, 3, 50])
def test_an_event_is_stamped_when_its_last_byte_was_read(newline: bytes, cut_every: int) -> None:
    stream = text("a") + text("b") + text("c", "stop") + usage(1, 3) + DONE.rstrip()
    stream = stream.replace(b"\n", newline)
    starts = range(0, len(stream), cut_every)
    record = read(*((float(i), stream[i : i + cut_every]) for i in starts))
    assert record.failure is None
    ends = [stream.index(mark) + len(mark) for mark in (b'"a"', b'"b"', b'"c"')]
    ends = [stream.index(newline * 2, end) + 2 * len(newline) - 1 for end in ends]
    assert record.chunk_times_s.tolist() == [float(end // cut_every * cut_every) for end in ends]


@pytest.mark.parametrize("seed", range(40))
def test_scanning_and_decoding_agree_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    role = [delta(role="assistant", content="")] * rng.randrange(2)
    words = [
        text(rng.choice(["", "a", '"error" \n\n data:', "é"])) for _ in range(rng.randrange(9))
    ]
    last = [text("", "length")] if rng.random() < 0.5 else [text("z", "stop")]
    stream = b"".join([*role, *words, *last, usage(5, 3, 2), DONE])
    places = sorted(rng.sample(range(1, len(stream)), rng.randrange(1, 12)))
    edges = zip([0, *places], [*places, len(stream)], strict=True)
    seen = capture(*((1.0 + i, stream[a:b]) for i, (a, b) in enumerate(edges)))
    assert scanned(seen) is not None and decoded(seen).finished
    request = Request(0, b"", num_expected=3)
    quick, full = (digest(seen, request, keep, count_tokens=False) for keep in (False, True))
    assert quick.text is None and full.text is not None
    assert quick.chunk_times_s.tolist() == full.chunk_times_s.tolist()
    same = ("end_s", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "textless")
    assert all(getattr(quick, name) == getattr(full, name) for name in same)


@pytest.mark.parametrize(
    "stream",
    [
        text("a") + b": ping\n\n" + DONE,
        b"event: x\n" + text("a") + DONE,
        (text("a") + DONE).replace(b"\n", b"\r\n"),
        text("a") + frame(error="no") + DONE,
        text("a"),
    ],
)
def test_what_is_not_plain_is_decoded(stream: bytes) -> None:
    assert scanned(capture((1.0, stream))) is None


def test_a_chat_starts_after_the_role() -> None:
    pieces = [
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
    ]
    pieces += [frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])]
    pieces += [usage(1, 2) + DONE]
    record = read(*zip((1.0, 2.0, 3.0, 4.0, 5.0), pieces, strict=True), num_expected=2)
    assert record.failure is None
    assert record.chunk_times_s.tolist() == [2.0, 3.0]
    assert record.end_s == 4.0


def test_an_invisible_answer_takes_every_chunk_and_says_so() -> None:
    record = read((1.0, text("")), (2.0, text("") + text("", "length") + usage(1, 3) + DONE))
    assert record.textless and record.failure is None
    assert record.chunk_times_s.tolist() == [1.0, 2.0]


def test_tokens_of_each_chunk_from_running_totals() -> None:
    record = read(
        (1.0, text("ab", usage={"completion_tokens": 2})),
        (2.0, text("c", usage={"completion_tokens": 3}) + usage(1, 3) + DONE),
        counts=True,
    )
    assert record.chunk_tokens is not None and record.chunk_tokens.tolist() == [2, 1]
    uncounted = read((1.0, text("abc") + usage(1, 3) + DONE), counts=True)
    assert uncounted.chunk_tokens is None


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("wrong_token_count", text("a") + usage(1, 2) + DONE),
        ("no_usage", text("a") + DONE),
        ("stream_cut", text("a") + usage(1, 3)),
        ("stream_cut", b'{"object": "text_completion"}'),
        ("empty_stream", usage(1, 3) + DONE),
        ("bad_event", b"data: {oops\n\n"),
        ("bad_event", text("a") + b"data: [1]\n\n" + DONE),
        ("error_event", text("a") + frame(error={"message": "no"})),
        ("error_event", frame(error="no") + DONE),
    ],
)
def test_what_is_wrong_has_a_name(kind: str, stream: bytes) -> None:
    failure = read((1.0, stream)).failure
    assert failure is not None and failure.kind == kind


def test_no_token_count_is_checked_when_the_model_may_stop() -> None:
    assert read((1.0, text("a") + usage(1, 2) + DONE), num_expected=None).failure is None


def test_a_cancelled_answer_is_no_failure() -> None:
    seen = capture((1.0, text("a")), cancelled=True)
    record = digest(seen, Request(0, b"", num_expected=3), False, False)
    assert record.cancelled and record.failure is None


@pytest.mark.parametrize(
    ("answer", "well_formed"),
    [('{"name": "x"}', True), ('{"name": "x"', False), ('{"other": 1}', False), ("[1]", False)],
)
def test_a_schema_answer_is_judged(answer: str, well_formed: bool) -> None:
    stream = delta(content=answer[:4]) + delta(content=answer[4:]) + usage(1, 3) + DONE
    record = read((1.0, stream), shape="schema", required=("name",))
    assert record.well_formed is well_formed


@pytest.mark.parametrize(
    ("arguments", "well_formed"), [(["{", "}"], True), (["{"], False), ([], None)]
)
def test_a_tool_call_is_put_together_and_judged(
    arguments: list[str], well_formed: bool | None
) -> None:
    calls = [delta(tool_calls=[{"index": 0, "function": {"name": "f"}}])] if arguments else []
    calls += [delta(tool_calls=[{"index": 0, "function": {"arguments": a}}]) for a in arguments]
    stream = b"".join(calls) + delta(content="x") + usage(1, 3) + DONE
    assert read((1.0, stream), shape="tools").well_formed is well_formed

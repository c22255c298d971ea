"""Repetition detection against its definition, and as the end of an answer's text."""

from __future__ import annotations

import random

import pytest

from asyncllm import InvalidRequestError, RepetitionDetectionParams, SamplingParams
from asyncllm.engine.output_state import RepetitionDetector
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.sampling_limits import MAX_REPETITION_COUNT, MAX_REPETITION_PATTERN_SIZE
from tests.text.token_feed import TokenFeed, make_request


def repeats(ids: list[int], params: RepetitionDetectionParams) -> bool:
    """By definition: some last `size` tokens stand there `min_count` times in a row."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        num = size * params.min_count
        if len(ids) >= num and ids[-num:] == ids[-size:] * params.min_count:
            return True
    return False


def test_every_token_is_judged_as_by_definition() -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(300):
        most = rng.randint(1, 6)
        params = RepetitionDetectionParams(most, rng.randint(0, most), rng.randint(2, 4))
        min_tokens = rng.choice([0, 0, rng.randint(1, 20)])
        detector = RepetitionDetector(params, min_tokens)
        ids: list[int] = []
        for _ in range(40):
            ids.append(rng.randint(0, 2))
            expected = repeats(ids, params) and len(ids) > min_tokens
            assert detector.push(ids[-1]) == expected, (ids, params, min_tokens)
            num_found += expected
    assert num_found > 500


def test_the_longest_pattern_and_the_highest_count() -> None:
    size = MAX_REPETITION_PATTERN_SIZE
    detector = RepetitionDetector(RepetitionDetectionParams(size, size, 2))
    ids = list(range(size)) * 2
    assert [detector.push(i) for i in ids] == [False] * (2 * size - 1) + [True]
    detector = RepetitionDetector(RepetitionDetectionParams(1, 1, MAX_REPETITION_COUNT))
    count = MAX_REPETITION_COUNT
    assert [detector.push(0) for _ in range(count)] == [False] * (count - 1) + [True]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_answer_ends_with_its_text_whole(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    request = make_request(repetition_detection=detection, logprobs=None)
    feed.add(request)
    (seq,) = request.sequences
    (again,) = ids_of(byte_level, "a")
    outputs = feed.run(seq, [*ids_of(byte_level, "b"), again, again, again, again])
    assert "".join(output.outputs[0].text for output in outputs) == "baaa"
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "repetition_detected")
    feed.processor.check_empty()


def test_what_a_stop_string_held_back_comes_out(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    detection = {"max_pattern_size": 1, "min_count": 2}
    request = make_request(repetition_detection=detection, stop=["aaax"])
    feed.add(request)
    (seq,) = request.sequences
    outputs = feed.run(seq, ids_of(byte_level, "a") * 4)
    assert "".join(output.outputs[0].text for output in outputs) == "aa"
    assert outputs[-1].outputs[0].stop_reason == "repetition_detected"


@pytest.mark.parametrize("cause", ["stop", "stop_token", "length"])
def test_other_reasons_to_end_come_first(byte_level: Tokenizer, cause: str) -> None:
    feed = TokenFeed(byte_level)
    (a,) = ids_of(byte_level, "a")
    fields = {
        "stop": {"stop": ["aa"]},
        "stop_token": {"stop_token_ids": [a]},
        "length": {"max_tokens": 2},
    }
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    request = make_request(repetition_detection=detection, **fields[cause])
    feed.add(request)
    (seq,) = request.sequences
    last = feed.run(seq, [a, a, a])[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == {
        "stop": ("stop", "aa"),
        "stop_token": ("stop", a),
        "length": ("length", None),
    }[cause]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": MAX_REPETITION_PATTERN_SIZE + 1, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": -1, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": MAX_REPETITION_COUNT + 1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 2.0}, "min_count"),
        ({"max_pattern_size": "2", "min_count": 2}, "max_pattern_size"),
        ({"max_patern_size": 2, "min_count": 2}, "max_patern_size"),
        (7, "repetition_detection"),
    ],
)
def test_bad_values_are_named(fields: object, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(repetition_detection=fields)  # type: ignore[arg-type]
    assert caught.value.param == "repetition_detection"


def test_off_is_off() -> None:
    for off in (None, {}, RepetitionDetectionParams(), {"min_count": 5}):
        assert SamplingParams(repetition_detection=off).repetition_detection is None  # type: ignore[arg-type]

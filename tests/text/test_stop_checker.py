"""Stop strings against a naive search of the whole text."""

from __future__ import annotations

import random
import time

import pytest

from asyncllm.engine.text.stop_checker import StopChecker, StopStrings
from asyncllm.sampling_limits import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS


def check(
    stops: list[str], deltas: list[str], include: bool = False, min_tokens: int = 0
) -> tuple[str, str | None, list[str]]:
    """The text sent, the stop string, and the text sent after each delta."""
    checker = StopChecker(StopStrings(stops), include, min_tokens)
    sent, history = "", []
    for delta in deltas:
        text, stop = checker.push(delta)
        sent += text
        history.append(sent)
        if stop is not None:
            return sent, stop, history
    return sent + checker.flush(), None, history


def first_stop(text: str, stops: list[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first complete stop string ends after `start`, and it; the longest there."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def longest_open(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that a stop string might begin with."""
    return max(
        (n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0
    )


def cut(rng: random.Random, text: str) -> list[str]:
    deltas = []
    while text:
        size = rng.choice((0, 1, 1, 2, 3, 7))
        deltas.append(text[:size])
        text = text[size:]
    return deltas


def random_case(rng: random.Random) -> tuple[list[str], list[str]]:
    alphabet = rng.choice(("ab", "abc", "a", "ab\n😀"))
    stops = [
        "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6)))
        for _ in range(rng.randint(1, 4))
    ]
    return stops, cut(rng, "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))))


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_equal_a_search_of_the_whole(include: bool) -> None:
    rng = random.Random(5)
    for _ in range(4000):
        stops, deltas = random_case(rng)
        text = "".join(deltas)
        sent, stop, history = check(stops, deltas, include)
        found = first_stop(text, stops)
        if found is None:
            assert (sent, stop) == (text, None)
            num_whole = len(deltas)
        else:
            end, expected = found
            assert stop == expected, (stops, deltas)
            assert sent == text[: end if include else end - len(expected)], (stops, deltas)
            num_whole = len(history) - 1
        for count in range(1, num_whole + 1):  # held back: exactly what might become a stop string
            seen = "".join(deltas[:count])
            assert history[count - 1] == seen[: len(seen) - longest_open(seen, stops)]


def test_min_tokens_ignores_what_is_complete_too_early() -> None:
    rng = random.Random(6)
    for _ in range(3000):
        stops, deltas = random_case(rng)
        min_tokens = rng.randint(0, 6)
        text, start = "".join(deltas), len("".join(deltas[:min_tokens]))
        sent, stop, _ = check(stops, deltas, False, min_tokens)
        found = first_stop(text, stops, start)
        if found is None:
            assert (sent, stop) == (text, None)
        else:
            end, expected = found
            assert stop == expected, (stops, deltas, min_tokens)
            assert sent == text[: end - len(expected)]


def test_the_first_complete_wins_and_then_the_longest() -> None:
    assert check(["abcdef", "cd"], ["abcdef"])[:2] == ("ab", "cd")
    assert check(["abcdef", "cd"], list("abcdef"))[:2] == ("ab", "cd")
    assert check(["d", "bcd", "cd"], ["abcd"])[:2] == ("a", "bcd")


def test_across_tokens_nothing_of_it_is_sent() -> None:
    sent, stop, history = check(["User:"], ["Hello", "\nUs", "er", ": hi"])
    assert (sent, stop) == ("Hello\n", "User:")
    assert history == ["Hello", "Hello\n", "Hello\n", "Hello\n"]


def test_what_was_held_comes_when_it_is_no_stop() -> None:
    sent, stop, history = check(["</end>"], ["a</", "en", "t>", "</en"])
    assert history == ["a", "a", "a</ent>", "a</ent>"]
    assert (sent, stop) == ("a</ent></en", None)


def test_the_largest_allowed_stop_strings_are_no_burden() -> None:
    size = MAX_STOP_STRING_CHARS - 2
    strings = ["a" * size + chr(0x4E00 + i) for i in range(MAX_STOP_STRINGS)]
    started = time.process_time()
    stops = StopStrings(strings)
    checker = StopChecker(stops)
    sent = "".join(checker.push("aaaa")[0] for _ in range(500))
    assert time.process_time() - started < 2
    assert sent + checker.flush() == "aaaa" * 500

"""The fast path of a plain token: text alone, between the first output and the last."""

from __future__ import annotations

import random

import pytest

from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.outputs import RequestOutput
from asyncllm.types import Request, TokenLogprobs
from tests.text.token_feed import TokenFeed, make_request

Update = RequestOutput | tuple[str, int]


class Streams(TokenFeed):
    """A feed whose requests have a text sink. `updates`: what either sink was given, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.updates: dict[str, list[Update]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            updates = self.updates[request.request_id] = []

            def take_text(text: str, num_tokens: int, updates: list[Update] = updates) -> None:
                updates.append((text, num_tokens))

            self.processor.add(request, updates.append, take_text)


def text_of(updates: list[Update]) -> str:
    return "".join(n[0] if isinstance(n, tuple) else n.outputs[0].text for n in updates)


def num_tokens_of(updates: list[Update]) -> int:
    return sum(n[1] if isinstance(n, tuple) else len(n.outputs[0].token_ids) for n in updates)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_outputs_at_both_ends_and_text_between(byte_level: Tokenizer) -> None:
    feed = Streams(byte_level)
    ids = ids_of(byte_level, "The quick 😀 fox")
    request = make_request(max_tokens=len(ids))
    feed.add(request)
    for token_id in ids:
        feed.step({request.sequences[0]: token_id})
    first, *between, last = feed.updates["r"]
    assert isinstance(first, RequestOutput) and not first.finished
    assert isinstance(last, RequestOutput) and last.finished
    assert all(isinstance(update, tuple) and update[1] == 1 for update in between)
    assert ("", 1) in between, "a token without text is told too: it counts"
    assert text_of(feed.updates["r"]) == "The quick 😀 fox"
    feed.processor.check_empty()


@pytest.mark.parametrize(
    "params", [{"n": 2}, {"stop": "x"}, {"logprobs": 0}, {"prompt_logprobs": 0}]
)
def test_who_has_more_to_say_gets_outputs(byte_level: Tokenizer, params: dict) -> None:
    feed = Streams(byte_level)
    request = make_request(**params)
    feed.add(request)
    for _ in range(3):
        feed.step(dict.fromkeys(request.sequences, 5), TokenLogprobs(-0.5, 1, [], []))
    assert len(feed.updates["r"]) == 3
    assert all(isinstance(update, RequestOutput) for update in feed.updates["r"])


def test_several_tokens_of_one_step_join(byte_level: Tokenizer) -> None:
    feed = Streams(byte_level)
    request = make_request()
    feed.add(request)
    seq = request.sequences[0]
    the, *others = ids_of(byte_level, "The quick brown fox")
    feed.step([(seq, the), (seq, others[0])])
    feed.step([(seq, token_id) for token_id in others[1:]])
    first, second = feed.updates["r"]
    assert isinstance(first, RequestOutput) and first.outputs[0].token_ids == [the, others[0]]
    assert isinstance(second, tuple) and second[1] == len(others) - 1
    assert text_of([first, second]) == "The quick brown fox"


def test_statistics_are_those_of_outputs(byte_level: Tokenizer) -> None:
    feeds = TokenFeed(byte_level), Streams(byte_level)
    all_stats = []
    for feed in feeds:
        request = make_request(max_tokens=4)
        feed.add(request)
        for _ in range(4):
            feed.step({request.sequences[0]: 5})
        all_stats.append((feed.processor.take_iteration_stats(), request.metrics))
    assert all_stats[0] == all_stats[1]


def test_an_abort_has_the_last_token_s_time_and_the_held_text(byte_level: Tokenizer) -> None:
    feed = Streams(byte_level)
    request = make_request()
    feed.add(request)
    half = ids_of(byte_level, "😀")[0]  # of a character
    for token_id in (*ids_of(byte_level, "The"), 5, half):
        last_time = feed.now
        feed.step({request.sequences[0]: token_id})
    feed.processor.end("r", feed.now + 5)
    last = feed.updates["r"][-1]
    assert isinstance(last, RequestOutput) and last.outputs[0].text == "\ufffd"
    (finished,) = feed.processor.take_iteration_stats().finished
    assert finished.num_generation_tokens == num_tokens_of(feed.updates["r"])
    assert request.metrics.last_token_time == last_time
    feed.processor.check_empty()


def test_a_failing_detokenizer_ends_its_own_request(
    byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Streams(byte_level)
    good, bad = make_request("good"), make_request("bad")
    feed.add(good, bad)
    g, b = good.sequences[0], bad.sequences[0]
    feed.step({b: 5, g: 5})

    def broken(token_id: int) -> str:
        raise RuntimeError("no such token")

    feed.processor._sequences[b.seq_id].push_plain = broken
    stops = feed.step({b: 6, g: 6})
    assert stops == [(b, "error", None)]
    last = feed.updates["bad"][-1]
    assert isinstance(last, RequestOutput) and last.finished
    assert last.error is not None and "no such token" in str(last.error)
    assert "no such token" in caplog.text
    assert len(feed.updates["good"]) == 2
    feed.step({g: 7})
    assert len(feed.updates["good"]) == 3


def test_random_streams_equal_outputs(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    rng = random.Random(3)
    for tokenizer in (byte_level, sentencepiece):
        pool = [*ids_of(tokenizer, "The quick brown fox 😀 世界 a b c"), *range(20, 40)]
        for _ in range(40):
            ids = [rng.choice(pool) for _ in range(rng.randint(1, 30))]
            streams, outputs = Streams(tokenizer), TokenFeed(tokenizer)
            for feed in (streams, outputs):
                request = make_request(max_tokens=len(ids))
                feed.add(request)
                for token_id in ids:
                    feed.step({request.sequences[0]: token_id})
            expected = "".join(output.outputs[0].text for output in outputs.outputs["r"])
            assert text_of(streams.updates["r"]) == expected
            assert num_tokens_of(streams.updates["r"]) == len(ids)

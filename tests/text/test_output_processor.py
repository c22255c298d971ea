"""Clients get text, logprobs and ends for the tokens that were sampled."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from asyncllm.engine.logprobs import LazyPromptLogprobs
from asyncllm.engine.output_collector import OutputCollector
from asyncllm.engine.output_processor import OutputProcessor
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import RequestFailedError
from asyncllm.outputs import CompletionOutput, Logprob, RequestOutput
from asyncllm.types import Request, Sequence, SequenceStatus, TokenLogprobs
from tests.text.token_feed import TokenFeed, finish, make_request
from tests.text.tokenizer_folders import id_of

LOGPROBS = TokenLogprobs(-0.5, 2, [7, 8, 9], [-0.25, -0.5, -2.0])


def merged(outputs: list[RequestOutput]) -> RequestOutput:
    collector = OutputCollector()
    for output in outputs:
        collector.add(output)
    return collector.output


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# --- deltas ------------------------------------------------------------------------------------


def test_each_step_emits_its_tokens(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(prompt_ids=[3, 4, 5])
    feed.add(request)
    request.sequences[0].num_cached_tokens = 2
    ids = ids_of(byte_level, "The quick 😀 fox")
    outputs = feed.run(request.sequences[0], ids)
    assert [output.outputs[0].token_ids for output in outputs] == [[i] for i in ids]
    assert "".join(output.outputs[0].text for output in outputs) == "The quick 😀 fox"
    assert any(output.outputs[0].text == "" for output in outputs), "ids are an update without text"
    for output in outputs:
        assert (output.request_id, output.prompt) == ("r", "the prompt")
        assert output.prompt_token_ids == [3, 4, 5]
        assert output.num_cached_tokens == 2
        assert output.metrics is request.metrics
        assert not output.finished


def test_one_output_per_request_and_step(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    one, two = make_request("one", n=2), make_request("two")
    feed.add(one, two)
    a, b = one.sequences
    feed.step({a: 5, two.sequences[0]: 6, b: 7})
    assert [[(c.index, c.token_ids) for c in out.outputs] for out in feed.outputs["one"]] == [
        [(0, [5]), (1, [7])]
    ]
    assert len(feed.outputs["two"]) == 1


def test_several_tokens_in_one_step_join(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(logprobs=1)
    feed.add(request)
    seq = request.sequences[0]
    ids = ids_of(byte_level, "The fox")
    feed.step([(seq, i) for i in ids], LOGPROBS)
    (output,) = feed.outputs["r"]
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("The fox", ids)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(ids)
    assert completion.cumulative_logprob == pytest.approx(-0.5 * len(ids))


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(stop="fox")
    feed.add(request)
    seq = request.sequences[0]
    ids = ids_of(byte_level, "The fox jumps")
    assert feed.step([(seq, i) for i in ids]) == [(seq, "stop", "fox")]
    assert feed.outputs["r"][0].outputs[0].text == "The "
    feed.processor.check_empty()


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
def test_eos_and_stop_tokens(byte_level: Tokenizer, include: bool) -> None:
    eos = byte_level.eos_token_ids[0]
    the, fox = ids_of(byte_level, "The fox")[0], ids_of(byte_level, "x")[0]
    for last, stop_reason, shown in ((eos, None, "<|eos|>"), (fox, fox, "x")):
        feed = TokenFeed(byte_level)
        request = make_request(
            eos=frozenset([eos]),
            stop_token_ids=[fox],
            skip_special_tokens=False,
            include_stop_str_in_output=include,
        )
        feed.add(request)
        whole = merged(feed.run(request.sequences[0], [the, last]))
        assert whole.finished
        completion = whole.outputs[0]
        assert completion.token_ids == [the, last], "the ending id is always there"
        assert completion.text == byte_level.token_text(the) + (shown if include else "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)
        feed.processor.check_empty()


def test_length_flushes_what_was_held(byte_level: Tokenizer) -> None:
    smile = [id_of(byte_level._raw, token) for token in ("ð", "Ł")]  # half of an emoji
    feed = TokenFeed(byte_level)
    request = make_request(max_tokens=4, stop="x<end>")
    feed.add(request)
    outputs = feed.run(request.sequences[0], [*ids_of(byte_level, "x"), *smile, *smile])
    whole = merged(outputs)
    assert whole.outputs[0].finish_reason == "length"
    assert whole.outputs[0].text == byte_level.decode(whole.outputs[0].token_ids)
    assert "\ufffd" in outputs[-1].outputs[0].text
    feed.processor.check_empty()


def test_a_stop_string_beats_the_length_limit(byte_level: Tokenizer) -> None:
    ids = ids_of(byte_level, "The fox")
    feed = TokenFeed(byte_level)
    request = make_request(max_tokens=len(ids), stop="fox")
    feed.add(request)
    for token_id in ids[:-1]:
        feed.step({request.sequences[0]: token_id})
    assert feed.step({request.sequences[0]: ids[-1]}) == [], "the scheduler freed it already"
    completion = merged(feed.outputs["r"]).outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "fox")
    feed.processor.check_empty()


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(byte_level: Tokenizer, include: bool) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(stop=["over the"], include_stop_str_in_output=include)
    feed.add(request)
    ids = ids_of(byte_level, "The quick brown fox jumps over the lazy dog")
    whole = merged(feed.run(request.sequences[0], ids))
    text = "The quick brown fox jumps " + ("over the" if include else "")
    assert whole.outputs[0].text == text
    assert whole.outputs[0].stop_reason == "over the"
    assert whole.outputs[0].token_ids == ids[: len(whole.outputs[0].token_ids)]


def test_without_detokenizing(byte_level: Tokenizer) -> None:
    for tokenizer in (byte_level, None):
        feed = TokenFeed(tokenizer)
        request = make_request(detokenize=False, logprobs=1, max_tokens=2)
        feed.add(request)
        feed.step({request.sequences[0]: 7}, LOGPROBS)
        feed.step({request.sequences[0]: 8}, LOGPROBS)
        completion = merged(feed.outputs["r"]).outputs[0]
        assert (completion.text, completion.token_ids) == ("", [7, 8])
        assert completion.logprobs is not None
        assert completion.logprobs[0][7].decoded_token is None


def test_siblings_finish_on_their_own(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(n=2, stop_token_ids=[9])
    feed.add(request)
    a, b = request.sequences
    feed.step({a: 9, b: 7})
    assert not feed.outputs["r"][-1].finished
    feed.step({b: 9})
    assert feed.outputs["r"][-1].finished
    whole = merged(feed.outputs["r"])
    assert [c.finish_reason for c in whole.outputs] == ["stop", "stop"]
    assert [c.token_ids for c in whole.outputs] == [[9], [7, 9]]
    feed.processor.check_empty()


# --- aborts and errors -------------------------------------------------------------------------


def test_abort(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(n=2, stop="<end>", stop_token_ids=[9])
    feed.add(request)
    a, b = request.sequences
    feed.step({a: 9, b: ids_of(byte_level, "<")[0]})
    assert feed.outputs["r"][-1].outputs[-1].text == "", "it may begin a stop string"
    assert feed.processor.end("r", feed.now) is request
    last = feed.outputs["r"][-1]
    assert last.finished
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in last.outputs] == [
        (1, "<", [], "abort")
    ]
    assert request.metrics.finished_time == feed.now
    assert feed.processor.end("r", feed.now) is None
    feed.processor.check_empty()


def test_abort_before_the_first_token(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(prompt_logprobs=1, logprobs=1)
    feed.add(request)
    feed.processor.end("r", feed.now)
    (output,) = feed.outputs["r"]
    assert output.finished
    assert output.outputs == [CompletionOutput(0, "", [], 0.0, [], "abort")]
    feed.processor.check_empty()


def test_fail(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(n=2)
    feed.add(request)
    error = RequestFailedError("the device is lost")
    feed.processor.end("r", feed.now, error)
    (output,) = feed.outputs["r"]
    assert output.error is error and output.finished
    assert [c.finish_reason for c in output.outputs] == ["error", "error"]
    assert feed.processor.end("r", feed.now, RequestFailedError("again")) is None
    assert len(feed.outputs["r"]) == 1
    feed.processor.check_empty()


def break_detokenizer(feed: TokenFeed, seq: Sequence) -> None:
    def fail(token_id: int) -> str:
        raise RuntimeError(f"cannot decode {token_id}")

    feed.processor._sequences[seq.seq_id].push_plain = fail


def test_a_failing_hook_ends_its_own_sequence_only(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    bad, good = make_request("bad", n=2), make_request("good")
    feed.add(bad, good)
    a, b = bad.sequences
    c = good.sequences[0]
    break_detokenizer(feed, a)
    assert feed.step({a: 5, b: 6, c: 7}) == [(a, "error", None)]
    assert feed.step({b: 6, c: 7}) == []
    told = "request bad: output failed: RuntimeError: cannot decode 5"
    assert str(feed.outputs["bad"][0].error) == told
    assert not feed.outputs["bad"][-1].finished, "its sibling goes on"
    assert feed.outputs["good"][-1].error is None
    feed.processor.end("bad", feed.now)
    feed.processor.end("good", feed.now)
    feed.processor.check_empty()


def test_a_failing_hook_on_the_last_token(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(max_tokens=1, logprobs=1)
    feed.add(request)
    assert feed.step({request.sequences[0]: 5}) == [], "finished by the scheduler, and by an error"
    (output,) = feed.outputs["r"]
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None
    assert "no logprobs" in str(output.error)
    feed.processor.check_empty()


# --- log-probabilities -------------------------------------------------------------------------


def test_logprobs(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(logprobs=2)
    feed.add(request)
    for token_id in (8, 100):
        feed.step({request.sequences[0]: token_id}, LOGPROBS)
    first, second = merged(feed.outputs["r"]).outputs[0].logprobs or []
    assert [(i, e.logprob, e.rank) for i, e in first.items()] == [(8, -0.5, 2), (7, -0.25, 1)]
    assert list(second) == [100, 7, 8], "the sampled token first, and two more"
    assert second[100].decoded_token == byte_level.token_text(100)
    assert merged(feed.outputs["r"]).outputs[0].cumulative_logprob == -1.0


def test_logprobs_of_zero_are_the_token_s_own(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(logprobs=0)
    feed.add(request)
    feed.step({request.sequences[0]: 8}, LOGPROBS)
    completion = feed.outputs["r"][0].outputs[0]
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[8]]


def entries(count: int, first: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(first - i, 1, [1], [first - i]) for i in range(count)]


def test_prompt_logprobs_come_whole_with_the_first_token(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(prompt_ids=[3, 4, 5, 6], prompt_logprobs=0)
    feed.add(request)
    seq = request.sequences[0]
    feed.step({}, prompt_logprobs={seq.seq_id: entries(2, -1.0)})
    assert feed.outputs["r"] == []
    feed.step({seq: 9}, prompt_logprobs={seq.seq_id: entries(1, -3.0)})
    feed.step({seq: 9})
    first, second = feed.outputs["r"]
    assert second.prompt_logprobs is None
    prompt_logprobs = first.prompt_logprobs or []
    assert prompt_logprobs[0] is None
    assert [next(iter(e)) for e in prompt_logprobs[1:] if e] == [4, 5, 6]
    assert [e[i].logprob for i, e in zip([4, 5, 6], prompt_logprobs[1:], strict=True) if e] == [
        -1.0,
        -2.0,
        -3.0,
    ]
    assert merged(feed.outputs["r"]).prompt_logprobs == first.prompt_logprobs


def test_prompt_logprobs_of_a_prompt_computed_twice(byte_level: Tokenizer) -> None:
    """Preempted amid its prefill, or after it: each time the whole prompt is reported again."""
    feed = TokenFeed(byte_level)
    request = make_request(prompt_ids=[3, 4, 5, 6], prompt_logprobs=0)
    feed.add(request)
    seq = request.sequences[0]
    feed.step({}, prompt_logprobs={seq.seq_id: entries(2, -10.0)})
    feed.step({seq: 9}, prompt_logprobs={seq.seq_id: entries(3, -1.0)})
    feed.step({seq: 9}, prompt_logprobs={seq.seq_id: entries(3, -20.0)})
    first, second = feed.outputs["r"]
    assert [e[i].logprob for i, e in zip([4, 5, 6], (first.prompt_logprobs or [])[1:], strict=True)
            if e] == [-1.0, -2.0, -3.0]  # fmt: skip
    assert second.prompt_logprobs is None


def test_prompt_logprobs_of_one_token(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(prompt_ids=[3], prompt_logprobs=2)
    feed.add(request)
    feed.step({request.sequences[0]: 9})
    assert feed.outputs["r"][0].prompt_logprobs == [None]


def test_prompt_logprobs_are_made_when_they_are_read() -> None:
    names: list[int] = []

    def text_of(token_id: int) -> str:
        names.append(token_id)
        return str(token_id)

    lazy = LazyPromptLogprobs([3, 4, 5, 6], entries(3, -1.0), 0, text_of)
    assert len(lazy) == 4
    assert not names
    assert lazy[-1] == {6: Logprob(-3.0, 1, "6")}
    assert names == [6]
    assert lazy[1:3] == [{4: Logprob(-1.0, 1, "4")}, {5: Logprob(-2.0, 1, "5")}]
    assert lazy == list(lazy) == pickle.loads(pickle.dumps(lazy))
    assert type(copy.copy(lazy)) is list
    with pytest.raises(IndexError):
        lazy[4]


# --- times and statistics ----------------------------------------------------------------------


def test_metrics_and_statistics(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    request = make_request(prompt_ids=[3, 4], max_tokens=3)
    request.metrics.first_scheduled_time = 100.5
    feed.add(request)
    seq = request.sequences[0]
    seq.num_cached_tokens = 1
    feed.step({seq: 5})
    stats = feed.processor.take_iteration_stats()
    assert stats.time_to_first_tokens == pytest.approx([1.0])
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (2, 1)
    assert (stats.inter_token_latencies, stats.finished) == ([], [])
    feed.step({seq: 5})
    feed.step({seq: 5})
    stats = feed.processor.take_iteration_stats()
    assert stats.inter_token_latencies == pytest.approx([0.1, 0.1])
    assert (stats.time_to_first_tokens, stats.num_generation_tokens) == ([], 2)
    (finished,) = stats.finished
    assert finished.request_id == "r"
    assert finished.finish_reason == "length"
    assert (finished.num_prompt_tokens, finished.num_generation_tokens) == (2, 3)
    assert (finished.num_cached_tokens, finished.max_tokens, finished.n) == (1, 3, 1)
    assert finished.e2e_time == pytest.approx(1.2)
    assert finished.queue_time == pytest.approx(0.5)
    assert finished.prefill_time == pytest.approx(0.5)
    assert finished.decode_time == pytest.approx(0.2)
    assert finished.time_per_output_token == pytest.approx(0.1)
    metrics = request.metrics
    assert metrics.first_token_time == 101.0
    assert metrics.last_token_time == metrics.finished_time == pytest.approx(101.2)
    assert feed.processor.take_iteration_stats().finished == []


def test_statistics_of_an_abort_without_tokens(byte_level: Tokenizer) -> None:
    feed = TokenFeed(byte_level)
    feed.add(make_request())
    feed.processor.end("r", 103.0)
    (finished,) = feed.processor.take_iteration_stats().finished
    assert finished.finish_reason == "abort"
    assert finished.e2e_time == pytest.approx(3.0)
    assert finished.time_to_first_token is None
    assert finished.decode_time is None
    assert finished.time_per_output_token is None


def test_check_empty_sees_what_is_left(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    processor.check_empty()
    processor.add(make_request(), lambda output: None)
    with pytest.raises(AssertionError, match="requests left"):
        processor.check_empty()


# --- all of it at random -----------------------------------------------------------------------


def expected_end(seq: Sequence, tokenizer: Tokenizer) -> tuple[str, str | None, int | str | None]:
    """Slow oracle for a sequence fed to its end: text, finish reason, stop reason."""
    params, request = seq.request.sampling_params, seq.request
    detokenizer = tokenizer.detokenizer(request.prompt_token_ids, params.skip_special_tokens)
    output_ids = seq.token_ids[seq.num_prompt_tokens :]
    text = ""
    for count, token_id in enumerate(output_ids, start=1):
        num_before = len(text)
        is_stop = token_id in request.stop_token_ids
        if not is_stop or params.include_stop_str_in_output:
            text += detokenizer.push(token_id)
        if count == len(output_ids):
            text += detokenizer.flush()
        for end in range(num_before + 1, len(text) + 1):
            found = [stop for stop in params.stop or [] if text[:end].endswith(stop)]
            if found:
                stop = max(found, key=len)
                kept = end if params.include_stop_str_in_output else end - len(stop)
                return text[:kept], "stop", stop
        if is_stop:
            return text, "stop", token_id if token_id in (params.stop_token_ids or ()) else None
    return text, "length", None


def test_random_requests_equal_the_oracle(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    rng = random.Random(8)
    for _ in range(150):
        tokenizer = rng.choice((byte_level, sentencepiece))
        eos = tokenizer.eos_token_ids[0]
        pool = [*ids_of(tokenizer, "The quick brown fox 😀 世界 a b c"), eos, *range(20, 40)]
        requests = [random_request(rng, str(i), eos) for i in range(rng.randint(1, 6))]
        feed = TokenFeed(tokenizer)
        feed.add(*requests)
        aborted: set[str] = set()
        while feed.processor.requests:
            live = [
                seq
                for request in requests
                for seq in request.sequences
                if seq.status is not SequenceStatus.FINISHED
            ]
            chosen = rng.sample(live, rng.randint(1, len(live)))
            feed.step({seq: rng.choice(pool) for seq in chosen})
            if rng.random() < 0.02:
                victim = rng.choice(live).request
                if feed.processor.end(victim.request_id, feed.now) is not None:
                    aborted.add(victim.request_id)
                    abort_all(victim.sequences)
        feed.processor.check_empty()
        for request in requests:
            outputs = feed.outputs[request.request_id]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            if request.request_id in aborted:
                continue
            for seq, got in zip(request.sequences, merged(outputs).outputs, strict=True):
                expected = expected_end(seq, tokenizer)
                assert (got.text, got.finish_reason, got.stop_reason) == expected, seq.token_ids
                assert got.token_ids == seq.token_ids[seq.num_prompt_tokens :]


def abort_all(sequences: list[Sequence]) -> None:
    for seq in sequences:
        if seq.status is not SequenceStatus.FINISHED:
            finish(seq, "abort", None)


def random_request(rng: random.Random, request_id: str, eos: int) -> Request:
    stops = ["fox", "own f", "b c", "\ufffd", "世", " ", "The The", "qu", "quick"]
    return make_request(
        request_id,
        eos=frozenset([eos]) if rng.random() < 0.7 else frozenset(),
        n=rng.choice((1, 1, 2, 3)),
        max_tokens=rng.randint(1, 30),
        stop=rng.sample(stops, rng.choice((0, 0, 1, 2))) or None,
        stop_token_ids=[25] if rng.random() < 0.3 else None,
        skip_special_tokens=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.5,
    )

"""The load test: its arithmetic on streams made by hand, and whole runs against its own mock."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "loadtest.py"


def import_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loadtest", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loadtest"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


loadtest = import_script()


# ---- Streams made by hand ------------------------------------------------------------------------


def frame(**event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def text(content: str, finish_reason: str | None = None) -> bytes:
    return frame(choices=[{"index": 0, "text": content, "finish_reason": finish_reason}])


def usage(num_prompt: int, num_output: int, num_cached: int = 0) -> bytes:
    details = {"cached_tokens": num_cached}
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return frame(choices=[], usage={**counts, "prompt_tokens_details": details})


DONE = b"data: [DONE]\n\n"


def digest(*timed_pieces: tuple[float, bytes], output_len: int = 3, **settings: Any) -> Any:
    """The record of a request meant for 0.5 s and sent at 1 s."""
    times_s = [time_s for time_s, _ in timed_pieces]
    pieces = [piece for _, piece in timed_pieces]
    capture = loadtest.Capture(0.5, 1.0, times_s, pieces, None)
    return loadtest.digest(capture, loadtest.Settings(output_len=output_len, **settings))


def test_digest_times_chunks_and_takes_counts_from_usage() -> None:
    record = digest(
        (2.0, b": ping\n\n" + text("")),  # a comment, and a token not yet a character
        (3.0, text("a")),
        (4.0, text("")),
        (5.0, text("b") + text("", "length") + usage(7, 3, num_cached=4)),
        (6.0, DONE),
    )
    assert record.failure is None
    assert record.chunk_times_s == [3.0, 4.0, 5.0]
    assert (record.intended_s, record.sent_s, record.end_s) == (0.5, 1.0, 5.0)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 3)
    assert (record.num_cached_tokens, record.num_reads) == (4, 5)
    assert not record.textless


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("cut_every", [1, 2, 3, 50])
def test_digest_stamps_an_event_when_its_last_byte_was_read(newline: bytes, cut_every: int) -> None:
    stream = text("a") + text("b") + text("c", "stop") + usage(1, 3) + DONE.rstrip()
    stream = stream.replace(b"\n", newline)
    starts = range(0, len(stream), cut_every)
    record = digest(*((float(i), stream[i : i + cut_every]) for i in starts))
    assert record.failure is None
    ends = [stream.index(mark) + len(mark) for mark in (b'"a"', b'"b"', b'"c"')]
    ends = [stream.index(newline * 2, end) + 2 * len(newline) - 1 for end in ends]
    assert record.chunk_times_s == [float(end // cut_every * cut_every) for end in ends]


def test_digest_of_a_chat_starts_after_the_role() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "a"}]
    pieces = [frame(choices=[{"index": 0, "delta": delta}]) for delta in deltas]
    pieces += [frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])]
    pieces += [usage(1, 2) + DONE]
    record = digest(*zip((1.0, 2.0, 3.0, 4.0, 5.0), pieces, strict=True), output_len=2)
    assert record.failure is None
    assert record.chunk_times_s == [2.0, 3.0]
    assert record.end_s == 4.0


def test_digest_of_an_invisible_answer_takes_every_chunk_and_says_so() -> None:
    record = digest((1.0, text("")), (2.0, text("") + text("", "length") + usage(1, 3) + DONE))
    assert record.textless and record.failure is None
    assert record.chunk_times_s == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("wrong_token_count", text("a") + usage(1, 2) + DONE),
        ("no_usage", text("a") + DONE),
        ("stream_cut", text("a") + usage(1, 3)),
        ("stream_cut", b'{"object": "text_completion"}'),
        ("empty_stream", usage(1, 3) + DONE),
        ("bad_event", b"data: {oops\n\n"),
        ("error_event", text("a") + frame(error={"message": "no"})),
        ("error_event", frame(error="no") + DONE),
    ],
)
def test_digest_names_what_is_wrong(kind: str, stream: bytes) -> None:
    assert digest((1.0, stream)).failure.kind == kind


def test_digest_checks_no_token_count_when_the_model_may_stop() -> None:
    assert digest((1.0, text("a") + usage(1, 2) + DONE), ignore_eos=False).failure is None


# ---- Figures -------------------------------------------------------------------------------------


def test_figures_of_records_made_by_hand() -> None:
    failure = loadtest.Failure("http_500", "x" * 1000)
    records = [
        # Three tokens in two chunks: TPOT (4 - 2) / 2, one gap of 1.5 s.
        loadtest.Record(0.0, 1.0, 4.0, [2.0, 3.5], num_output_tokens=3, num_prompt_tokens=10),
        # One token has no TPOT and no gap.
        loadtest.Record(1.0, 1.0, 1.5, [1.5], num_output_tokens=1, num_prompt_tokens=20),
        loadtest.Record(0.0, 0.0, 9.0, [9.0], num_output_tokens=99, failure=failure),
        loadtest.Record(0.0, 0.0, 0.0, [], num_output_tokens=0, failure=failure),
    ]
    figures = loadtest.summarise(records, duration_s=2.0)
    assert (figures["num_requests"], figures["num_failed"]) == (4, 2)
    assert figures["errors"] == {"http_500": {"count": 2, "first": "request 2: " + "x" * 200}}
    assert figures["requests_per_s"] == 1.0
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["total_tokens_per_s"] == 17.0
    medians = {name: spread["median"] for name, spread in figures["latency_ms"].items()}
    assert medians == {
        "ttft_from_intended": pytest.approx((2000 + 500) / 2),
        "ttft_from_sent": pytest.approx((1000 + 500) / 2),
        "tpot": pytest.approx(1000),
        "itl_per_chunk": pytest.approx(1500),
        "e2e_from_intended": pytest.approx((4000 + 500) / 2),
        "e2e_from_sent": pytest.approx((3000 + 500) / 2),
        "sent_after_intended": pytest.approx((1000 + 0) / 2),
    }


def test_figures_when_all_failed() -> None:
    record = loadtest.Record(0.0, 0.0, 0.0, [], 0, failure=loadtest.Failure("timeout", ""))
    figures = loadtest.summarise([record], duration_s=1.0)
    assert figures["output_tokens_per_s"] == 0.0
    assert set(figures["latency_ms"].values()) == {None}


def test_spread() -> None:
    spread = loadtest.spread_ms(np.arange(101) / 1e3)
    assert spread == pytest.approx({"mean": 50, "median": 50, "p90": 90, "p99": 99})


# ---- Load ----------------------------------------------------------------------------------------


def arrivals(rate: float, burstiness: float, num: int, seed: int) -> Any:
    return loadtest.arrival_times(rate, burstiness, num, np.random.default_rng(seed))


def test_arrivals_follow_from_the_seed_and_keep_the_rate() -> None:
    times_s = arrivals(8.0, 1.0, 20_000, seed=1)
    assert np.array_equal(times_s, arrivals(8.0, 1.0, 20_000, seed=1))
    assert not np.array_equal(times_s, arrivals(8.0, 1.0, 20_000, seed=2))
    assert times_s[-1] == pytest.approx(20_000 / 8)
    assert (np.diff(times_s) >= 0).all()
    # Poisson: as many arrivals in a second as the variance of that number.
    counts = np.bincount(times_s.astype(int))
    assert counts.mean() == pytest.approx(8, rel=0.05)
    assert counts.var() == pytest.approx(8, rel=0.15)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        gaps_s = np.diff(arrivals(10.0, burstiness, 50_000, seed=3))
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(float("inf"), 1.0, 5, seed=0).tolist() == [0.0] * 5


def prompts(num: int, stream: int = 0, **settings: Any) -> list[list[int]]:
    bodies = loadtest.make_bodies(loadtest.Settings(**settings), num, stream)
    return [orjson.loads(body)["prompt"] for body in bodies]


def test_prompts_share_prefixes_equally_and_follow_from_the_seed() -> None:
    shape: dict[str, Any] = {"input_len": 5, "prefix_len": 7, "num_prefixes": 4}
    made = prompts(20, **shape)
    assert {len(prompt) for prompt in made} == {12}
    heads = [tuple(prompt[:7]) for prompt in made]
    assert sorted(heads.count(head) for head in set(heads)) == [5, 5, 5, 5]
    assert len({tuple(prompt[7:]) for prompt in made}) == 20
    assert made == prompts(20, **shape)
    assert made != prompts(20, seed=1, **shape)
    assert not set(heads) & {tuple(prompt[:7]) for prompt in prompts(20, stream=1, **shape)}


def test_prompt_ids_stay_in_range() -> None:
    ids = {i for prompt in prompts(50, token_range=(10, 1000), vocab_size=13) for i in prompt}
    assert ids == {10, 11, 12}
    with pytest.raises(loadtest.LoadTestError, match="--vocab-size"):
        prompts(1, token_range=(10, 1000), vocab_size=10)


def test_text_prompts_are_words() -> None:
    settings = loadtest.Settings(text=True, input_len=9)
    body = orjson.loads(loadtest.make_bodies(settings, 1, stream=0)[0])
    assert len(body["prompt"].split()) == 9
    chat = loadtest.Settings(endpoint="chat", input_len=9)
    body = orjson.loads(loadtest.make_bodies(chat, 1, stream=0)[0])
    assert len(body["messages"][0]["content"].split()) == 9


def test_a_stalled_client_is_seen() -> None:
    async def stall() -> list[float]:
        lags_s: list[float] = []
        watcher = asyncio.create_task(loadtest.watch_lag(lags_s))
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
        watcher.cancel()
        return lags_s

    lags_s = asyncio.run(stall())
    assert max(lags_s) > 0.09
    # Each tick that the stall swallowed counts, not the one late wake-up alone.
    assert sum(lag_s > 0.01 for lag_s in lags_s) > 0.08 / loadtest.LAG_TICK_S


# ---- Whole runs against the mock -----------------------------------------------------------------


@contextmanager
def mock_server(*flags: str) -> Iterator[str]:
    command = [sys.executable, str(SCRIPT), "--serve-mock", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def run_script(url: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report, what people are shown."""
    command = [sys.executable, str(SCRIPT), "--base-url", url, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def test_closed_loop(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = "--workload lat8 --num-prompts 40 --output-len 9 --num-warmups 3 --api-key sesame"
    with mock_server() as url:
        status, report, table = run_script(url, *flags.split(), "--json", str(file))
    assert status == 0
    assert (report["num_requests"], report["num_failed"], report["errors"]) == (40, 0, {})
    assert report["num_prompt_tokens"] == 40 * 128
    assert report["num_output_tokens"] == 40 * 9
    asked = report["conditions"]
    assert (asked["load"], asked["model"], asked["max_concurrency"]) == ("closed_loop", "mock", 8)
    assert (asked["input_len"], asked["output_len"]) == (128, 9)
    assert report["latency_ms"]["tpot"]["p99"] <= report["latency_ms"]["e2e_from_sent"]["p99"]
    assert json.loads(file.read_text()) == report
    assert "ttft_from_intended" in table
    assert "sesame" not in table + json.dumps(report)


def test_open_loop_shows_what_a_full_gate_delays() -> None:
    """Answers of 100 ms, one at a time, asked for each 20 ms: the last waits for all before it."""
    flags = "--endpoint chat --num-prompts 10 --output-len 20 --request-rate 50 --num-warmups 0"
    with mock_server("--tokens-per-second", "200") as url:
        status, report, _ = run_script(url, *flags.split(), "--max-concurrency", "1")
    assert status == 0
    assert report["conditions"]["load"] == "open_loop"
    latency_ms = report["latency_ms"]
    assert latency_ms["tpot"]["median"] > 4
    assert latency_ms["e2e_from_sent"]["median"] > 90
    assert latency_ms["ttft_from_intended"]["p99"] > 600
    assert latency_ms["ttft_from_sent"]["median"] < 100


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("500", "http_500"),
        ("event", "error_event"),
        ("short", "wrong_token_count"),
        ("cut", "stream_cut"),
    ],
)
def test_failures_are_counted_named_and_change_the_exit_status(how: str, kind: str) -> None:
    flags = "--num-prompts 12 --output-len 5 --num-warmups 0 --max-concurrency 4"
    with mock_server("--fail-every", "4", "--fail-with", how) as url:
        status, report, table = run_script(url, *flags.split())
    assert status == 1
    assert report["num_failed"] == 3
    assert {name: error["count"] for name, error in report["errors"].items()} == {kind: 3}
    assert report["num_output_tokens"] == 9 * 5
    assert f"FAILED 3 times: {kind}, request " in table


def test_a_failed_warm_up_ends_the_run() -> None:
    with mock_server("--fail-every", "1") as url:
        status, report, message = run_script(url)
    assert (status, report) == (2, {})
    assert "http_500" in message


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else answers there
        status, report, message = run_script(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (status, report) == (2, {})
    assert "is the server up?" in message and "Traceback" not in message


@pytest.mark.parametrize(
    "flags", ["--num-prompts 0", "--request-rate 0", "--seed -1", "--workload x", "--token-range 5"]
)
def test_bad_flags_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        loadtest.main(flags.split())
    assert refusal.value.code == 2

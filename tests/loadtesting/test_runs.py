"""Whole runs against the mock, whose faults and capacity are known, through the command line.

No test asserts how fast anything is: only orders of events, counts, and waits the mock imposes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loadtest
import orjson
import pytest

from loadtesting import knee, table
from tests.waiting import PATIENCE_SECONDS

from .conftest import SCRIPTS

Mock = Callable[..., str]
ANY_LAG = "--max-client-lag-ms 1e6"  # a busy test machine is late; most tests are not about that


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """run(url, "--flags ...") gives exit status, report, what people are shown."""

    def run(url: str, flags: str, *more: str) -> tuple[int, dict[str, Any], str]:
        status = loadtest.main(["--base-url", url, *f"{ANY_LAG} {flags}".split(), *more])
        shown = capsys.readouterr()
        lines = shown.out.splitlines()
        return status, json.loads(lines[-1]) if lines else {}, shown.err

    return run


Run = Callable[..., tuple[int, dict[str, Any], str]]


def test_the_script_itself(mock: Mock, tmp_path: Path) -> None:
    """As people and gpu_timing.py start it: in a process of its own, from any folder."""
    flags = "--workload lat8 --num-prompts 20 --output-len 9 --num-warmups 3 --api-key sesame"
    command = [sys.executable, str(SCRIPTS / "loadtest.py"), "--base-url", mock(), *flags.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["conditions"]["load"] == "closed_loop"
    assert "ttft_from_intended" in done.stderr
    assert "sesame" not in done.stderr + done.stdout


def test_closed_loop(mock: Mock, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = "--workload lat8 --num-prompts 40 --output-len 9 --num-warmups 3"
    status, report, _ = run(mock(tokens_per_second=200.0), flags, "--json", str(file))
    assert status == 0 and report["valid"]
    assert (report["num_requests"], report["num_failed"], report["errors"]) == (40, 0, {})
    assert report["num_prompt_tokens"] == 40 * 128
    assert report["num_output_tokens"] == 40 * 9
    asked = report["conditions"]
    assert (asked["model"], asked["max_concurrency"]) == ("mock", 8)
    assert (asked["input_len"], asked["output_len"]) == (128, 9)
    assert report["latency_ms"]["tpot"]["p99"] <= report["latency_ms"]["e2e_from_sent"]["p99"]
    assert 0 < report["steady"]["num_requests"] < 40
    # The warm-up's three requests are the server's too.
    assert report["server_metrics"]["mock:generation_tokens_total"] == 43 * 9
    assert json.loads(file.read_text()) == report


def test_several_processes_send_it_all(mock: Mock, run: Run) -> None:
    for load in ("--max-concurrency 5", "--request-rate 500"):
        flags = f"--processes 3 {load} --num-prompts 30 --output-len 4 --num-warmups 6"
        status, report, _ = run(mock(), flags)
        assert status == 0
        assert (report["num_requests"], report["num_output_tokens"]) == (30, 120)


def test_what_a_full_gate_delays_shows(mock: Mock, run: Run) -> None:
    """Answers of 100 ms, one at a time, asked for each 20 ms: the last waits for all before it."""
    flags = "--endpoint chat --num-prompts 10 --output-len 20 --request-rate 50 --num-warmups 0"
    status, report, _ = run(mock(tokens_per_second=200.0), f"{flags} --max-concurrency 1")
    assert status == 0
    assert report["conditions"]["load"] == "open_loop"
    latency_ms = report["latency_ms"]
    assert latency_ms["tpot"]["median"] > 4
    assert latency_ms["e2e_from_sent"]["median"] > 90
    assert latency_ms["ttft_from_intended"]["p99"] > 600


def test_a_stall_shows_from_intended_and_hides_from_sent(mock: Mock, run: Run) -> None:
    """The mock stands still for a second at the 10th of 40 requests, one sent at a time.

    One request alone waited for the server; about thirty were due while it did. That is coordinated
    omission, and the two clocks of a request show it.
    """
    url = mock(stall_after=10, stall_s=1.0)
    flags = "--num-prompts 40 --output-len 2 --num-warmups 0 --arrival constant --request-rate 40"
    _, report, _ = run(url, f"{flags} --max-concurrency 1")
    latency_ms = report["latency_ms"]
    assert latency_ms["ttft_from_sent"]["p99"] > 500
    intended, sent = (latency_ms[f"ttft_from_{start}"]["median"] for start in ("intended", "sent"))
    assert intended > sent + 100
    assert latency_ms["sent_after_intended"]["p90"] > 100


def test_a_summary_fits_one_screen(mock: Mock, run: Run) -> None:
    _, _, shown = run(mock(), "--num-prompts 40 --output-len 6 --max-concurrency 2")
    lines = shown.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 132
    assert "None" not in shown and "{" not in shown and "inf" not in shown


def test_errors_are_said_in_words(mock: Mock, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert loadtest.main(["--base-url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert (
        said == "no model from http://127.0.0.1:9/v1/models, is the server up? Connection refused\n"
    )
    _, report, _ = run(mock(fail_every=1), "--num-prompts 2 --num-warmups 0")
    first = report["errors"]["http_500"]["first"]
    assert first == "request 0: the mock fails on purpose"
    for flags, words in (
        ("--token-range x", "x is not LO:HI, two token ids"),
        ("--slo speed:1", "no objective for speed, only for ttft, tpot, itl, e2e"),
        ("--slo ttft", "ttft needs milliseconds: ttft:200"),
    ):
        with pytest.raises(SystemExit):
            loadtest.main(flags.split())
        assert words in capsys.readouterr().err


def test_a_late_client_disowns_its_run(mock: Mock, run: Run) -> None:
    flags = "--num-prompts 8 --output-len 3 --max-concurrency 2 --max-client-lag-ms 1e-6"
    status, report, shown = run(mock(), flags)
    assert status == 0  # the server did nothing wrong
    assert report["valid"] is False and report["client_lag_p99_ms"] > 0
    assert "INVALID: the client itself was late" in shown


def test_an_open_loop_that_sends_late_is_a_late_client() -> None:
    from loadtesting.run import make_report
    from loadtesting.settings import Settings
    from loadtesting.worker import Load

    from .test_measure import record

    late = [record(0.0, 0.5, 1.0, [0.9], 1), record(0.0, 0.5, 1.0, [0.9], 1)]
    load = Load(late, 0.0, 1.0, 0.1, lag_p99_s=0.001, lag_max_s=0.002)
    assert make_report(Settings(request_rate=2.0), load, "")["client_lag_p99_ms"] == 500
    gated = Settings(request_rate=2.0, max_concurrency=1)
    assert make_report(gated, load, "")["client_lag_p99_ms"] == 1


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("500", "http_500"),
        ("event", "error_event"),
        ("short", "wrong_token_count"),
        ("cut", "stream_cut"),
    ],
)
def test_failures_are_counted_and_named(mock: Mock, run: Run, how: str, kind: str) -> None:
    flags = "--num-prompts 12 --output-len 5 --num-warmups 0 --max-concurrency 4"
    status, report, table = run(mock(fail_every=4, fail_with=how), flags)
    assert status == 1
    assert report["num_failed"] == 3
    assert {name: error["count"] for name, error in report["errors"].items()} == {kind: 3}
    assert report["num_output_tokens"] == 9 * 5
    assert f"FAILED 3 times: {kind}, request " in table


# ---- Kinds of requests ---------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["schema", "tools"])
def test_shaped_answers_are_judged_and_refusals_said(mock: Mock, run: Run, dataset: str) -> None:
    flags = f"--dataset {dataset} --num-prompts 6 --max-concurrency 3 --num-warmups 1"
    status, report, _ = run(mock(), flags)
    assert status == 0
    assert (report["num_well_formed"], report["num_shaped"]) == (6, 6)
    field = {"schema": "response_format", "tools": "tools"}[dataset]
    status, report, shown = run(mock(refuse=field), flags)
    assert (status, report) == (2, {})
    assert "the server refuses this workload" in shown and f"{field} is not supported" in shown


def test_turns_carry_the_real_answers(mock: Mock, run: Run) -> None:
    flags = "--num-turns 3 --input-len 4 --output-len 5 --num-prompts 9 --max-concurrency 3"
    status, report, _ = run(mock(word=" word"), flags)
    assert (status, report["num_requests"]) == (0, 9)
    # Turn t has t + 1 questions of 4 words and t answers of 5.
    assert report["num_prompt_tokens"] == 3 * (4 + 13 + 22)


def test_turns_after_a_failed_one_are_not_sent(mock: Mock, run: Run) -> None:
    flags = "--num-turns 3 --num-prompts 3 --output-len 5 --max-concurrency 1 --num-warmups 0"
    status, report, _ = run(mock(fail_every=2), flags)
    assert status == 1
    counts = {name: error["count"] for name, error in report["errors"].items()}
    assert counts == {"http_500": 1, "earlier_turn_failed": 1}


def test_cancelled_and_slow_requests(mock: Mock, run: Run) -> None:
    """Half are broken off, which the server sees; half are slow and get all their tokens."""
    url = mock(tokens_per_second=100.0)
    flags = "--num-prompts 40 --output-len 50 --max-concurrency 20 --num-warmups 0"
    slow = "--slow-share 0.5 --slow-bytes-per-s 200000"
    status, report, _ = run(url, f"{flags} --cancel-share 0.5 {slow}")
    assert status == 0
    assert 5 <= report["num_cancelled"] <= 35 and report["num_slow"] > 0
    rest = 40 - report["num_cancelled"]
    assert report["num_output_tokens"] == rest * 50
    # A request broken off in its last chunks may already be written out at the server.
    cancelled = report["server_metrics"]["mock:requests_cancelled_total"]
    assert 0 < cancelled <= report["num_cancelled"]


def test_hidden_and_shared_tokens_are_named(mock: Mock, run: Run) -> None:
    """Four tokens without text, then three a chunk: chunks 7, 10, 13, 16 and the last at 17."""
    url = mock(textless_tokens=4, tokens_per_chunk=3, tokens_per_second=300.0)
    flags = "--num-prompts 4 --output-len 17 --max-concurrency 4 --num-warmups 0"
    status, report, shown = run(url, flags)
    assert status == 0
    assert (report["num_first_token_unknown"], report["num_first_chunk_several"]) == (4, 0)
    assert report["latency_ms"]["itl_per_token"] is None
    assert "fewer chunks than tokens" in shown

    status, report, shown = run(url, f"{flags} --token-counts")
    assert (report["num_first_token_unknown"], report["num_first_chunk_several"]) == (0, 4)
    latency_ms = report["latency_ms"]
    assert latency_ms["ttft_first_token"]["mean"] < latency_ms["ttft_from_sent"]["mean"]
    assert latency_ms["itl_per_token"]["mean"] < latency_ms["itl_per_chunk"]["mean"]
    assert "first chunks brought several tokens" in shown


# ---- Several runs --------------------------------------------------------------------------------


def test_seeds_give_intervals(mock: Mock, run: Run) -> None:
    flags = "--num-prompts 8 --output-len 3 --max-concurrency 4 --num-warmups 1 --num-seeds 4"
    status, report, shown = run(mock(), flags)
    assert (status, report["num_seeds"]) == (0, 4)
    assert [r["conditions"]["seed"] for r in report["runs"]] == [0, 1, 2, 3]
    found = report["over_seeds"]["output_tokens_per_s"]
    assert found["low"] <= found["mean"] <= found["high"]
    assert "95 % confidence interval" in shown


def test_two_servers_take_turns(mock: Mock, run: Run) -> None:
    """The second waits 50 ms before each of ten tokens, the first not at all."""
    fast, slow = mock(), mock(tokens_per_second=20.0)
    flags = "--num-prompts 8 --output-len 10 --max-concurrency 8 --num-warmups 1 --num-seeds 2"
    status, report, shown = run(fast, f"{flags} --ab-url {slow}")
    assert status == 0
    urls = [r["conditions"]["base_url"] for r in report["runs"]]
    seeds = [r["conditions"]["seed"] for r in report["runs"]]
    assert (urls, seeds) == ([fast, fast, slow, slow], [0, 1, 0, 1])
    started = [r["conditions"]["started_at"] for r in report["runs"]]
    assert started[2] <= started[3] <= started[1]  # A B, B A
    medians_ms = [r["latency_ms"]["e2e_from_sent"]["median"] for r in report["runs"]]
    assert min(medians_ms[2:]) > 450
    ratios = [b / a for a, b in zip(medians_ms[:2], medians_ms[2:], strict=True)]
    found = report["b_over_a"]["e2e_from_sent.median_ms"]
    assert min(ratios) <= found["mean"] <= max(ratios)
    assert "B/A" in shown and found["low"] is None
    assert "2 seeds are too few for an interval: --num-seeds 5" in shown


def test_a_late_client_is_no_knee_of_the_server() -> None:
    found = {"valid": False, "knee_requests_per_s": 8.0, "first_failing_requests_per_s": 9.5,
             "slos_ms": {"ttft": 200.0}, "needed_share": 0.99}  # fmt: skip
    assert table.knee_text(found) == (
        "no knee of the server: at least 8 requests/s met ttft 200 ms for 99% of requests; "
        "at 9.5 this client was late, not the server"
    )
    none = found | {"knee_requests_per_s": None}
    assert "no rate is known that meets ttft 200 ms" in table.knee_text(none)


def test_the_knee_of_a_known_capacity(
    mock: Mock, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of 0.1 s each: 40 requests a second, and a queue that grows above it."""
    monkeypatch.setattr(knee, "MAX_PROBES", 5)  # each that fails doubles the next one's time
    url = mock(tokens_per_second=100.0, max_running=4)
    flags = "--output-len 10 --request-rate 40 --arrival constant --slo ttft:2000 --num-warmups 2"
    status, report, shown = run(url, f"{flags} --find-knee --probe-s 1 --knee-tolerance 1")
    assert status == 0
    assert report["first_failing_requests_per_s"] is not None
    assert report["knee_requests_per_s"] < report["first_failing_requests_per_s"]
    # Offered four times the capacity for a second, the last wait three: no machine meets that.
    assert report["knee_requests_per_s"] < 160
    assert len(report["probes"]) >= 2 and "knee: " in shown


def test_outputs_are_checked_against_an_idle_server(mock: Mock, run: Run) -> None:
    flags = "--num-prompts 6 --output-len 4 --max-concurrency 3 --num-warmups 0 --check-outputs 3"
    url = mock(word=" same")
    _, report, shown = run(url, flags)
    assert report["output_check"] == {"num_checked": 3, "num_equal": 3, "first_difference": None}
    assert "outputs: 3 of 3 as when idle" in shown
    _, report, _ = run(url, f"{flags} --reference-url {mock(word=' some')}")
    assert report["output_check"]["num_equal"] == 0
    assert report["output_check"]["first_difference"] == {"request": 0, "char": 2}


# ---- No run --------------------------------------------------------------------------------------


def test_a_failed_warm_up_ends_the_run(mock: Mock, run: Run) -> None:
    status, report, message = run(mock(fail_every=1), "")
    assert (status, report) == (2, {})
    assert "warm-up failed" in message and "http_500" in message


def test_no_server(run: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else answers there
        status, report, message = run(f"http://127.0.0.1:{free.getsockname()[1]}", "")
    assert (status, report) == (2, {})
    assert "is the server up?" in message


@pytest.mark.parametrize(
    "flags",
    [
        "--num-prompts 0",
        "--request-rate 0",
        "--seed -1",
        "--workload x",
        "--token-range 5",
        "--cancel-share 1.5",
        "--slo speed:3",
    ],
)
def test_bad_flags_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        loadtest.main(flags.split())
    assert refusal.value.code == 2


def test_a_knee_needs_objectives(run: Run) -> None:
    status, _, message = run("http://127.0.0.1:1", "--find-knee --request-rate 1")
    assert status == 2 and "--slo" in message


def test_reports_are_json(mock: Mock, run: Run) -> None:
    """An infinite rate, a mapping of objectives and None survive."""
    _, report, _ = run(mock(), "--num-prompts 3 --output-len 1 --slo ttft:1 --num-warmups 0")
    assert report["conditions"]["request_rate"] is None
    assert report["latency_ms"]["tpot"] is None
    assert orjson.loads(orjson.dumps(report)) == report

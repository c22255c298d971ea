"""Figures of records made by hand, and the statistics against hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loadtesting import interval, knee, measure, output_check, server_metrics
from loadtesting.measure import Span
from loadtesting.record import Failure, Record


def record(
    intended_s: float, sent_s: float, end_s: float, chunks_s: list[float], tokens: int, **more: Any
) -> Record:
    return Record(intended_s, sent_s, end_s, np.array(chunks_s), tokens, **more)


def test_figures_of_a_whole_run() -> None:
    failure = Failure("http_500", "x" * 1000)
    records = [
        # Three tokens in two chunks: TPOT (4 - 2) / 2, one gap of 1.5 s.
        record(0.0, 1.0, 4.0, [2.0, 3.5], 3, num_prompt_tokens=10),
        # One token has no TPOT and no gap.
        record(1.0, 1.0, 1.5, [1.5], 1, num_prompt_tokens=20),
        record(0.0, 0.0, 9.0, [9.0], 99, failure=failure, number=2),
        record(0.0, 0.0, 0.0, [], 0, failure=failure, number=3),
        record(0.0, 0.0, 3.0, [3.0], 0, cancelled=True),
        # A slow reader counts as throughput, not as latency.
        record(0.0, 0.0, 4.0, [4.0], 1, slow=True),
    ]
    figures = measure.summarise(records, Span(0.0, 4.0), None)
    assert (figures["num_requests"], figures["num_failed"]) == (6, 2)
    assert (figures["num_cancelled"], figures["num_slow"]) == (1, 1)
    assert figures["errors"] == {"http_500": {"count": 2, "first": "request 2: " + "x" * 200}}
    assert figures["requests_per_s"] == 3 / 4
    assert figures["output_tokens_per_s"] == 5 / 4
    assert figures["total_tokens_per_s"] == 35 / 4
    medians = {name: spread and spread["median"] for name, spread in figures["latency_ms"].items()}
    assert medians == {
        "ttft_from_intended": pytest.approx((2000 + 500) / 2),
        "ttft_from_sent": pytest.approx((1000 + 500) / 2),
        "ttft_first_token": pytest.approx(500),  # of the first request it is not known
        "tpot": pytest.approx(1000),
        "itl_per_chunk": pytest.approx(1500),
        "itl_per_token": None,
        "e2e_from_intended": pytest.approx((4000 + 500) / 2),
        "e2e_from_sent": pytest.approx((3000 + 500) / 2),
        "sent_after_intended": pytest.approx((1000 + 0) / 2),
    }
    assert figures["num_first_token_unknown"] == 1


def test_figures_when_all_failed() -> None:
    failed = record(0.0, 0.0, 0.0, [], 0, failure=Failure("timeout", ""))
    figures = measure.summarise([failed], Span(0.0, 1.0), {"ttft": 1.0})
    assert figures["output_tokens_per_s"] == 0.0
    assert figures["goodput"]["share"] == 0.0
    assert figures["steady"] is None
    assert set(figures["latency_ms"].values()) == {None}


def test_spread() -> None:
    spread = measure.spread_ms(np.arange(101) / 1e3)
    assert spread == pytest.approx({"mean": 50, "median": 50, "p90": 90, "p99": 99})


def test_tokens_of_one_chunk_share_its_gap() -> None:
    counted = record(0, 0, 7.0, [1.0, 3.0, 4.0, 7.0], 6, chunk_tokens=np.array([2, 1, 0, 3]))
    # 2 s for one token; the chunk without a token is no step; then 4 s for three tokens.
    assert measure.token_gaps(counted).tolist() == pytest.approx([2.0, 4 / 3, 4 / 3, 4 / 3])
    assert measure.token_gaps(record(0, 0, 3.0, [1.0, 3.0], 2)).tolist() == [2.0]
    assert measure.token_gaps(record(0, 0, 3.0, [1.0, 3.0], 5)).tolist() == []


def test_the_first_token_comes_before_a_first_chunk_of_several() -> None:
    hidden = record(0, 1.0, 9.0, [5.0, 7.0, 9.0], 5, chunk_tokens=np.array([3, 1, 1]))
    alone = record(0, 1.0, 9.0, [5.0, 9.0], 2)
    unknown = record(0, 1.0, 9.0, [5.0, 9.0], 3)
    at_s = measure.first_token_times([hidden, alone, unknown])
    # Two hidden tokens at 2 s each before 5 s, and never before it was sent.
    assert at_s[:2].tolist() == [1.0, 5.0] and math.isnan(at_s[2])


def test_the_steady_window_leaves_out_both_ends() -> None:
    """One at a time, each 2 s of two tokens: the window is the two requests in the middle."""
    records = [record(t, t, t + 2, [t + 1, t + 2], 2) for t in (0.0, 2.0, 4.0, 6.0)]
    steady = measure.summarise(records, Span(0.0, 8.0), {"ttft": 1500.0})["steady"]
    assert (steady["from_s"], steady["to_s"]) == (2.0, 6.0)
    assert steady["duration_s"] == 4.0
    assert steady["num_requests"] == 3  # due at 2, 4 and 6
    assert steady["output_tokens_per_s"] == 5 / 4  # read at 2, 3, 4, 5 and 6
    assert steady["goodput"]["share"] == 1.0
    assert measure.steady_span(records[:1]) is None
    assert measure.steady_span(records[:2]) is None  # empty: the second was sent as the first ended


def test_goodput_counts_requests_that_meet_all() -> None:
    records = [
        record(0.0, 0.0, 2.0, [0.1, 1.0, 2.0], 3),  # TTFT 100 ms, TPOT 950, longest gap 1000
        record(0.0, 0.5, 1.0, [0.6, 0.8, 1.0], 3),  # TTFT from intended 600 ms, TPOT 200
        record(0.0, 0.0, 0.0, [], 0, failure=Failure("timeout", "")),
    ]
    span = Span(0.0, 2.0)
    assert measure.goodput(records, {"ttft": 700}, span)["share"] == pytest.approx(2 / 3)
    assert measure.goodput(records, {"ttft": 700, "tpot": 300}, span)["requests_per_s"] == 0.5
    assert measure.goodput(records, {"ttft": 500, "tpot": 300}, span)["share"] == 0
    assert measure.goodput(records, {"itl": 999}, span)["requests_per_s"] == 0.5
    assert measure.goodput(records, {"e2e": 1500}, span)["requests_per_s"] == 0.5


# ---- Over runs -----------------------------------------------------------------------------------


def test_confidence_interval_by_hand() -> None:
    """1, 1, 3, 3 have mean 2, deviation (4/3)^0.5, t(3) 3.182."""
    found = interval.interval([1.0, 1.0, 3.0, 3.0])
    assert found.mean == 2
    half = 3.182 * (4 / 3) ** 0.5 / 2
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert interval.interval([7.0]) == (7.0, None, None)
    assert interval.interval([6.0, 7.0, 8.0]) == (7.0, None, None)  # of so few it says nothing


def test_ratios_of_pairs() -> None:
    found = interval.ratio([1.0, 10.0, 3.0, 4.0], [2.0, 20.0, 6.0, 8.0])
    assert found is not None and found == pytest.approx((2.0, 2.0, 2.0))
    back = interval.ratio([2.0, 30.0], [1.0, 10.0])
    forth = interval.ratio([1.0, 10.0], [2.0, 30.0])
    assert back is not None and forth is not None
    assert back.mean == pytest.approx(1 / forth.mean) == pytest.approx(6**-0.5)
    assert interval.ratio([0.0], [1.0]) is None


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.0, 100.0])
def test_the_knee_is_found_from_either_side(capacity: float) -> None:
    found = knee.search(4.0, lambda rate: rate <= capacity, tolerance=0.05)
    assert found.met is not None and found.failed is not None
    assert found.met <= capacity < found.failed <= found.met * 1.05 + 1e-9


def test_no_rate_below_the_least_is_tried() -> None:
    tried: list[float] = []

    def never(rate: float) -> bool:
        tried.append(rate)
        return False

    assert knee.search(16.0, never, 0.1, least=4.0) == knee.Knee(None, 4.0)
    assert tried == [16.0, 8.0, 4.0]


def test_a_knee_that_is_not_there() -> None:
    assert knee.search(1.0, lambda rate: True, 0.05).failed is None
    assert knee.search(1.0, lambda rate: False, 0.05).met is None


# ---- What the server says ------------------------------------------------------------------------

BEFORE = """# HELP x Things.
vllm:generation_tokens_total{model="a",reason="x y"} 10.0
vllm:generation_tokens_total{model="b"} 5
vllm:queue_seconds_bucket{le="0.1"} 3
vllm:queue_seconds_sum 1.5
vllm:queue_seconds_count 3
vllm:num_requests_running 2
process_cpu_seconds_total 7
vllm:odd_total NaN
"""


def test_server_metrics_are_joined() -> None:
    before = server_metrics.parse(BEFORE)
    assert before["vllm:generation_tokens_total"] == 15
    after = dict(before) | {"vllm:generation_tokens_total": 40.0, "vllm:queue_seconds_sum": 2.5}
    after |= {"vllm:queue_seconds_count": 5.0, "vllm:num_requests_running": 9.0}
    found = server_metrics.difference(before, after)
    assert found == {
        "vllm:generation_tokens_total": 25,
        "vllm:queue_seconds_count": 2,
        "vllm:queue_seconds_mean": 0.5,
    }
    assert server_metrics.by_suffix(found, "generation_tokens_total") == 25
    assert server_metrics.by_suffix(found, "tokens_total") is None


def test_outputs_are_compared() -> None:
    records = [record(0, 0, 1, [1], 1, number=i, text=t) for i, t in enumerate(["ab", "ac", "b"])]
    found = output_check.compare({0: "ab", 1: "ab", 2: "bcd"}, records)
    assert found == {
        "num_checked": 3,
        "num_equal": 1,
        "first_difference": {"request": 1, "char": 1},
    }

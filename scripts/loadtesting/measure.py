"""From records to figures. Who counts where:

- A failed request is counted, and is in no other figure.
- A cancelled one is counted, and is in no other figure: it has no end and no usage.
- A slow reader's tokens count as throughput; its latencies are its own doing and are left out.

The whole run has a beginning and an end in which the server is not yet or no longer under full
load. So the same figures are given for the steady window too: from the end of the first request
(the pipeline is full) to the sending of the last one (the load starts to fall).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadtesting.record import Record

MAX_MESSAGE_CHARS = 200
MIN_WINDOW_S = 1e-3


class Span(NamedTuple):
    start_s: float
    end_s: float

    def holds(self, times_s: np.ndarray) -> np.ndarray:
        return (times_s >= self.start_s) & (times_s <= self.end_s)


def spread_ms(values_s: np.ndarray) -> dict[str, float] | None:
    if not len(values_s):
        return None
    p50, p90, p99 = (np.percentile(values_s, (50, 90, 99)) * 1e3).tolist()
    return {"mean": float(values_s.mean()) * 1e3, "median": p50, "p90": p90, "p99": p99}


# ---- Latencies -----------------------------------------------------------------------------------


def latencies_s(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Each latency of each request, or of each gap; NaN where a request has none.

    TPOT = (E2E - TTFT) / (tokens - 1), so a request of one token has none. TTFT is to the first
    chunk with a token; `first_token_times` says what `ttft_first_token` is.
    """
    columns = [(r.intended_s, r.sent_s, r.chunk_times_s[0], r.end_s) for r in records]
    intended_s, sent_s, first_s, end_s = np.array(columns).reshape(-1, 4).T
    gaps = np.array([r.num_output_tokens - 1.0 for r in records])
    tpot_s = np.divide(end_s - first_s, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
    return {
        "ttft_from_intended": first_s - intended_s,
        "ttft_from_sent": first_s - sent_s,
        "ttft_first_token": first_token_times(records) - sent_s,
        "tpot": tpot_s,
        "itl_per_chunk": concatenate(np.diff(r.chunk_times_s) for r in records),
        "itl_per_token": concatenate(token_gaps(r) for r in records),
        "e2e_from_intended": end_s - intended_s,
        "e2e_from_sent": end_s - sent_s,
        "sent_after_intended": sent_s - intended_s,
    }


def latencies_ms(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    found = latencies_s(records)
    return {name: spread_ms(values[~np.isnan(values)]) for name, values in found.items()}


def concatenate(parts: Any) -> np.ndarray:
    return np.concatenate([np.empty(0), *parts])


def tokens_by_chunk(record: Record) -> np.ndarray | None:
    """[chunks] tokens. None: the server does not say, and there are not as many of both."""
    if record.chunk_tokens is not None:
        return record.chunk_tokens
    num_chunks = len(record.chunk_times_s)
    return np.ones(num_chunks, int) if num_chunks == record.num_output_tokens else None


def token_gaps(record: Record) -> np.ndarray:
    """[tokens] seconds: k tokens of one chunk share the time since the chunk before, equally.

    A chunk without a token is no step. The first chunk's tokens have no gap that can be seen.
    """
    if (tokens := tokens_by_chunk(record)) is None:
        return np.empty(0)
    kept = tokens > 0
    kept[0] = True
    times_s, tokens = record.chunk_times_s[kept], tokens[kept][1:]
    return np.repeat(np.diff(times_s) / tokens, tokens)


def first_token_times(records: Sequence[Record]) -> np.ndarray:
    """[requests]: when the first token was there, NaN where unknown.

    If the first chunk brings one token, its time. If it brings k (tokens without text came before
    and were not sent), it is an estimate: k - 1 of this request's later token times earlier.
    """
    times_s = np.full(len(records), np.nan)
    for i, record in enumerate(records):
        if (tokens := tokens_by_chunk(record)) is None:
            continue
        hidden, later = tokens[0] - 1, record.num_output_tokens - tokens[0]
        step_s = (record.end_s - record.chunk_times_s[0]) / later if later > 0 else 0.0
        times_s[i] = max(record.sent_s, record.chunk_times_s[0] - hidden * step_s)
    return times_s


# ---- Throughput ----------------------------------------------------------------------------------


def throughput(records: Sequence[Record], span: Span) -> dict[str, float]:
    """Rates within the span, of finished requests and chunks; prompts count at the first chunk."""
    duration_s = span.end_s - span.start_s
    num_output = num_prompt = 0.0
    num_chunks = num_ends = 0
    for record in records:
        within = span.holds(record.chunk_times_s)
        weights = tokens_by_chunk(record)
        if weights is None or weights.sum() != record.num_output_tokens:
            num_output += record.num_output_tokens * float(within.mean())
        else:
            num_output += float(weights[within].sum())
        num_prompt += record.num_prompt_tokens * bool(within[0])
        num_chunks += int(within.sum())
        num_ends += span.start_s <= record.end_s <= span.end_s
    return {
        "duration_s": duration_s,
        "requests_per_s": num_ends / duration_s,
        "output_tokens_per_s": num_output / duration_s,
        "total_tokens_per_s": (num_output + num_prompt) / duration_s,
        "chunks_per_s": num_chunks / duration_s,
    }


def goodput(records: Sequence[Record], slos: Mapping[str, float], span: Span) -> dict[str, float]:
    """Requests that meet every objective (ms, from intended; itl: the request's longest gap).

    The share is of all that were not cancelled or slow: one that failed has met nothing.
    """
    good = [r for r in records if r.failure is None]
    found = latencies_s(good)
    met = np.ones(len(good), bool)
    values_s = {"ttft": found["ttft_from_intended"], "e2e": found["e2e_from_intended"]}
    values_s["tpot"] = np.nan_to_num(found["tpot"])
    values_s["itl"] = np.array([np.diff(r.chunk_times_s, prepend=r.chunk_times_s[0]).max()
                                for r in good])  # fmt: skip
    for name, limit_ms in slos.items():
        met &= values_s[name] * 1e3 <= limit_ms
    duration_s = span.end_s - span.start_s
    share = float(met.sum()) / len(records) if records else 0.0
    return {"share": share, "requests_per_s": float(met.sum()) / duration_s}


def steady_span(records: Sequence[Record]) -> Span | None:
    """First end to last sending; None if that is shorter than the median request.

    In so short a window a few ends or none would pass for the server's rate.
    """
    good = [record for record in records if record.failure is None and not record.cancelled]
    if not good:
        return None
    span = Span(min(r.end_s for r in good), max(r.sent_s for r in good))
    median_s = float(np.median([r.end_s - r.sent_s for r in good]))
    return span if span.end_s - span.start_s >= max(median_s, MIN_WINDOW_S) else None


# ---- All of it -----------------------------------------------------------------------------------


def count_errors(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    errors: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.failure is not None:
            kind, message = record.failure
            first = f"request {record.number}: {message[:MAX_MESSAGE_CHARS]}"
            errors.setdefault(kind, {"count": 0, "first": first})["count"] += 1
    return errors


def summarise(
    records: Sequence[Record], span: Span, slos: Mapping[str, float] | None
) -> dict[str, Any]:
    """The figures of the whole run, and of its steady window."""
    answered = [r for r in records if r.failure is None and not r.cancelled]
    timed = [r for r in answered if not r.slow]
    judged = [r.well_formed for r in answered if r.well_formed is not None]
    num_chunks = sum(len(r.chunk_times_s) for r in answered)
    first_known = ~np.isnan(first_token_times(timed))
    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": sum(r.failure is not None for r in records),
        "num_cancelled": sum(r.cancelled for r in records),
        "num_slow": sum(r.slow for r in answered),
        "errors": count_errors(records),
        **throughput(answered, span),
        "latency_ms": latencies_ms(timed),
        "num_prompt_tokens": sum(r.num_prompt_tokens for r in answered),
        "num_cached_tokens": (num_cached := sum(r.num_cached_tokens for r in answered)),
        "cached_share": num_cached / max(1, sum(r.num_prompt_tokens for r in answered)),
        "num_output_tokens": sum(r.num_output_tokens for r in answered),
        "num_textless": sum(r.textless for r in answered),
        "num_first_token_unknown": int((~first_known).sum()),
        "num_first_chunk_several": sum(
            bool(r.chunk_tokens[0] > 1) for r in timed if r.chunk_tokens is not None
        ),
        "chunks_per_read": num_chunks / max(1, sum(r.num_reads for r in answered)),
    }
    if judged:
        figures["num_shaped"] = len(judged)
        figures["num_well_formed"] = sum(judged)
    if slos:
        judged_records = [r for r in records if not r.cancelled and not r.slow]
        figures["goodput"] = {"slos_ms": dict(slos), **goodput(judged_records, slos, span)}
    figures["steady"] = summarise_steady(records, answered, timed, span, slos)
    return figures


def summarise_steady(
    records: Sequence[Record],
    answered: Sequence[Record],
    timed: Sequence[Record],
    whole: Span,
    slos: Mapping[str, float] | None,
) -> dict[str, Any] | None:
    """Latencies of requests due in the window, throughput of what came in it."""
    if (span := steady_span(records)) is None:
        return None
    due = [r for r in timed if span.start_s <= r.intended_s <= span.end_s]
    figures: dict[str, Any] = {
        "from_s": span.start_s - whole.start_s,
        "to_s": span.end_s - whole.start_s,
        "num_requests": len(due),
        **throughput(answered, span),
        "latency_ms": latencies_ms(due),
    }
    if slos:
        in_window = [
            r
            for r in records
            if not (r.cancelled or r.slow) and span.start_s <= r.intended_s <= span.end_s
        ]
        figures["goodput"] = goodput(in_window, slos, span)
    return figures

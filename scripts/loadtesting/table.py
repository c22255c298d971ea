"""Reports for people, as plain aligned text, under the names that the JSON has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadtesting.server_metrics import by_suffix

STATISTICS = ("mean", "median", "p90", "p99")
MEANINGS = {
    "ttft_from_intended": "due to first chunk with a token",
    "ttft_from_sent": "sent to first chunk with a token",
    "ttft_first_token": "sent to first token, by token counts",
    "tpot": "(e2e - ttft) / (tokens - 1)",
    "itl_per_chunk": "between chunks",
    "itl_per_token": "the same, split by tokens of a chunk",
    "e2e_from_intended": "due to last chunk",
    "e2e_from_sent": "sent to last chunk",
    "sent_after_intended": "wait in the client",
}


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    if "b_over_a" in report:
        yield from ab_lines(report)
    elif "probes" in report:
        yield from knee_lines(report)
    elif "ceiling_probes" in report:
        yield from ceiling_lines(report)
    elif "over_seeds" in report:
        yield from seed_lines(report)
    else:
        yield from run_lines(report)
    if not report["valid"]:
        yield "INVALID: the client itself was late (client_lag_p99_ms): --processes may help"


def run_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in report["conditions"].items())
    for name, value in report.items():
        if isinstance(value, int | float):
            yield f"{name:26}{value:14,.8g}"
    steady = report["steady"]
    yield ""
    yield from latency_lines("whole run", report)
    if steady is None:
        yield "no steady window: first end to last sending is less than a request's time"
    else:
        window = f"steady window, {steady['from_s']:.2f} to {steady['to_s']:.2f} s"
        yield from latency_lines(f"{window} ({steady['num_requests']} requests)", steady)
        rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
        yield "".join(f"{name} {steady[name]:,.2f}  " for name in rates).rstrip()
    yield from goodput_lines(report)
    yield from check_lines(report)
    yield from server_lines(report)
    for kind, error in report["errors"].items():
        yield f"FAILED {error['count']} times: {kind}, {error['first']}"


def latency_lines(title: str, figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"latency, ms: {title}"
    yield f"{'':22}" + "".join(f"{name:>11}" for name in STATISTICS)
    for name, spread in figures["latency_ms"].items():
        values = "".join(f"{spread[s]:11,.2f}" for s in STATISTICS) if spread else f"{'-':>11}" * 4
        yield f"{name:22}{values}   {MEANINGS[name]}"


def goodput_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if "goodput" in report:
        found = report["goodput"]
        slos = ", ".join(f"{name} {limit:g} ms" for name, limit in found["slos_ms"].items())
        yield f"goodput {found['requests_per_s']:.3f} requests/s, {found['share']:.1%} met {slos}"


def check_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if "output_check" in report:
        found = report["output_check"]
        first = found["first_difference"]
        where = (
            f", first at character {first['char']} of request {first['request']}" if first else ""
        )
        yield f"outputs: {found['num_equal']} of {found['num_checked']} as when idle{where}"
    if "num_shaped" in report:
        yield f"shape: {report['num_well_formed']} of {report['num_shaped']} answers well formed"
    if report["num_first_chunk_several"]:
        num = report["num_first_chunk_several"]
        yield f"{num} first chunks brought several tokens: ttft_first_token is an estimate there"
    if report["num_first_token_unknown"]:
        num = report["num_first_token_unknown"]
        yield f"{num} answers had fewer chunks than tokens: their first token's time is not known"


def server_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The server's own metrics, where the client cannot see them or should agree."""
    if (metrics := report.get("server_metrics")) is None:
        yield "the server has no /metrics"
        return
    shown = {
        "generation_tokens_total": "generated tokens",
        "request_queue_time_seconds_mean": "queue time, s",
        "time_to_first_token_seconds_mean": "time to first token, s",
        "prefix_cache_hits_total": "prefix cache hits",
        "num_preemptions_total": "preemptions",
    }
    found = {name: by_suffix(metrics, suffix) for suffix, name in shown.items()}
    texts = [f"{name} {value:,.6g}" for name, value in found.items() if value is not None]
    yield "the server says (warm-up included): " + (", ".join(texts) or "nothing known here")


def interval_text(found: Mapping[str, float | None]) -> str:
    half = "" if found["low"] is None else f"  [{found['low']:,.4g}, {found['high']:,.4g}]"
    return f"{found['mean']:,.5g}{half}"


def seed_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['num_seeds']} seeds: mean [95 % confidence interval]"
    for name, found in report["over_seeds"].items():
        yield f"{name:32}{interval_text(found)}"
    yield from failure_line(report)


def ab_lines(report: Mapping[str, Any]) -> Iterator[str]:
    a, b = report["a"], report["b"]
    yield f"A {a['base_url']}, B {b['base_url']}, {report['num_seeds']} seeds, in turn"
    yield f"{'':32}{'A':>12}{'B':>12}   B/A [95 % confidence interval]"
    for name, found in report["b_over_a"].items():
        means = (side["over_seeds"][name]["mean"] for side in (a, b))
        yield f"{name:32}" + "".join(f"{m:12,.5g}" for m in means) + f"   {interval_text(found)}"
    yield from failure_line(report)


def knee_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'rate':>10}{'met':>8}{'done/s':>10}{'tokens/s':>12}{'ttft p99':>10}{'tpot p99':>10}"
    for probe in report["probes"]:
        p99s = "".join(
            f"{probe[name]:10,.1f}" if probe[name] is not None else f"{'-':>10}"
            for name in ("ttft_p99_ms", "tpot_p99_ms")
        )
        late = "" if probe["valid"] else "  client late"
        yield (
            f"{probe['request_rate']:10.3g}{probe['share']:8.1%}{probe['requests_per_s']:10.2f}"
            f"{probe['output_tokens_per_s']:12,.0f}{p99s}{late}"
        )
    yield knee_text(report)


def knee_text(report: Mapping[str, Any]) -> str:
    met, failed = report["knee_requests_per_s"], report["first_failing_requests_per_s"]
    slos = ", ".join(f"{name} {limit:g} ms" for name, limit in report["slos_ms"].items())
    met_text = "no rate met" if met is None else f"{met:.3g} requests/s met"
    failed_text = "none failed" if failed is None else f"{failed:.3g} did not"
    return f"knee: {met_text} {slos} for {report['needed_share']:.0%} of requests; {failed_text}"


def ceiling_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'offered/s':>12}{'chunks/s':>12}{'per read':>10}{'lag p99':>10}{'us/chunk':>10}"
    for probe in report["ceiling_probes"]:
        yield (
            f"{probe['offered_chunks_per_s']:12,.0f}{probe['chunks_per_s']:12,.0f}"
            f"{probe['chunks_per_read']:10.2f}{probe['client_lag_p99_ms']:10.2f}"
            f"{probe['client_cpu_us_per_chunk']:10.2f}{'' if probe['held'] else '  not held'}"
        )
    processes = f"{report['client_processes']} processes of the client"
    met = report["ceiling_chunks_per_s"]
    found = "no pace held" if met is None else f"{met:,.0f} chunks/s"
    yield f"ceiling: {found}, {processes}, {report['mock_processes']} of the mock"


def failure_line(report: Mapping[str, Any]) -> Iterator[str]:
    if report["num_failed"]:
        kinds = sorted({kind for run in report["runs"] for kind in run["errors"]})
        yield f"FAILED requests: {report['num_failed']} ({', '.join(kinds)})"

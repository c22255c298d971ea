"""Reports for people: lines and tables, under the names that the JSON has, as text and as HTML.

A run's summary fits one screen; the JSON has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from loadtesting.server_metrics import by_suffix

STATISTICS = ("mean", "median", "p90", "p99")
INTERVAL = "95 % confidence interval"
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
MAX_CACHED_SHARE = 0.5  # of prompts that share nothing: a chat template's beginning is less


class Table(NamedTuple):
    """Cells of text; the last column is a note if its heading is empty."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Aligned: the first column and notes to the left, the others to the right."""
        has_notes = not self.head[-1]
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        for row in (self.head, *self.rows):
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            if has_notes:
                cells[-1] = row[-1]
            yield "  ".join(cells).rstrip()

    def html(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        notes = ["" if name or not i else " class=note" for i, name in enumerate(self.head)]
        rows = (
            "".join(f"<td{n}>{escape(c)}</td>" for n, c in zip(notes, row, strict=True))
            for row in self.rows
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div class=scroll>{table}</div>"


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    for block in blocks_of(report):
        yield from [block] if isinstance(block, str) else block.lines()


def blocks_of(report: Mapping[str, Any]) -> Iterator[str | Table]:
    if "b_over_a" in report:
        yield from ab_blocks(report)
    elif "probes" in report:
        yield knee_table(report)
        yield knee_text(report)
    elif "ceiling_probes" in report:
        yield from ceiling_blocks(report)
    elif "over_seeds" in report:
        yield f"means of {report['num_seeds']} seeds"
        yield intervals("mean", report["over_seeds"], {})
    else:
        yield from run_blocks(report)
    yield from dict.fromkeys(note for r in report.get("runs", [report]) for note in notes(r))
    if "runs" in report and report["num_failed"]:
        kinds = sorted({kind for run in report["runs"] for kind in run["errors"]})
        yield f"FAILED requests: {report['num_failed']} ({', '.join(kinds)})"
    if not report["valid"]:
        yield "INVALID: the client itself was late (client_lag_p99_ms): --processes may help"


def notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why a run's figures may be better than the server is."""
    if "conditions" not in report:  # a ceiling's
        return
    asked, share = report["conditions"], report["cached_share"]
    shares = asked["prefix_len"] or asked["num_turns"] > 1 or asked["dataset"] != "random"
    if share > MAX_CACHED_SHARE and not shares:
        yield (
            f"WARNING: {share:.0%} of the prompt tokens came from the server's prefix cache, though"
            f" these prompts share nothing: an earlier run with seed {asked['seed']}? Take another"
        )


# ---- One run -------------------------------------------------------------------------------------


def run_blocks(report: Mapping[str, Any]) -> Iterator[str | Table]:
    yield conditions_text(report["conditions"])
    counts = {"failed": "num_failed", "cancelled": "num_cancelled", "slow": "num_slow"}
    more = "".join(f", {report[name]} {word}" for word, name in counts.items() if report[name])
    yield f"{report['num_requests']} requests in {report['duration_s']:,.1f} s{more}; the client's \
lag p99 {report['client_lag_p99_ms']:.2f} ms, {report['client_cpu_share']:.0%} of a core"
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    steady = report["steady"]
    columns = {"whole run": report} | ({"steady window": steady} if steady else {})
    rows = [[name, *(f"{report[name]:,.2f}" for name in rates)] for name, report in columns.items()]
    yield Table(["", *rates], rows)
    yield latency_table(report, steady)
    if steady is None:
        yield "no steady window: first end to last sending is less than a request's time"
    else:
        window = f"{steady['from_s']:.2f} to {steady['to_s']:.2f} s"
        yield f"steady window: {window}, {steady['num_requests']} requests"
    yield from goodput_lines(report)
    yield from check_lines(report)
    yield from server_lines(report)
    for kind, error in report["errors"].items():
        yield f"FAILED {error['count']} times: {kind}, {error['first']}"


def conditions_text(asked: Mapping[str, Any]) -> str:
    if asked["load"] == "closed_loop":
        load = f"{asked['max_concurrency']} at once"
    elif asked["trace"]:
        load = f"as in {asked['trace']}"
    else:
        load = f"{asked['request_rate']:g} requests/s"
    shape = f"{asked['input_len']} + {asked['output_len']} tokens"
    if asked["prefix_len"]:
        shape = f"{asked['prefix_len']} shared + {shape}"
    text = f"{asked['model']} at {asked['base_url']}: {asked['dataset']}, {shape}, {load}"
    return f"{text}, seed {asked['seed']}"


def latency_table(report: Mapping[str, Any], steady: Mapping[str, Any] | None) -> Table:
    in_steady = ("median", "p99") if steady else ()
    head = ["latency, ms", *STATISTICS, *(f"steady {name}" for name in in_steady), ""]
    rows = []
    for name, spread in report["latency_ms"].items():
        later = steady["latency_ms"][name] if steady else None
        values = [(spread, s) for s in STATISTICS] + [(later, s) for s in in_steady]
        cells = [f"{of[statistic]:,.2f}" if of else "-" for of, statistic in values]
        rows.append([name, *cells, MEANINGS[name]])
    return Table(head, rows)


def goodput_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if "goodput" in report:
        found = report["goodput"]
        slos = slo_text(found["slos_ms"])
        yield f"goodput {found['requests_per_s']:.3f} requests/s, {found['share']:.1%} met {slos}"


def slo_text(slos_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {limit:g} ms" for name, limit in slos_ms.items())


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
    if num := report["num_first_chunk_several"]:
        yield f"{num} first chunks brought several tokens: ttft_first_token is an estimate there"
    if num := report["num_first_token_unknown"]:
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


# ---- Several runs --------------------------------------------------------------------------------


def intervals(
    title: str, figures: Mapping[str, Any], means: Mapping[str, Mapping[str, Any]]
) -> Table:
    """means: further columns, each the means of the same figures."""
    rows = []
    for name, f in figures.items():
        bounds = "-" if f["low"] is None else f"{f['low']:,.4g} to {f['high']:,.4g}"
        others = (f"{of[name]['mean']:,.5g}" for of in means.values())
        rows.append([name, *others, f"{f['mean']:,.5g}", bounds])
    return Table(["figure", *means, title, INTERVAL], rows)


def ab_blocks(report: Mapping[str, Any]) -> Iterator[str | Table]:
    a, b = report["a"], report["b"]
    yield f"A {a['base_url']}, B {b['base_url']}, {report['num_seeds']} seeds, in turn"
    means = {side.upper(): report[side]["over_seeds"] for side in ("a", "b")}
    yield intervals("B/A", report["b_over_a"], means)
    if all(found["low"] is None for found in report["b_over_a"].values()):
        yield f"{report['num_seeds']} seeds are too few for an interval: --num-seeds 5"


def knee_table(report: Mapping[str, Any]) -> Table:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            f"{probe['request_rate']:.3g}",
            f"{probe['share']:.1%}",
            f"{probe['requests_per_s']:.2f}",
            f"{probe['output_tokens_per_s']:,.0f}",
            cell(probe["ttft_p99_ms"], ",.1f"),
            cell(probe["tpot_p99_ms"], ",.1f"),
            "" if probe["valid"] else "client late",
        ]
        for probe in report["probes"]
    ]
    return Table(["rate", "met", "done/s", "tokens/s", "ttft p99", "tpot p99", ""], rows)


def knee_text(report: Mapping[str, Any]) -> str:
    met, failed = report["knee_requests_per_s"], report["first_failing_requests_per_s"]
    slos, share = slo_text(report["slos_ms"]), f"{report['needed_share']:.0%}"
    if not report["valid"]:
        known = "no rate is known that meets" if met is None else f"at least {met:.3g} requests/s"
        what = f"{known} {'' if met is None else 'met '}{slos} for {share} of requests"
        return (
            f"no knee of the server: {what}; at {failed:.3g} this client was late, not the server"
        )
    met_text = "no rate met" if met is None else f"{met:.3g} requests/s met"
    failed_text = "none failed" if failed is None else f"{failed:.3g} did not"
    return f"knee: {met_text} {slos} for {share} of requests; {failed_text}"


def ceiling_blocks(report: Mapping[str, Any]) -> Iterator[str | Table]:
    rows = [
        [
            f"{probe['offered_chunks_per_s']:,.0f}",
            f"{probe['chunks_per_s']:,.0f}",
            f"{probe['chunks_per_read']:.2f}",
            f"{probe['client_lag_p99_ms']:.2f}",
            f"{probe['client_cpu_us_per_chunk']:.2f}",
            "" if probe["held"] else "not held",
        ]
        for probe in report["ceiling_probes"]
    ]
    yield Table(["offered/s", "chunks/s", "per read", "lag p99", "us/chunk", ""], rows)
    processes = f"{report['client_processes']} processes of the client"
    met = report["ceiling_chunks_per_s"]
    found = "no pace held" if met is None else f"{met:,.0f} chunks/s"
    yield f"ceiling: {found}, {processes}, {report['mock_processes']} of the mock"

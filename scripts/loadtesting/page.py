"""The HTML report: one file that opens anywhere, without a script or a request to the outside.

It says in the first line whether the run is valid, then what was measured, then the plots, then
under which conditions, so that a page that is passed on still says what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loadtesting.plots import Groups, draw_all
from loadtesting.run import Run
from loadtesting.table import MEANINGS, STATISTICS, knee_text, lines_of

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff; margin: 0 auto;
       max-width: 66rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.sub { color: #57606a; margin: .2rem 0 1rem; }
.verdict { display: inline-block; padding: .15rem .6rem; border-radius: 1rem; font-weight: 600; }
.ok { background: #dafbe1; color: #116329; } .bad { background: #ffebe9; color: #a40e26; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; }
.tile { border: 1px solid #d8dee4; border-radius: .5rem; padding: .6rem .9rem; min-width: 8.5rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span { color: #57606a; font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #eaeef2;
         font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child, td.note { text-align: left; }
td.note { color: #57606a; white-space: normal; }
thead th { color: #57606a; font-weight: 600; border-bottom-color: #d8dee4; }
img { width: 100%; height: auto; } pre { font-size: .8rem; overflow-x: auto; background: #f6f8fa;
padding: .8rem; border-radius: .5rem; }
"""


def make_page(report: Mapping[str, Any], runs: Sequence[Run]) -> str:
    groups = group_runs(report, runs)
    title = "Load test of " + " and ".join(dict.fromkeys(run.name for run in runs))
    body = "".join([*heading(title, report), *summary(report, runs), *images(report, runs, groups)])
    details = "".join(conditions(runs)) + full_text(report)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body>{body}{details}</body></html>\n"
    )


def group_runs(report: Mapping[str, Any], runs: Sequence[Run]) -> Groups:
    """One group per colour of the plots: a rate of a knee search, else a server."""
    groups: dict[str, list[Run]] = {}
    if "probes" in report:
        for run in sorted(runs, key=lambda run: run.report["conditions"]["request_rate"]):
            rate = run.report["conditions"]["request_rate"]
            groups.setdefault(f"{rate:.3g}/s", []).append(run)
        return groups
    if "b_over_a" in report:
        half = len(runs) // 2
        return {f"A, {runs[0].name}": runs[:half], f"B, {runs[-1].name}": runs[half:]}
    return {runs[0].name: runs}


def shown_run(report: Mapping[str, Any], runs: Sequence[Run]) -> Run:
    """At the knee, if there is one; else the first."""
    knee = report.get("knee_requests_per_s")
    at_knee = [run for run in runs if run.report["conditions"]["request_rate"] == knee]
    return (at_knee or list(runs))[0]


def heading(title: str, report: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1><p class=sub>"
    if not report["valid"]:
        yield '<span class="verdict bad">invalid: the client itself was late</span>'
    elif report["num_failed"]:
        yield f'<span class="verdict bad">{report["num_failed"]} requests failed</span>'
    else:
        yield '<span class="verdict ok">valid, no request failed</span>'
    yield "</p>"


# ---- Figures -------------------------------------------------------------------------------------


def summary(report: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    if "b_over_a" in report:
        yield from ab_table(report)
    elif "probes" in report:
        yield from knee_table(report)
    elif "over_seeds" in report:
        yield from seed_table(report)
    else:
        yield from run_tables(runs[0].report)


def tile(value: str, meaning: str) -> str:
    return f"<div class=tile><b>{escape(value)}</b><span>{escape(meaning)}</span></div>"


def run_tables(report: Mapping[str, Any]) -> Iterator[str]:
    latency, steady = report["latency_ms"], report["steady"]
    yield "<div class=tiles>"
    yield tile(f"{report['num_requests']:,}", "requests")
    yield tile(f"{report['output_tokens_per_s']:,.0f}", "output tokens/s, whole run")
    if steady:
        yield tile(f"{steady['output_tokens_per_s']:,.0f}", "output tokens/s, steady window")
    for name, text in (("ttft_from_intended", "first chunk, from due"), ("tpot", "per token")):
        if spread := latency[name]:
            value = f"{spread['median']:,.1f} / {spread['p99']:,.1f}"
            yield tile(value, f"ms {text}, median / p99")
    if "goodput" in report:
        yield tile(f"{report['goodput']['requests_per_s']:.2f}", "requests/s that met the SLOs")
    yield tile(f"{report['client_lag_p99_ms']:.2f}", "ms, lag of the client, p99")
    yield "</div><h2>Latencies of the whole run, ms</h2>"
    yield latency_table(latency)
    if steady:
        yield f"<h2>Latencies of the steady window, {steady['from_s']:.1f} to "
        yield f"{steady['to_s']:.1f} s, {steady['num_requests']} requests, ms</h2>"
        yield latency_table(steady["latency_ms"])


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; the last column is a note if its heading is empty."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = []
    for row in body:
        classes = ["" if name else " class=note" for name in head]
        classes[0] = ""
        pairs = zip(classes, row, strict=True)
        lines.append("<tr>" + "".join(f"<td{c}>{escape(v)}</td>" for c, v in pairs) + "</tr>")
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def latency_table(latency: Mapping[str, Any]) -> str:
    body = []
    for name, spread in latency.items():
        values = [f"{spread[s]:,.2f}" if spread else "-" for s in STATISTICS]
        body.append([name, *values, MEANINGS[name]])
    return rows(["figure", *STATISTICS, ""], body)


def bounds(found: Mapping[str, float | None]) -> str:
    return "-" if found["low"] is None else f"{found['low']:,.4g} to {found['high']:,.4g}"


def seed_table(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>Means of {report['num_seeds']} seeds</h2>"
    body = [[n, f"{f['mean']:,.5g}", bounds(f)] for n, f in report["over_seeds"].items()]
    yield rows(["figure", "mean", "95 % confidence interval"], body)


def ab_table(report: Mapping[str, Any]) -> Iterator[str]:
    sides = [report[side]["over_seeds"] for side in ("a", "b")]
    yield f"<h2>Two servers in turn, {report['num_seeds']} seeds each</h2>"
    body = [
        [name, *(f"{side[name]['mean']:,.5g}" for side in sides), f"{f['mean']:.3f}", bounds(f)]
        for name, f in report["b_over_a"].items()
    ]
    yield rows(["figure", "A", "B", "B/A", "95 % confidence interval"], body)


def knee_table(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(knee_text(report))}</h2>"
    names = list(report["probes"][0])
    yield rows(names, [[cell(probe[name]) for name in names] for probe in report["probes"]])


def cell(value: float | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,.4g}"


# ---- Plots and conditions ------------------------------------------------------------------------


def images(report: Mapping[str, Any], runs: Sequence[Run], groups: Groups) -> Iterator[str]:
    if not any(not r.failure and not r.cancelled for run in runs for r in run.records):
        yield "<p>No request succeeded, so there is nothing to plot.</p>"
        return
    for title, uri in draw_all(groups, shown_run(report, runs)).items():
        yield f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="{uri}">'


def conditions(runs: Sequence[Run]) -> Iterator[str]:
    found = runs[0].report["conditions"]
    yield "<h2>Conditions of the first run</h2>"
    body = [[name, str(value)] for name, value in found.items() if value is not None]
    yield rows(["setting", ""], body)


def full_text(report: Mapping[str, Any]) -> str:
    return f"<h2>As printed</h2><pre>{escape(chr(10).join(lines_of(report)))}</pre>"

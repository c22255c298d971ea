"""The HTML report: one file that opens anywhere, without a script or a request to the outside.

It says in the first line whether the run is valid, then what was printed, then the plots, then
under which conditions, so that a page that is passed on still says what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loadtesting.plots import Groups, draw_all
from loadtesting.run import Run
from loadtesting.table import Table, blocks_of

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff; margin: 0 auto;
       max-width: 66rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.sub { color: #57606a; margin: .2rem 0 1rem; }
.verdict { display: inline-block; padding: .15rem .6rem; border-radius: 1rem; font-weight: 600; }
.ok { background: #dafbe1; color: #116329; } .bad { background: #ffebe9; color: #a40e26; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #eaeef2;
         font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child, td.note { text-align: left; }
td.note { color: #57606a; white-space: normal; }
thead th { color: #57606a; font-weight: 600; border-bottom-color: #d8dee4; }
img { width: 100%; height: auto; }
"""


def make_page(report: Mapping[str, Any], runs: Sequence[Run]) -> str:
    groups = group_runs(report, runs)
    title = "Load test of " + " and ".join(dict.fromkeys(run.name for run in runs))
    body = "".join([*heading(title, report), *summary(report), *images(report, runs, groups)])
    details = "".join(conditions(runs))
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


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """As it is printed, with tables as such."""
    for block in blocks_of(report):
        yield block.html() if isinstance(block, Table) else f"<p>{escape(block)}</p>"


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
    yield Table(["setting", ""], body).html()

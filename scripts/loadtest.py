#!/usr/bin/env python3
"""Load test of any OpenAI-compatible server over HTTP with streaming.

    loadtest.py --workload tput                     # against http://127.0.0.1:8000
    loadtest.py --request-rate 8 --input-len 1024 --output-len 128 --num-prompts 320
    loadtest.py --request-rate 4 --slo ttft:200,tpot:20 --find-knee --html knee.html
    loadtest.py --workload lat8 --ab-url http://127.0.0.1:8001 --num-seeds 5
    loadtest.py --serve-mock --port 9000            # to try it on
    loadtest.py --ceiling --processes 2             # what this client itself can take

A request's clock starts twice: when it was meant to go out and when it went. Both latencies are
shown, so a client or a queue that falls behind its schedule shows (coordinated omission). Token
counts come from the server's usage, not from counting chunks; a wrong count is a failed request.
The client measures its own lag and disowns a late run. On stdout one JSON line, the rest on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson

from loadtesting.ceiling import find_ceiling
from loadtesting.experiments import ab_report, interleave, repeat, repeat_report
from loadtesting.knee import find_knee, knee_report
from loadtesting.live import live_table
from loadtesting.mock_answer import MockSettings
from loadtesting.mock_server import serve_mock
from loadtesting.record import LoadTestError
from loadtesting.run import Run, run_once
from loadtesting.settings import WORKLOADS, Settings, above
from loadtesting.table import lines_of


def make_parser() -> argparse.ArgumentParser:
    """A flag that is not given is not in the result: the workload or the default fills it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--api-key", help="sent as bearer token, never printed")
    add("--json", type=Path, metavar="FILE", help="for the JSON line too")
    add("--html", type=Path, metavar="FILE", help="a report with plots (extra: bench)")
    add("--num-seeds", type=above(0), help="runs, for confidence intervals (1; with --ab-url 5)")
    add("--ab-url", help="a second server, run in turn with the first; prints the ratios")
    add("--find-knee", action="store_true", help="the highest rate that meets --slo")
    add("--probe-s", type=above(0, float), default=20.0, help="of one rate of it (20)")
    add("--knee-tolerance", type=above(0, float), default=0.05, help="where it ends (0.05)")
    add("--ceiling", action="store_true", help="of this client, against mock processes")
    add("--serve-mock", action="store_true", help="be the mock server instead")
    for f in (*fields(Settings), *fields(MockSettings)):
        add(f"--{f.name.replace('_', '-')}", **f.metadata)
    return parser


def pick(given: dict[str, Any], kind: type) -> dict[str, Any]:
    return {f.name: given[f.name] for f in fields(kind) if f.name in given}


def carry_out(given: dict[str, Any], settings: Settings) -> tuple[dict[str, Any], list[Run]]:
    """The report, and the runs behind it for the page."""

    vocab_sizes: dict[str, int | None] = {}  # by server, where the first run had to find it

    def run(asked: Settings) -> Run:
        if (known := vocab_sizes.get(asked.base_url)) is not None:
            asked = replace(asked, vocab_size=known)
        rate = f", {asked.request_rate:.3g} requests/s" if asked.request_rate < 1e9 else ""
        with live_table(f"{asked.base_url}, seed {asked.seed}{rate}") as watch:
            done = run_once(asked, given.get("api_key"), watch)
        vocab_sizes[asked.base_url] = done.report["conditions"]["vocab_size"]
        return done

    num = given.get("num_seeds", 5 if "ab_url" in given else 1)
    if given.get("ceiling"):
        return find_ceiling(settings, MockSettings(**pick(given, MockSettings)), run), []
    if given.get("find_knee"):
        knee, runs = find_knee(settings, given["probe_s"], given["knee_tolerance"], run)
        return knee_report(knee, runs), runs
    if "ab_url" in given:
        other = replace(settings, base_url=given["ab_url"])
        a, b = interleave(settings, other, num, run)
        return ab_report(a, b), [*a, *b]
    runs = repeat(settings, num, run)
    return repeat_report(runs), runs


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all requests succeeded, 1 some failed, 2 no run was possible."""
    given = vars(make_parser().parse_args(argv))
    if given.get("serve_mock"):
        serve_mock(MockSettings(**pick(given, MockSettings)))
    defaults = WORKLOADS.get(given.get("workload", ""), {})
    try:
        write_page = load_page() if "html" in given else None
        report, runs = carry_out(given, Settings(**(defaults | pick(given, Settings))))
    except LoadTestError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines_of(report)), file=sys.stderr)
    line = orjson.dumps(report).decode()
    print(line)
    if "json" in given:
        given["json"].write_text(line + "\n")
    if write_page is not None:
        given["html"].write_text(write_page(report, runs))
    return 1 if report["num_failed"] else 0


def load_page() -> Any:
    """Before the run, not after it: a missing matplotlib must not cost the figures."""
    try:
        from loadtesting.page import make_page
    except ImportError as error:
        raise LoadTestError(f"--html needs matplotlib (the extra bench): {error}") from error
    return make_page


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

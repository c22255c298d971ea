"""How many chunks a second this client takes before it measures itself: against the mock.

NUM_STREAMS open streams (few, so that the burst which opens them is no lag of its own), the mock's
pace raised until the client's loop lags or chunks come more than NEEDED_SHARE late in sum. The mock
has processes of its own; on a machine with fewer cores than both need, the figure is the machine's,
and `client_cpu_us_per_chunk` the client's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from loadtesting.experiments import RunOnce
from loadtesting.knee import search
from loadtesting.mock_answer import MockSettings
from loadtesting.mock_server import mock_processes
from loadtesting.run import Run
from loadtesting.settings import Settings

NUM_STREAMS = 64
PROBE_S = 3.0
START_CHUNKS_PER_S = 10_000.0
LEAST_CHUNKS_PER_S = 2_000.0
NEEDED_SHARE = 0.95
TOLERANCE = 0.1


def find_ceiling(settings: Settings, mock: MockSettings, run_once: RunOnce) -> dict[str, Any]:
    """The report of the fastest valid probe, with all probes' figures."""
    runs: list[tuple[float, Run]] = []

    def holds(chunks_per_s: float) -> bool:
        pace = chunks_per_s / NUM_STREAMS
        paced = replace(mock, port=0, tokens_per_second=pace)
        with mock_processes(paced) as url:
            load = replace(
                settings,
                base_url=url,
                model="mock",
                num_prompts=NUM_STREAMS,
                num_warmups=NUM_STREAMS,  # opens the connections
                max_concurrency=NUM_STREAMS,
                input_len=8,
                output_len=max(2, round(pace * PROBE_S)),
            )
            run = run_once(load)
        runs.append((chunks_per_s, run))
        held = bool(run.report["valid"]) and kept_up(run.report, chunks_per_s)
        print(f"{chunks_per_s:,.0f} chunks/s {'held' if held else 'not held'}", file=sys.stderr)
        return held

    knee = search(START_CHUNKS_PER_S, holds, TOLERANCE, LEAST_CHUNKS_PER_S)
    return {
        "valid": True,
        "ceiling_chunks_per_s": knee.met,
        "client_processes": settings.processes,
        "mock_processes": mock.mock_processes,
        "num_failed": sum(run.report["num_failed"] for _, run in runs),
        "ceiling_probes": [
            {"offered_chunks_per_s": offered, "held": knee.met is not None and offered <= knee.met}
            | {name: run.report[name] for name in SHOWN}
            for offered, run in sorted(runs, key=lambda pair: pair[0])
        ],
    }


SHOWN = ("chunks_per_s", "chunks_per_read", "client_lag_p99_ms", "client_cpu_share",
         "client_cpu_us_per_chunk")  # fmt: skip


def kept_up(report: dict[str, Any], chunks_per_s: float) -> bool:
    """The median time between chunks' mean is what the mock was told."""
    spread = report["latency_ms"]["tpot"]
    return spread is not None and spread["mean"] <= NUM_STREAMS / chunks_per_s * 1e3 / NEEDED_SHARE

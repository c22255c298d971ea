"""The plots of the page: each an SVG as a data URI, drawn by matplotlib without a display.

A group is what one colour shows: a server, or one rate of a knee search. Curves are drawn through
at most MAX_POINTS quantiles, so a page stays small however long the run was.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtesting.measure import latencies_s, steady_span
from loadtesting.record import Record
from loadtesting.run import Run

Groups = Mapping[str, Sequence[Run]]

MAX_POINTS = 400
NUM_BINS = 60
LOG_ABOVE = 5.0  # largest over smallest: a log scale
SUBS_BELOW = 1000.0  # with ticks at 2 and 5 too
SHORTEST_MS = 0.01
COLOURS = ("#1f6feb", "#d1495b", "#2a9d5c", "#8a4fbf", "#c77700", "#00838f")
INK = "#24292f"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c4c9d0",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "grid.color": "#e8ebef",
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "loadtest",  # the same run draws the same file
}
CDFS = (
    ("time to first chunk", "ttft_from_sent", "ttft_from_intended", "from due"),
    ("time per output token", "tpot", None, ""),
    (
        f"between chunks ({SHORTEST_MS}: read together)",
        "itl_per_chunk",
        "itl_per_token",
        "per token",
    ),
    ("end to end", "e2e_from_sent", "e2e_from_intended", "from due"),
)


def data_uri(figure: Figure) -> str:
    file = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", bbox_inches="tight", metadata=metadata)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def draw_all(groups: Groups, shown: Run) -> dict[str, str]:
    """By title; `shown` is the run whose course over time is drawn."""
    with mpl.rc_context(STYLE):
        return {
            "Latency distributions": data_uri(draw_cdfs(groups)),
            f"Course of the run: {shown.name}, seed {shown.report['conditions']['seed']}": data_uri(
                draw_timeline(shown)
            ),
            "Throughput against latency": data_uri(draw_tradeoff(groups)),
        }


def colour(place: int, num: int) -> str:
    """A few fixed ones, else a scale from the first group to the last."""
    if num <= len(COLOURS):
        return COLOURS[place]
    red, green, blue, _ = mpl.colormaps["viridis"](0.9 * place / (num - 1))
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def timed_records(runs: Sequence[Run]) -> list[Record]:
    return [r for run in runs for r in run.records if not (r.failure or r.cancelled or r.slow)]


# ---- Distributions -------------------------------------------------------------------------------


def draw_cdfs(groups: Groups) -> Figure:
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2).flat
    found = {label: latencies_s(timed_records(runs)) for label, runs in groups.items()}
    for axis, (title, solid, dashed, dashed_label) in zip(axes, CDFS, strict=True):
        for place, (label, values_s) in enumerate(found.items()):
            made = colour(place, len(groups))
            draw_cdf(axis, values_s[solid], made, "-", label)
            several = len(groups) > 2  # too many lines to follow
            if dashed is not None and not several and differs(values_s[solid], values_s[dashed]):
                draw_cdf(axis, values_s[dashed], made, "--", f"{label}, {dashed_label}")
        axis.set_title(title)
        axis.set_ylabel("share of requests" if "chunks" not in title else "share of gaps")
        axis.set_ylim(0, 1.01)
        scale_milliseconds(axis)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7.5, loc="lower right")
    return figure


def scale_milliseconds(axis: Axes) -> None:
    """A log scale where values differ much, its ticks written 1,000, not 10^3."""
    low, high = axis.dataLim.intervalx
    axis.set_xlabel("milliseconds")
    if not 0 < low * LOG_ABOVE < high:
        return
    axis.set_xlabel("milliseconds (log scale)")
    axis.set_xscale("log")
    subs = (1.0, 2.0, 5.0) if high < low * SUBS_BELOW else (1.0,)
    axis.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=subs, numticks=12))
    axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())


def differs(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    return len(b) > 0 and (len(a) != len(b) or not np.allclose(a, b, atol=1e-4))


def draw_cdf(axis: Axes, values_s: np.ndarray, made: str, style: str, label: str) -> None:
    """A time of zero (two chunks of one read) is drawn at SHORTEST_MS."""
    values_s = values_s[~np.isnan(values_s)]
    if not len(values_s):
        return
    shares = np.linspace(0, 1, min(len(values_s), MAX_POINTS))
    quantiles_ms = np.maximum(np.quantile(values_s, shares) * 1e3, SHORTEST_MS)
    axis.plot(quantiles_ms, shares, style, color=made, label=label)


# ---- Course over time ----------------------------------------------------------------------------


def draw_timeline(run: Run) -> Figure:
    """Throughput, requests in flight, first chunks; the steady window shaded."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    start_s = run.span.start_s
    edges_s = np.linspace(0, run.span.end_s - start_s, NUM_BINS + 1)
    records = [r for r in run.records if not (r.failure or r.cancelled)]

    top.stairs(token_rate(records, edges_s + start_s), edges_s, fill=True, color="#9cc3f7")
    top.set_ylabel("output tokens/s")
    top.set_title("tokens by the time their chunk was read")

    changes = [(r.sent_s - start_s, 1) for r in run.records]
    changes += [(r.end_s - start_s, -1) for r in run.records]
    times_s, steps = np.array(sorted(changes)).T
    middle.step(times_s, np.cumsum(steps), where="post", color=COLOURS[0])
    middle.set_ylabel("requests")
    middle.set_title("sent and not ended")

    sent_s = np.array([r.intended_s for r in records]) - start_s
    first_ms = np.array([r.chunk_times_s[0] - r.intended_s for r in records]) * 1e3
    bottom.plot(
        sent_s, first_ms, ".", color=COLOURS[1], markersize=3.5, rasterized=len(sent_s) > 3000
    )
    bottom.set_ylabel("milliseconds")
    bottom.set_ylim(0, first_ms.max() * 1.1)
    bottom.set_title("first chunk after a request was due, at the time it was due")
    bottom.set_xlabel("seconds after the start")
    if (steady := steady_span(run.records)) is not None:
        for axis in (top, middle, bottom):
            axis.axvspan(
                steady.start_s - start_s, steady.end_s - start_s, color="#2a9d5c", alpha=0.07
            )
        middle.set_title("sent and not ended (green: the steady window)")
    return figure


def token_rate(records: Sequence[Record], edges_s: np.ndarray) -> np.ndarray:
    """[bins] output tokens a second; a request's tokens lie evenly on its chunks."""
    times_s = np.concatenate([np.empty(0), *(r.chunk_times_s for r in records)])
    shares = [r.num_output_tokens / len(r.chunk_times_s) for r in records]
    weights = np.repeat(shares, [len(r.chunk_times_s) for r in records])
    counts, _ = np.histogram(times_s, edges_s, weights=weights)
    return counts / np.diff(edges_s)


# ---- Throughput against latency ------------------------------------------------------------------


def draw_tradeoff(groups: Groups) -> Figure:
    """A point per run; of a single run, a point per slice of its time."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = [run for group in groups.values() for run in group]
    if len(runs) == 1:
        draw_slices(left, right, runs[0])
    else:
        for axis, name in ((left, "ttft_from_intended"), (right, "tpot")):
            draw_points(axis, groups, name)
    left.set_title("time to first chunk, from due")
    right.set_title("time per output token" if len(runs) > 1 else "median between chunks")
    for axis in (left, right):
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel("milliseconds")
        axis.set_ylim(0, max(axis.dataLim.y1, 1e-3) * 1.15)
        axis.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
    return figure


def draw_points(axis: Axes, groups: Groups, name: str) -> None:
    knee = len(groups) > 2
    for statistic, marker in (("median", "o"), ("p99", "^")):
        columns = []
        for place, (label, runs) in enumerate(groups.items()):
            spreads = [
                (r.report["output_tokens_per_s"], r.report["latency_ms"][name]) for r in runs
            ]
            points = [(x, spread[statistic]) for x, spread in spreads if spread]
            columns += points
            made = colour(place, len(groups))
            if points:
                axis.plot(*np.array(points).T, marker, color=made, markersize=6,
                          label=f"{label}, {statistic}" if not knee else None)  # fmt: skip
        if knee and columns:
            axis.plot(*np.array(columns).T, "-", color="#8b949e", linewidth=0.8, zorder=1)
            axis.plot(
                [], [], marker, color="#57606a", label=f"{statistic}; a point per rate, in order"
            )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7.5)


def draw_slices(left: Axes, right: Axes, run: Run) -> None:
    """NUM_BINS slices of one run: tokens/s in each against latencies in it."""
    edges_s = np.linspace(run.span.start_s, run.span.end_s, NUM_BINS + 1)
    records = timed_records([run])
    rates = token_rate(records, edges_s)
    gaps_s = np.concatenate([np.empty(0), *(np.diff(r.chunk_times_s) for r in records)])
    ends_s = np.concatenate([np.empty(0), *(r.chunk_times_s[1:] for r in records)])
    firsts_s = np.array([r.chunk_times_s[0] for r in records])
    waits_s = firsts_s - np.array([r.intended_s for r in records])
    for axis, at_s, values_s in ((left, firsts_s, waits_s), (right, ends_s, gaps_s)):
        places = np.digitize(at_s, edges_s) - 1
        points = [
            (rates[i], float(np.median(values_s[places == i])) * 1e3)
            for i in range(NUM_BINS)
            if (places == i).any()
        ]
        if points:
            label = f"a {edges_s[1] - edges_s[0]:.2g} s slice of the run, median"
            xs, ys = np.array(points).T
            axis.plot(xs, ys, "o", color=COLOURS[0], alpha=0.6, markersize=5, label=label)
            axis.legend(fontsize=7.5)

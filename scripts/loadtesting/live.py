"""The live table, drawn by the parent: the processes that send only count.

Rates are of the last interval between two looks. Nothing is drawn where stderr is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from loadtesting.client import Counter
from loadtesting.record import now
from loadtesting.run import Watch

try:
    import rich.console
    import rich.live
    import rich.table
except ImportError:  # the extra `bench`; without it a run is silent until its end
    CAN_DRAW = False
else:
    CAN_DRAW = True


class Look(NamedTuple):
    at_s: float
    totals: list[int]  # by Counter


def add_up(counters: Sequence[Sequence[int]]) -> list[int]:
    return [sum(row[place] for row in counters) for place in Counter]


def draw(title: str, start_s: float, before: Look, look: Look) -> rich.table.Table:
    elapsed_s = max(look.at_s - before.at_s, 1e-9)
    rates = [(new - old) / elapsed_s for new, old in zip(look.totals, before.totals, strict=True)]
    sent, done, failed = look.totals[:3]
    table = rich.table.Table(title=title, title_justify="left")
    for name in ("seconds", "done", "in flight", "failed", "done/s", "reads/s", "MB/s"):
        table.add_column(name, justify="right", min_width=8)
    style = "red" if failed else None
    table.add_row(
        f"{look.at_s - start_s:.0f}",
        f"{done:,}",
        f"{sent - done:,}",
        f"{failed:,}",
        f"{rates[Counter.DONE]:,.1f}",
        f"{rates[Counter.READS]:,.0f}",
        f"{rates[Counter.BYTES] / 1e6:,.2f}",
        style=style,
    )
    return table


@contextmanager
def live_table(title: str) -> Iterator[Watch]:
    if not CAN_DRAW or not sys.stderr.isatty():
        yield lambda counters: None
        return
    start_s = now()
    look = Look(start_s, [0] * len(Counter))
    console = rich.console.Console(stderr=True)
    with rich.live.Live(console=console, auto_refresh=False, transient=True) as live:

        def watch(counters: Sequence[Sequence[int]]) -> None:
            nonlocal look
            before, look = look, Look(now(), add_up(counters))
            live.update(draw(title, start_s, before, look), refresh=True)

        yield watch

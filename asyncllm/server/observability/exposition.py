"""Text for /metrics that is rendered once, and into which each scrape fills the numbers.

prometheus_client renders sample by sample, 4 us each, on the event loop that also streams tokens;
this takes 0.1 us a sample. The format is simple and settled; a test reads ours back with
prometheus_client's own parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncllm.engine.recorder import Histogram, Recorder
from asyncllm.engine.stats import SchedulerStats
from asyncllm.mesh_config import RankStats
from asyncllm.worker.work_counts import WorkCounts

Labels = Mapping[str, str]


@dataclass(slots=True, frozen=True)
class Source:
    """One scrape's view of one engine."""

    stats: SchedulerStats
    recorder: Recorder
    work: WorkCounts
    loop_cpu_seconds: float
    is_up: int
    ranks: Sequence[RankStats]


Read = Callable[[Source], float]


class Exposition:
    """Series of one prefix, each for every engine: `engines` has the labels of each."""

    def __init__(self, prefix: str, engines: Sequence[Labels]) -> None:
        self._prefix = prefix
        self._engines = engines
        self._template = ""
        # Which engine's, and its values.
        self._readers: list[tuple[int, Callable[[Source], Iterable[object]]]] = []

    def add(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        help_text: str,
        *samples: tuple[Labels, Read],
    ) -> None:
        """A counter's name gets `_total` added."""
        full = name + "_total" if kind == "counter" else name
        self._head(kind, full, help_text)
        for i, engine in enumerate(self._engines):
            for labels, read in samples:
                self._sample(full, {**engine, **labels})
                self._readers.append((i, lambda source, read=read: (read(source),)))  # type: ignore[misc]

    def add_histogram(
        self,
        name: str,
        help_text: str,
        bounds: Sequence[float],
        *samples: tuple[Labels, Callable[[Recorder], Histogram]],
    ) -> None:
        """`bounds`: those of all its samples."""
        self._head("histogram", name, help_text)
        for i, engine in enumerate(self._engines):
            for labels, find in samples:
                own = {**engine, **labels}
                for bound in [*map(repr, bounds), "+Inf"]:
                    self._sample(f"{name}_bucket", {**own, "le": bound})
                self._sample(f"{name}_count", own)
                self._sample(f"{name}_sum", own)
                self._readers.append((i, lambda s, find=find: _values(find(s.recorder))))  # type: ignore[misc]

    def render(self, sources: Sequence[Source]) -> str:
        values: list[object] = []
        for i, read in self._readers:
            values += read(sources[i])
        return self._template % tuple(values)

    def _head(self, kind: str, name: str, help_text: str) -> None:
        full = f"{self._prefix}:{name}"
        help_text = help_text.replace("%", "%%")
        self._template += f"# HELP {full} {help_text}\n# TYPE {full} {kind}\n"

    def _sample(self, name: str, labels: Labels) -> None:
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in sorted(labels.items()))
        self._template += f"{self._prefix}:{name}{{{text}}} %s\n"


def _values(histogram: Histogram) -> list[object]:
    counts = histogram.cumulative()
    return [*counts, counts[-1], histogram.total]


def _escape(value: str) -> str:
    """A label's value, and for the template."""
    text = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text.replace("%", "%%")

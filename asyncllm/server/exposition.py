"""Prometheus' text format with the text rendered once: a scrape only fills in the numbers.

prometheus_client renders sample by sample, 4 us each, on the event loop that also streams tokens;
one `%` over a template takes 0.1 us a sample. The format is simple and settled; a test reads ours
back with prometheus_client's own parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Literal, TypeVar

from asyncllm.engine.histogram import Histogram

S = TypeVar("S")  # what the values are read from, at a scrape

Labels = Mapping[str, str]


class Exposition(Generic[S]):
    """Series of one prefix; `labels` are on each of them."""

    def __init__(self, prefix: str, labels: Labels) -> None:
        self._prefix = prefix
        self._labels = dict(labels)
        self._template = ""
        self._readers: list[Callable[[S], Iterable[object]]] = []

    def add(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        help_text: str,
        *samples: tuple[Labels, Callable[[S], float]],
    ) -> None:
        """A counter's name gets `_total` added."""
        full = name + "_total" if kind == "counter" else name
        self._head(kind, full, help_text)
        for labels, read in samples:
            self._sample(full, labels)
            self._readers.append(lambda source, read=read: (read(source),))  # type: ignore[misc]

    def add_histogram(self, name: str, help_text: str, *samples: tuple[Labels, Histogram]) -> None:
        self._head("histogram", name, help_text)
        for labels, histogram in samples:
            for bound in [*map(repr, histogram.bounds), "+Inf"]:
                self._sample(f"{name}_bucket", {**labels, "le": bound})
            self._sample(f"{name}_count", labels)
            self._sample(f"{name}_sum", labels)
            self._readers.append(lambda _, histogram=histogram: _values(histogram))  # type: ignore[misc]

    def render(self, source: S) -> str:
        values: list[object] = []
        for read in self._readers:
            values += read(source)
        return self._template % tuple(values)

    def _head(self, kind: str, name: str, help_text: str) -> None:
        full = f"{self._prefix}:{name}"
        help_text = help_text.replace("%", "%%")
        self._template += f"# HELP {full} {help_text}\n# TYPE {full} {kind}\n"

    def _sample(self, name: str, labels: Labels) -> None:
        pairs = sorted({**self._labels, **labels}.items())
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in pairs)
        self._template += f"{self._prefix}:{name}{{{text}}} %s\n"


def _values(histogram: Histogram) -> list[object]:
    counts = histogram.cumulative()
    return [*counts, counts[-1], histogram.total]


def _escape(value: str) -> str:
    """A label's value, and for the template."""
    text = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text.replace("%", "%%")

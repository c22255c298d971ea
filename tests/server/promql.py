"""As much of PromQL as the dashboard uses, read and evaluated: a query is an expression of series.

Rates need two scrapes. Unknown functions, labels or syntax are errors, so that a query which this
accepts is one whose every part was understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(
    r"""\s*(?:(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?)"""
    r"""|(?P<text>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<op>=~|!=|[-+*/(){},=]))"""
)
Key = tuple[tuple[str, str], ...]  # labels, sorted
Vector = dict[Key, float]


@dataclass
class Scrape:
    """Samples by name, and the type of each name's family."""

    samples: dict[str, Vector] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, **labels: str) -> Scrape:
        """`labels`: those that Prometheus adds to a target's samples."""
        scrape = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = tuple(sorted({**sample.labels, **labels}.items()))
                scrape.samples.setdefault(sample.name, {})[key] = sample.value
                scrape.types[sample.name] = family.type
        return scrape


class Query:
    """Evaluates one expression. `seconds` lie between the scrapes `before` and `after`."""

    def __init__(self, expr: str, before: Scrape, after: Scrape, seconds: float) -> None:
        self._tokens = list(_tokens(expr))
        self._before, self._after, self._seconds = before, after, seconds
        self.selected: list[str] = []  # names of series

    def run(self) -> Vector:
        value = self._sum()
        assert not self._tokens, f"left over: {self._tokens}"
        assert isinstance(value, dict), "a number, not a vector"
        return value

    def _sum(self) -> Vector | float:
        value = self._product()
        while self._peek() == "+":
            self._take("+")
            value = _combine(value, self._product(), lambda a, b: a + b)
        return value

    def _product(self) -> Vector | float:
        value = self._term()
        while self._peek() == "/":
            self._take("/")
            value = _combine(value, self._term(), lambda a, b: a / b if b else float("nan"))
        return value

    def _term(self) -> Vector | float:
        token = self._tokens.pop(0)
        if token == "(":
            value = self._sum()
            self._take(")")
            return value
        if token[0].isdigit():
            return float(token)
        if token in ("sum", "avg", "max"):
            return self._aggregate(token)
        if token == "histogram_quantile":
            return self._quantile()
        if token == "rate":
            self._take("(")
            value = self._selector(self._tokens.pop(0), is_range=True)
            self._take(")")
            return value
        return self._selector(token, is_range=False)

    def _aggregate(self, how: str) -> Vector:
        by: list[str] = []
        if self._peek() == "by":
            self._take("by")
            by = self._names()
        self._take("(")
        value = self._sum()
        self._take(")")
        assert isinstance(value, dict)
        groups: dict[Key, list[float]] = {}
        for key, number in value.items():
            labels = dict(key)
            assert all(name in labels for name in by), f"no label {by} in {labels}"
            groups.setdefault(tuple(sorted((n, labels[n]) for n in by)), []).append(number)
        reduce = {"sum": sum, "max": max, "avg": lambda xs: sum(xs) / len(xs)}[how]
        return {key: reduce(numbers) for key, numbers in groups.items()}

    def _quantile(self) -> Vector:
        self._take("(")
        share = self._term()
        self._take(",")
        buckets = self._sum()
        self._take(")")
        assert isinstance(share, float) and 0 <= share <= 1 and isinstance(buckets, dict)
        series: dict[Key, list[tuple[float, float]]] = {}
        for key, number in buckets.items():
            bound = float(dict(key)["le"])
            rest = tuple(pair for pair in key if pair[0] != "le")
            series.setdefault(rest, []).append((bound, number))
        found = {}
        for key, pairs in series.items():
            pairs.sort()
            assert pairs[-1][0] == float("inf"), "no +Inf bucket"
            wanted = share * pairs[-1][1]
            found[key] = next(bound for bound, number in pairs if number >= wanted)
        return found

    def _selector(self, name: str, is_range: bool) -> Vector:
        self.selected.append(name)
        assert name in self._after.samples, f"no series {name}"
        matchers = self._matchers() if self._peek() == "{" else []
        if not is_range:
            assert self._after.types[name] == "gauge", f"{name} is no gauge: it needs a rate"
            return _match(self._after.samples[name], matchers)
        window = self._tokens.pop(0)
        assert window == "[$__rate_interval]", window
        assert self._after.types[name] in ("counter", "histogram"), f"a rate of a gauge: {name}"
        before = _match(self._before.samples[name], matchers)
        after = _match(self._after.samples[name], matchers)
        return {key: (after[key] - before.get(key, 0.0)) / self._seconds for key in after}

    def _matchers(self) -> list[tuple[str, str, str]]:
        self._take("{")
        found = []
        while self._peek() != "}":
            label, op, text = (self._tokens.pop(0) for _ in range(3))
            assert op in ("=", "=~", "!="), op
            found.append((label, op, text.strip('"')))
            if self._peek() == ",":
                self._take(",")
        self._take("}")
        return found

    def _names(self) -> list[str]:
        self._take("(")
        names = [self._tokens.pop(0)]
        while self._peek() == ",":
            self._take(",")
            names.append(self._tokens.pop(0))
        self._take(")")
        return names

    def _peek(self) -> str | None:
        return self._tokens[0] if self._tokens else None

    def _take(self, token: str) -> None:
        assert self._tokens and self._tokens[0] == token, f"{token} expected: {self._tokens[:3]}"
        self._tokens.pop(0)


def _tokens(expr: str) -> Iterator[str]:
    place = 0
    while place < len(expr.rstrip()):
        match = TOKEN.match(expr, place)
        assert match is not None, f"not understood: {expr[place:]}"
        yield match.group().strip()
        place = match.end()


def _match(vector: Vector, matchers: list[tuple[str, str, str]]) -> Vector:
    for key in vector:
        for label, _, _ in matchers:
            assert label in dict(key), f"no label {label} in {dict(key)}"
    found = {key: v for key, v in vector.items() if all(_fits(dict(key), m) for m in matchers)}
    assert found, f"nothing matches {matchers}"
    return found


def _fits(labels: dict[str, str], matcher: tuple[str, str, str]) -> bool:
    label, op, wanted = matcher
    if wanted.startswith("$"):
        return True  # a dashboard's variable: anything
    if op == "=~":
        return re.fullmatch(wanted, labels[label]) is not None
    return (labels[label] == wanted) == (op == "=")


def _combine(left: Vector | float, right: Vector | float, operate) -> Vector:  # type: ignore[no-untyped-def]
    assert isinstance(left, dict) and isinstance(right, dict)
    assert left.keys() == right.keys(), f"labels differ: {left.keys()} and {right.keys()}"
    return {key: operate(left[key], right[key]) for key in left}

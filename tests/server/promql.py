"""Runs PromQL on two scrapes: promql-parser reads it, as much as the dashboard uses is evaluated.

Series, labels and types that are not there, and divisions of vectors with other labels, are errors:
in Prometheus they would be an empty panel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import promql_parser as ast
from prometheus_client.parser import text_string_to_metric_families

Key = tuple[tuple[str, str], ...]  # labels, sorted
Vector = dict[Key, float]

OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "/": lambda a, b: a / b if b else float("nan"),
}
AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "avg": lambda numbers: sum(numbers) / len(numbers),
}


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
    """One expression. `seconds` lie between the scrapes; a dashboard's variables match anything."""

    def __init__(self, expr: str, before: Scrape, after: Scrape, seconds: float) -> None:
        self._expr = ast.parse(expr.replace("$__rate_interval", "1m"))
        self._before, self._after, self._seconds = before, after, seconds
        self.selected: list[str] = []  # names of series

    def run(self) -> Vector:
        return self._vector(self._expr)

    def _vector(self, expr: Any) -> Vector:
        match expr:
            case ast.ParenExpr():
                return self._vector(expr.expr)
            case ast.BinaryExpr():
                left, right = self._vector(expr.lhs), self._vector(expr.rhs)
                assert left.keys() == right.keys(), f"labels differ: {[*left]} and {[*right]}"
                operate = OPERATORS[str(expr.op)]
                return {key: operate(left[key], right[key]) for key in left}
            case ast.AggregateExpr():
                return self._aggregate(expr)
            case ast.Call() if expr.func.name == "rate":
                return self._rate(expr.args[0].vector_selector)
            case ast.Call() if expr.func.name == "histogram_quantile":
                return _quantile(expr.args[0].val, self._vector(expr.args[1]))
            case ast.VectorSelector():
                assert self._after.types.get(expr.name) == "gauge", f"{expr.name} is no gauge"
                return self._select(expr, self._after)
        raise AssertionError(f"not understood: {expr}")

    def _aggregate(self, expr: Any) -> Vector:
        by = expr.modifier.labels if expr.modifier is not None else []
        groups: dict[Key, list[float]] = {}
        for key, number in self._vector(expr.expr).items():
            labels = dict(key)
            groups.setdefault(tuple(sorted((name, labels[name]) for name in by)), []).append(number)
        return {key: AGGREGATES[str(expr.op)](numbers) for key, numbers in groups.items()}

    def _rate(self, selector: Any) -> Vector:
        kind = self._after.types.get(selector.name)
        assert kind in ("counter", "histogram"), f"a rate of {selector.name}, a {kind}"
        before, after = (self._select(selector, scrape) for scrape in (self._before, self._after))
        return {key: (after[key] - before[key]) / self._seconds for key in after}

    def _select(self, selector: Any, scrape: Scrape) -> Vector:
        self.selected.append(selector.name)
        found = dict(scrape.samples[selector.name])
        for matcher in selector.matchers.matchers:
            wanted = ".*" if matcher.value.startswith("$") else matcher.value
            assert matcher.op in (ast.MatchOp.Equal, ast.MatchOp.Re), matcher.op
            found = {k: v for k, v in found.items() if re.fullmatch(wanted, dict(k)[matcher.name])}
        assert found, f"nothing matches {selector}"
        return found


def _quantile(share: float, buckets: Vector) -> Vector:
    """The upper bound of the bucket that holds it."""
    series: dict[Key, list[tuple[float, float]]] = {}
    for key, number in buckets.items():
        rest = tuple(pair for pair in key if pair[0] != "le")
        series.setdefault(rest, []).append((float(dict(key)["le"]), number))
    found = {}
    for key, pairs in series.items():
        pairs.sort()
        assert pairs[-1][0] == float("inf"), "no +Inf bucket"
        found[key] = next(bound for bound, number in pairs if number >= share * pairs[-1][1])
    return found

"""The results of `model_matrix.py`, and the page docs/model_matrix.md that shows them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

TOLERANCE = 1e-3  # of log-probabilities


class Results(NamedTuple):
    """(verdict, details) by class, with one version of transformers."""

    version: str
    rows: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, file: Path) -> Results:
        content = json.loads(file.read_text())
        return cls(content["transformers"], {n: (r[0], r[1]) for n, r in content["rows"].items()})

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({"transformers": self.version, "rows": self.rows}, indent=1))


SERVED = {"native": "native", "by backend": "transformers' code"}
HEADER = """\
# Models

What `scripts/model_matrix.py` found for every class in the causal-LM table of
transformers {version}: tiny random weights, served in float32 on the CPU in chunks and batches,
with prefix hits and preemption, against transformers' own `generate` (log-probabilities within
{tolerance}). "native" is our model code; "transformers' code" is the library's over our pages,
which `--model-impl transformers` takes for native classes, too. What is not served is refused at
the start, with class, field and value. Where an index chooses tokens for sparse attention, the
class is served up to the `max_model_len` of which it chooses all. Made by the script: do not edit.

{counts}{beside}

| class | served by | why not |
| --- | --- | --- |
"""


BESIDE = """
## transformers {version}

Of {number} classes that were examined with it: {counts} {differ}

| class | served by | why not |
| --- | --- | --- |
"""


def markdown(results: Results, other: Results | None = None) -> str:
    """The page, with the classes that differ in another version of transformers."""
    rows, beside, end = results.rows, "", ""
    if other is not None:
        beside = f" With transformers {other.version}, the oldest that is served: below."
        both = rows.keys() & other.rows.keys()
        changed = sorted(n for n in both if _served(*rows[n]) != _served(*other.rows[n]))
        differ = "These differ:" if changed else "None differs."
        end = BESIDE.format(
            version=other.version, number=len(other.rows), counts=counts(other), differ=differ
        ) + _table(other, changed)
    header = HEADER.format(
        version=results.version, tolerance=TOLERANCE, counts=counts(results), beside=beside
    )
    return header + _table(results, sorted(rows)) + end


def _served(verdict: str, details: str) -> str:
    return SERVED.get(verdict, "-")


def counts(results: Results) -> str:
    counts = Counter(SERVED.get(verdict, verdict) for verdict, _ in results.rows.values())
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "."


def _table(results: Results, names: list[str]) -> str:
    return "".join(f"| {name} | {_cells(name, *results.rows[name])} |\n" for name in names)


def _cells(name: str, verdict: str, details: str) -> str:
    if verdict in SERVED:
        return f"{SERVED[verdict]} | "
    reason = (
        details.replace(f"architectures {name!r} ", "")
        .removesuffix(", which is not served")
        .removesuffix(": not served")
    )
    return f"- | {verdict}: {' '.join(reason.replace('|', '/').split())[:160]}"

"""What one field of a request means: its words, its range, and whether it does anything."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["done", "ignored", "refused"]
_KIND_WORDS = {
    "done": "",
    "ignored": "Accepted and ignored: it does not change the answer.",
    "refused": "Refused where it asks for anything.",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """`schema`: JSON Schema keywords beside the type's; `type`: what a field typed `Any` takes."""

    text: str
    kind: Kind = "done"
    schema: dict[str, Any] = dataclasses.field(default_factory=dict)
    type: Any = None

    @property
    def description(self) -> str:
        return f"{_KIND_WORDS[self.kind]} {self.text}".strip()


def between(low: float | None, high: float | None, text: str, **more: Any) -> Note:
    limits = {"minimum": low, "maximum": high}
    return Note(text, schema={k: v for k, v in limits.items() if v is not None} | more)


def ignored(text: str = "") -> Note:
    return Note(text, "ignored")


def refused(text: str = "") -> Note:
    return Note(text, "refused")

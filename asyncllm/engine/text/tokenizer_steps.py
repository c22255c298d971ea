"""What the parts of a tokenizer do, one after the other, as the library's own JSON."""

from __future__ import annotations

import json
from typing import Any


def steps_of(part: Any, name: str) -> list[dict]:
    """Of a pre-tokenizer or a decoder, of which a sequence calls its steps `name`; [] of None."""
    if part is None:
        return []
    # The pickled state is that JSON. `to_str()` holds it too, with megabytes of vocabulary around.
    state = json.loads(part.__getstate__())
    steps: list[dict] = state[name] if state["type"] == "Sequence" else [state]
    return steps

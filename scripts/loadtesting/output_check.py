"""Does the server under load still say what it says when idle?

The first requests of the load are sent again, one at a time, at temperature 0, and the texts are
compared. A difference is reported, not failed: other batch shapes may round a near tie otherwise.
Many of them, or early ones, mean that answers are mixed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loadtesting.client import Client, open_session
from loadtesting.record import LoadTestError, Record, Request
from loadtesting.settings import Settings


async def reference_texts(
    settings: Settings, api_key: str | None, requests: Sequence[Request]
) -> dict[int, str]:
    """By the request's index."""
    texts = {}
    async with open_session(settings, api_key) as session:
        client = Client(settings, session, session)
        for request in (replace(r, cancel_after=None, slow=False) for r in requests):
            (_, capture), *_ = await client.converse([request], None)
            record = client.digest(capture, request, with_text=True)
            if record.failure is not None:
                raise LoadTestError(f"no reference answer: {': '.join(record.failure)}")
            texts[request.number] = record.text or ""
    return texts


def compare(texts: dict[int, str], records: Sequence[Record]) -> dict[str, Any]:
    """first_difference is of the answer that differs earliest, in characters."""
    answered = [r for r in records if r.number in texts and not (r.failure or r.cancelled)]
    places = {
        r.number: shared_length(r.text or "", texts[r.number])
        for r in answered
        if (r.text or "") != texts[r.number]
    }
    earliest = min(places, key=lambda index: places[index]) if places else None
    return {
        "num_checked": len(answered),
        "num_equal": len(answered) - len(places),
        "first_difference": None
        if earliest is None
        else {"request": earliest, "char": places[earliest]},
    }


def shared_length(a: str, b: str) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

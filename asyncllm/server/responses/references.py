"""Items of kept responses that one request names instead of sending them.

A reference is small and what it names is not, so what all of them bring is held to the limit of a
body, however often each is named; a response is read once for all of its items.
"""

from __future__ import annotations

from typing import Any

import orjson

from asyncllm.server.errors import bad_request
from asyncllm.server.responses.protocol import ResponsesRequest
from asyncllm.server.responses.store import ResponseStore


def names_kept_items(request: ResponsesRequest) -> bool:
    """Whether more than the body is to be read: a conversation before it, or items named."""
    given = request.input if isinstance(request.input, list) else []
    return request.previous_response_id is not None or any(map(_is_reference, given))


def _is_reference(item: dict[str, Any]) -> bool:
    return "role" not in item and item.get("type") in (None, "item_reference")


class References:
    """Of one request; `max_bytes` of items in all."""

    def __init__(self, store: ResponseStore, owner: bytes, max_bytes: int) -> None:
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: dict[str, dict[str, dict[str, Any]]] = {}  # by response, by id

    def find(self, name: str) -> dict[str, Any] | None:
        """An item by its id, which holds that of its response. Raises `ApiError` for too many."""
        parts = name.split("_")
        item = self._items_of(f"resp_{parts[1]}").get(name) if len(parts) == 3 else None
        if item is not None:
            self._num_bytes += len(orjson.dumps(item))
            if self._num_bytes > self._max_bytes:
                limit = f"the limit of {self._max_bytes} bytes"
                raise bad_request(f"the items that input refers to are over {limit}", "input")
        return item

    def _items_of(self, response_id: str) -> dict[str, dict[str, Any]]:
        if response_id not in self._items:
            response = self._store.get(response_id, self._owner)
            items = [] if response is None else response.items()
            self._items[response_id] = {item["id"]: item for item in items}
        return self._items[response_id]

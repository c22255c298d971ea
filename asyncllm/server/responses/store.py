"""Responses kept for `previous_response_id` and GET: the least recently used go first.

Bounded three ways: `max_bytes` in all (a flag), MAX_RESPONSES, and IDLE_SECONDS without use. What
is kept is JSON as bytes, so the count is exact and nothing is shared with what a handler changes.
A response is found only with the credential that it was made with. Using one uses all before it in
its conversation, so a conversation in use loses its beginning last. Large requests are read
in a thread, so each change is made under a lock.

A reference to a kept item is small and the item is not: what all `References` of a request bring is
held to the limit of a body, however often each is named; a response is read once for all its items.

A deleted response is found no more. While later ones of its conversation are kept it stays as a
part of theirs, since what they answered to has not been deleted.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from asyncllm.server.http.errors import bad_request
from asyncllm.server.responses.protocol import ResponsesRequest

MAX_RESPONSES = 10_000
MAX_TURNS = 1024  # of one conversation
IDLE_SECONDS = 24 * 3600.0
ENTRY_BYTES = 1024  # what an entry costs beside its two texts


@dataclass(slots=True)
class StoredResponse:
    owner: bytes
    body: bytes  # as GET returns it
    input_items: bytes  # JSON list
    previous_id: str | None
    used_at: float = 0.0
    num_next: int = 0  # kept responses that continue it
    is_running: bool = False  # in the background: `body` is what it is so far
    is_deleted: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items) + ENTRY_BYTES

    def items(self) -> list[dict[str, Any]]:
        """Input items, then output items."""
        found: list[dict[str, Any]] = orjson.loads(self.input_items)
        return found + orjson.loads(self.body)["output"]


class LostTurnError(LookupError):
    """A response that the conversation is built on is not there."""


class ResponseStore:
    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep it, if it fits at all, at the cost of others, but of none that runs."""
        if response.num_bytes > self._max_bytes:
            return
        with self._lock:
            response.used_at = self._clock()
            self._kept[name] = response
            self.num_bytes += response.num_bytes
            if (previous := self._previous(response)) is not None:
                previous.num_next += 1
            self._make_room(name)

    def end(self, name: str, body: bytes) -> None:
        """A running one, if it is still kept."""
        with self._lock:
            if (response := self._kept.get(name)) is not None:
                self.num_bytes += len(body) - len(response.body)
                response.body, response.is_running = body, False
                self._make_room(name)

    def get(self, name: str, owner: bytes) -> StoredResponse | None:
        with self._lock:
            response = self._use(name, owner)
            return None if response is None or response.is_deleted else response

    def _use(self, name: str, owner: bytes) -> StoredResponse | None:
        """A deleted one too."""
        self._drop_idle()
        response = self._kept.get(name)
        if response is None or response.owner != owner:
            return None
        response.used_at = self._clock()
        self._kept.move_to_end(name)
        return response

    def delete(self, name: str, owner: bytes) -> bool:
        with self._lock:
            response = self.get(name, owner)
            if response is None:
                return False
            response.is_deleted = True
            if not response.num_next:
                self._drop(name)
            return True

    def conversation(self, name: str, owner: bytes) -> list[StoredResponse]:
        """The responses that led to `name`, and it, oldest first. Raises `LostTurnError`."""
        turns: list[StoredResponse] = []
        before: str | None = name
        while before is not None and len(turns) < MAX_TURNS:
            with self._lock:
                response = self._use(before, owner)
            if response is None or (response.is_deleted and not turns):
                raise LostTurnError(before)
            turns.append(response)
            before = response.previous_id
        if before is not None:
            raise LostTurnError(before)
        return turns[::-1]

    def _make_room(self, newest: str) -> None:
        """One that runs is to be found by who cancels it: where all others run, `newest` goes."""
        while self.num_bytes > self._max_bytes or len(self._kept) > MAX_RESPONSES:
            ended = (name for name, response in self._kept.items() if not response.is_running)
            self._drop(next(ended, newest))

    def _drop_idle(self) -> None:
        too_old = self._clock() - IDLE_SECONDS
        while self._kept and next(iter(self._kept.values())).used_at < too_old:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        """With it go the deleted ones before it that nothing else continues."""
        before: str | None = name
        while before is not None:
            response = self._kept.pop(before)
            self.num_bytes -= response.num_bytes
            previous = self._previous(response)
            if previous is None:
                return
            previous.num_next -= 1
            is_wanted = previous.num_next or not previous.is_deleted
            before = None if is_wanted else response.previous_id

    def _previous(self, response: StoredResponse) -> StoredResponse | None:
        return None if response.previous_id is None else self._kept.get(response.previous_id)


def names_kept_items(request: ResponsesRequest) -> bool:
    """Whether more than the body is read: a conversation before it, or referenced items."""
    given = request.input if isinstance(request.input, list) else []
    return request.previous_response_id is not None or any(map(_is_reference, given))


def _is_reference(item: dict[str, Any]) -> bool:
    return "role" not in item and item.get("type") in (None, "item_reference")


class References:
    """The references of one request; `max_bytes` of items in all."""

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

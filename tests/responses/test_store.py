"""All that is kept is bounded, counted exactly, and belongs to who made it."""

from __future__ import annotations

import random
from dataclasses import replace

import orjson
import pytest

from asyncllm.server.http.errors import ApiError
from asyncllm.server.responses import store as store_module
from asyncllm.server.responses.store import (
    ENTRY_BYTES,
    IDLE_SECONDS,
    LostTurnError,
    References,
    ResponseStore,
    StoredResponse,
)

OWNER = b"me"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def response(
    size: int = 100, previous: str | None = None, owner: bytes = OWNER, items: bytes = b"[]"
) -> StoredResponse:
    body = orjson.dumps({"output": [{"id": "msg_a_0", "text": "x" * size}]})
    return StoredResponse(owner, body, items, previous)


def find(store: ResponseStore, name: str, owner: bytes = OWNER) -> object:
    return References(store, owner, 10**9).find(name)


def test_the_least_recently_used_goes_first() -> None:
    size = response().num_bytes
    store = ResponseStore(3 * size)
    for name in "abc":
        store.put(name, response())
    assert store.get("a", OWNER) is not None
    store.put("d", response())
    assert store.get("b", OWNER) is None
    assert [name for name in "acd" if store.get(name, OWNER)] == ["a", "c", "d"]
    assert store.num_bytes == 3 * size


def test_what_runs_is_not_dropped() -> None:
    """It could be cancelled no more. Another one that runs is not kept where all others do."""
    store = ResponseStore(3 * response().num_bytes)
    for name in "abc":
        store.put(name, replace(response(), is_running=name < "c"))
    store.put("d", replace(response(), is_running=True))
    assert [name for name in "abcd" if store.get(name, OWNER)] == ["a", "b", "d"]
    store.put("e", replace(response(), is_running=True))
    store.put("f", response())
    assert [name for name in "abdef" if store.get(name, OWNER)] == ["a", "b", "d"]
    store.end("b", response().body)
    store.put("g", response())
    assert [name for name in "abdg" if store.get(name, OWNER)] == ["a", "d", "g"]
    assert store.num_bytes == 3 * response().num_bytes


def test_what_can_never_fit_costs_nobody_anything() -> None:
    store = ResponseStore(2 * ENTRY_BYTES)
    store.put("a", response(10))
    store.put("b", response(5000))
    assert store.get("a", OWNER) is not None and store.get("b", OWNER) is None
    nothing = ResponseStore(0)
    nothing.put("a", response(0))
    assert len(nothing) == nothing.num_bytes == 0


def test_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 5)
    store = ResponseStore(10**9)
    for number in range(9):
        store.put(str(number), response())
    assert len(store) == 5 and store.get("3", OWNER) is None


def test_what_nobody_uses_goes() -> None:
    clock = Clock()
    store = ResponseStore(10**9, clock)
    store.put("a", response())
    store.put("b", response())
    clock.now += IDLE_SECONDS * 0.7
    assert store.get("a", OWNER) is not None
    clock.now += IDLE_SECONDS * 0.7
    assert store.get("b", OWNER) is None
    assert store.get("a", OWNER) is not None and len(store) == 1


def test_a_conversation_keeps_its_beginning_as_long_as_it_goes_on() -> None:
    size = response(previous="x").num_bytes
    store = ResponseStore(4 * size)
    store.put("a", response())
    store.put("b", response(previous="a"))
    store.put("other", response())
    assert [turn.previous_id for turn in store.conversation("b", OWNER)] == [None, "a"]
    store.put("c", response(previous="b"))
    store.put("d", response(previous="c"))  # in place of `other`, which is older than a and b now
    assert store.get("other", OWNER) is None
    assert len(store.conversation("d", OWNER)) == 4
    store._drop("b")
    with pytest.raises(LostTurnError, match="b"):
        store.conversation("d", OWNER)


def test_a_conversation_has_a_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_TURNS", 3)
    store = ResponseStore(10**9)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "c")):
        store.put(name, response(previous=previous))
    assert len(store.conversation("c", OWNER)) == 3
    with pytest.raises(LostTurnError):
        store.conversation("d", OWNER)


def test_another_owner_finds_nothing() -> None:
    store = ResponseStore(10**9)
    store.put("resp_a", response())
    assert store.get("resp_a", b"you") is None and find(store, "msg_a_0", b"you") is None
    assert not store.delete("resp_a", b"you")
    with pytest.raises(LostTurnError):
        store.conversation("resp_a", b"you")
    assert find(store, "msg_a_0") is not None
    assert find(store, "msg_a_1") is find(store, "nonsense") is None


def test_what_is_referred_to_is_bounded_however_often() -> None:
    store = ResponseStore(10**9)
    store.put("resp_a", response(1000))
    references = References(store, OWNER, 2500)
    assert references.find("msg_a_0") is references.find("msg_a_0")
    with pytest.raises(ApiError, match="2500") as refused:
        references.find("msg_a_0")
    assert (refused.value.status, refused.value.param) == (400, "input")


def test_bytes_are_counted_through_everything() -> None:
    rng = random.Random(7)
    clock = Clock()
    store = ResponseStore(40_000, clock)
    for number in range(3000):
        name = str(rng.randrange(60))
        action = rng.random()
        if action < 0.5:
            previous = rng.choice([None, *store._kept])
            store.put(f"{name}-{number}", response(rng.randrange(3000), previous))
        elif action < 0.7:
            store.delete(next(iter(store._kept), ""), OWNER)
        else:
            store.get(next(reversed(store._kept), ""), OWNER)
        clock.now += rng.choice((0, 1, IDLE_SECONDS / 20))
        assert store.num_bytes == sum(kept.num_bytes for kept in store._kept.values()) <= 40_000
        previous_ids = [kept.previous_id for kept in store._kept.values()]
        for kept_name, kept in store._kept.items():
            assert kept.num_next == previous_ids.count(kept_name)
            assert kept.num_next or not kept.is_deleted
        used = [kept.used_at for kept in store._kept.values()]
        assert used == sorted(used)


def test_what_is_deleted_in_a_conversation_is_not_found_and_the_conversation_goes_on() -> None:
    store = ResponseStore(10**6)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
        store.put(name, response(previous=previous))
    assert store.delete("a", OWNER) and store.delete("b", OWNER)
    assert store.get("b", OWNER) is None and not store.delete("b", OWNER)
    with pytest.raises(LostTurnError):
        store.conversation("b", OWNER)
    assert len(store.conversation("c", OWNER)) == 3
    assert store.delete("c", OWNER)
    assert len(store.conversation("d", OWNER)) == 3
    assert store.delete("d", OWNER)
    assert not len(store) and not store.num_bytes

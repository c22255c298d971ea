"""Where requests go: by affinity, by load, and in random worlds against a slow oracle."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from asyncllm.engine.data_parallel.router import (
    OVERLOAD_FACTOR,
    RUNNING_LOAD,
    SLACK_LOAD,
    SPAN_TOKENS,
    Placement,
    Router,
)
from tests.waiting import PATIENCE_SECONDS

PLENTY = 1 << 20  # tokens


def prompt(name: int, num_spans: int, num_rest: int = 0) -> list[int]:
    """Two of one name begin alike; of two names no span is."""
    return [name * 1000 + i % 997 for i in range(num_spans * SPAN_TOKENS + num_rest)]


def placed(router: Router, token_ids: list[int], key: bytes = b"") -> Placement:
    placement = router.place(token_ids, key)
    assert placement is not None
    return placement


def test_the_same_prompt_goes_where_its_blocks_are() -> None:
    router = Router([PLENTY] * 4)
    first = placed(router, prompt(1, 4))
    router.ended(first)
    for name in range(2, 6):
        router.ended(placed(router, prompt(name, 4)))
    again = placed(router, prompt(1, 6))
    assert (again.rank, again.num_cached_tokens) == (first.rank, 4 * SPAN_TOKENS)
    assert again.load == RUNNING_LOAD + 2 * SPAN_TOKENS
    other = placed(router, prompt(1, 6), key=b"salt")
    assert other.num_cached_tokens == 0 and other.rank != again.rank


def test_prompts_of_nobody_go_to_the_least_loaded() -> None:
    router = Router([PLENTY] * 3)
    assert [placed(router, prompt(i, 2)).rank for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_an_overloaded_holder_is_left_by_a_named_factor() -> None:
    router = Router([PLENTY] * 2)
    held = [placed(router, prompt(1, 8))]
    router.begun(held[0])
    assert held[0].rank == 0
    while (placement := placed(router, prompt(1, 8))).rank == 0:
        held.append(placement)
        router.begun(placement)
    before = router.load(0)
    assert before > SLACK_LOAD >= before - RUNNING_LOAD  # beside an idle engine
    router.ended(placement)
    # The other holds it too by now: what is less loaded takes it.
    assert placed(router, prompt(1, 8)).rank == 1
    assert OVERLOAD_FACTOR > 1


def test_a_shorter_prefix_elsewhere_is_better_than_none() -> None:
    router = Router([PLENTY] * 3)
    deep = placed(router, prompt(1, 8))  # 0 holds eight spans, 1 two of them
    router.close(0)
    shallow = placed(router, prompt(1, 2))
    router.open(0)
    assert (deep.rank, shallow.rank) == (0, 1)
    for _ in range(40):
        router._loads[0] += RUNNING_LOAD
    assert placed(router, prompt(1, 8)).rank == 1


def test_who_is_closed_gets_nothing() -> None:
    router = Router([PLENTY] * 2)
    first = placed(router, prompt(1, 4))
    router.close(first.rank)
    assert placed(router, prompt(1, 4)).rank != first.rank
    router.close(1 - first.rank)
    assert router.place(prompt(1, 4)) is None
    router.open(first.rank)
    assert placed(router, prompt(9, 4)).rank == first.rank


def test_a_reset_cache_is_forgotten() -> None:
    router = Router([PLENTY] * 2)
    first = placed(router, prompt(1, 4))
    router.forget(first.rank)
    router.check_integrity()
    assert placed(router, prompt(1, 4)).num_cached_tokens == 0


def test_a_cache_forgets_what_was_not_used() -> None:
    router = Router([8 * SPAN_TOKENS])
    for name in (1, 2):
        router.ended(placed(router, prompt(name, 4)))
    router.ended(placed(router, prompt(1, 4)))
    router.ended(placed(router, prompt(3, 2)))  # takes the tail of 2
    assert placed(router, prompt(2, 4)).num_cached_tokens == 2 * SPAN_TOKENS
    router.check_integrity()


class Oracle:
    """The same policy, by whole prompts instead of spans and masks; nothing is ever forgotten."""

    def __init__(self, num_ranks: int) -> None:
        self.seen: list[list[tuple[bytes, list[int]]]] = [[] for _ in range(num_ranks)]
        self.loads = [0] * num_ranks
        self.open = set(range(num_ranks))

    def depth(self, rank: int, token_ids: list[int], key: bytes) -> int:
        """Spans at the start that some prompt of that engine began with."""
        most = 0
        for other_key, other in self.seen[rank]:
            same = 0
            for a, b in zip(token_ids, other, strict=False):
                if a != b:
                    break
                same += 1
            most = max(most, same // SPAN_TOKENS if other_key == key else 0)
        return most

    def place(self, token_ids: list[int], key: bytes) -> tuple[int, int] | None:
        if not self.open:
            return None
        depths = {rank: self.depth(rank, token_ids, key) for rank in self.open}
        least = min(self.loads[rank] for rank in self.open)
        for depth in sorted({*depths.values(), 0}, reverse=True):
            holders = [rank for rank in sorted(self.open) if depths[rank] >= depth]
            rank = min(holders, key=lambda r: self.loads[r])
            if self.loads[rank] <= max(OVERLOAD_FACTOR * least, least + SLACK_LOAD):
                self.seen[rank].append((key, token_ids))
                return rank, depth
        raise AssertionError("the least loaded is never overloaded")


@pytest.mark.parametrize("seed", range(20))
def test_random_worlds(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 6)
    router, oracle = Router([PLENTY] * num_ranks), Oracle(num_ranks)
    live: list[Placement] = []
    for _ in range(300):
        match rng.choice(("place", "place", "place", "begin", "end", "end", "gate", "forget")):
            case "place":
                key = rng.choice((b"", b"salt"))
                tokens = prompt(rng.randint(1, 4), rng.randint(0, 9), rng.randint(0, 63))
                placement, expected = router.place(tokens, key), oracle.place(tokens, key)
                found = placement and (placement.rank, placement.num_cached_tokens // SPAN_TOKENS)
                assert found == expected
                if placement is not None:
                    oracle.loads[placement.rank] += placement.load
                    live.append(placement)
            case "begin" if live:
                placement = rng.choice(live)
                oracle.loads[placement.rank] -= placement.load - RUNNING_LOAD
                router.begun(placement)
            case "end" if live:
                placement = live.pop(rng.randrange(len(live)))
                oracle.loads[placement.rank] -= placement.load
                router.ended(placement)
            case "gate":
                rank = rng.randrange(num_ranks)
                if rng.random() < 0.6:
                    router.open(rank)
                    oracle.open.add(rank)
                else:
                    router.close(rank)
                    oracle.open.discard(rank)
            case "forget" if rng.random() < 0.1:
                rank = rng.randrange(num_ranks)
                router.forget(rank)
                oracle.seen[rank].clear()
        assert [router.load(rank) for rank in range(num_ranks)] == oracle.loads
    router.check_integrity()
    for placement in live:
        router.ended(placement)
    assert all(router.load(rank) == 0 for rank in range(num_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_nor_drowns(seed: int) -> None:
    """All clients send the same prompt: no engine has more than its bound above the least."""
    rng, router = random.Random(seed), Router([PLENTY] * 4)
    live: list[Placement] = []
    for _ in range(2000):
        placement = placed(router, prompt(1, 8))
        live.append(placement)
        router.begun(placement)
        while len(live) > 150:
            router.ended(live.pop(rng.randrange(len(live))))
        loads = [router.load(rank) for rank in range(4)]
        most = max(OVERLOAD_FACTOR * min(loads), min(loads) + SLACK_LOAD)
        assert max(loads) <= most + 8 * SPAN_TOKENS + RUNNING_LOAD * 2
    assert min(loads) > 0


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; import asyncllm.engine.data_parallel.router; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)

"""Pages and blocks: who holds which page, what stays findable, what is evicted first."""

from __future__ import annotations

import pytest

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.page_pool import PagePool
from asyncllm.types import Sequence
from tests.engine.builders import make_sequence, pages_of

SIZE = 4  # tokens per page


def admit(blocks: BlockManager, seq: Sequence) -> list[tuple[int, int]]:
    """Give `seq` its pages, and say that they are computed."""
    num_cached = blocks.prefixes.match(seq)
    swap_in = blocks.admit(seq, num_cached)
    assert swap_in is not None
    seq.num_computed = seq.num_prefill = len(seq.token_ids)
    blocks.publish(seq)
    blocks.check_integrity()
    return swap_in


def num_cached(blocks: BlockManager, prompt: list[int]) -> int:
    """Blocks of `prompt` that a new sequence would find; forgotten at once."""
    probe = make_sequence(999, [*prompt, 0])
    found = blocks.prefixes.match(probe)
    blocks.forget(probe)
    return found


# --- the pool ------------------------------------------------------------------------------------


def test_pages_are_taken_in_the_order_of_their_freeing() -> None:
    pool = PagePool(3, first=1)
    assert [*pool.take(1), *pool.take(2)] == [1, 2, 3]
    for page in (2, 3, 1):
        pool.publish([page], [bytes([page])])
        pool.release([page])
    assert [*pool.take(2), *pool.take(1)] == [2, 3, 1]


def test_pages_without_a_hash_are_taken_before_any_with_one() -> None:
    pool = PagePool(3)
    pages = pool.take(3)
    pool.publish([0], [b"worth keeping"])
    pool.release(pages)
    assert set(pool.take(2)) == {1, 2}
    assert pool.find(b"worth keeping") == 0
    assert pool.take(1) == [0]
    assert pool.find(b"worth keeping") is None


def test_a_free_page_is_revived_with_its_content() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.publish([page], [b"h"])
    pool.release([page])
    assert pool.is_free(page) and pool.find(b"h") == page
    pool.share(page)
    assert pool.num_used == 1 and not pool.is_shared(page)
    pool.share(page)
    assert pool.is_shared(page)
    assert pool.take(1) != [page]
    pool.check_integrity({page: 2, 1 - page: 1})


def test_the_first_page_published_under_a_hash_stays_the_one() -> None:
    pool = PagePool(3)
    first, second = pool.take(2)
    pool.publish([first, second], [b"h", b"h"])
    assert pool.find(b"h") == first and second not in pool._hash_of
    pool.release([second])
    assert pool.take(1) == [second], "a duplicate is worth nothing"
    assert pool.find(b"h") == first


def test_the_pool_refuses_misuse() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1)
    with pytest.raises(AssertionError, match="empty pool"):
        pool.take(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([page])
    with pytest.raises(AssertionError, match="published while free"):
        pool.publish([page], [b"h"])
    with pytest.raises(AssertionError, match="counted 0, held by 1"):
        pool.check_integrity({page: 1})


# --- the prefix cache ----------------------------------------------------------------------------


def test_a_finished_sequences_full_blocks_are_found_again() -> None:
    blocks = BlockManager(10, SIZE)
    first = make_sequence(1, range(10))
    admit(blocks, first)
    pages = pages_of(blocks, first)
    blocks.forget(first)
    blocks.check_empty()
    assert blocks.device.num_used == 0

    second = make_sequence(2, range(10))
    admit(blocks, second)
    assert pages_of(blocks, second)[:2] == pages[:2]


def test_the_last_token_is_always_left_to_compute() -> None:
    blocks = BlockManager(10, SIZE)
    admit(blocks, make_sequence(1, range(8)))
    assert blocks.prefixes.match(make_sequence(2, range(8))) == 1
    assert blocks.prefixes.match(make_sequence(3, range(9))) == 2


def test_a_prompt_is_hashed_only_up_to_its_first_miss() -> None:
    blocks = BlockManager(100, SIZE)
    admit(blocks, make_sequence(1, range(8)))
    seq = make_sequence(2, [*range(8), *range(100, 200)])
    assert blocks.prefixes.match(seq) == 2
    assert len(blocks._hashes.known(seq)) == 3, "27 blocks, the third is unknown"


def test_a_block_is_found_only_after_the_same_blocks_and_under_the_same_key() -> None:
    blocks = BlockManager(10, SIZE)
    admit(blocks, make_sequence(1, [1] * 4 + [2] * 4))
    assert num_cached(blocks, [1] * 4 + [2] * 4) == 2
    assert num_cached(blocks, [3] * 4 + [2] * 4) == 0
    assert num_cached(blocks, [2] * 4) == 0
    salted = make_sequence(2, [1] * 9, cache_key=b"salt")
    assert blocks.prefixes.match(salted) == 0


def test_only_what_is_computed_is_published() -> None:
    blocks = BlockManager(10, SIZE)
    seq = make_sequence(1, range(12))
    blocks.admit(seq, blocks.prefixes.match(seq))
    assert num_cached(blocks, list(range(12))) == 0
    seq.num_computed = 7
    blocks.publish(seq)
    assert num_cached(blocks, list(range(12))) == 1
    blocks.free(seq)
    assert num_cached(blocks, list(range(12))) == 1, "the rest was never computed"


def test_tails_are_evicted_first() -> None:
    blocks = BlockManager(3, SIZE)
    prompt = list(range(12))
    seq = make_sequence(1, prompt)
    admit(blocks, seq)
    blocks.forget(seq)
    for left in (2, 1, 0):
        blocks.device.take(1)
        assert num_cached(blocks, prompt) == left


def test_a_shared_block_outlives_its_first_owner() -> None:
    blocks = BlockManager(6, SIZE)
    first, second = make_sequence(1, range(9)), make_sequence(2, range(9))
    admit(blocks, first)
    admit(blocks, second)
    assert blocks.device.num_used == 4, "two shared, one each"
    blocks.forget(first)
    blocks.check_integrity()
    assert blocks.device.num_used == 3
    blocks.forget(second)
    blocks.check_empty()


def test_admission_never_evicts_what_it_matched() -> None:
    blocks = BlockManager(3, SIZE)
    first = make_sequence(1, range(9))
    admit(blocks, first)
    pages = pages_of(blocks, first)
    blocks.forget(first)
    second = make_sequence(2, range(12))
    num_matched = blocks.prefixes.match(second)
    assert num_matched == 2
    assert blocks.admit(second, num_matched, num_spared=1) is None, "it takes all three"
    blocks.admit(second, num_matched)
    assert pages[:2] == pages_of(blocks, second)[:2]
    assert len(set(pages_of(blocks, second))) == 3


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(10, SIZE, enable_prefix_caching=False)
    admit(blocks, make_sequence(1, range(9)))
    assert blocks.prefixes.match(make_sequence(2, range(9))) == 0


def test_a_reset_forgets_all_blocks() -> None:
    blocks = BlockManager(10, SIZE)
    seq = make_sequence(1, range(9))
    admit(blocks, seq)
    blocks.forget(seq)
    blocks.reset_prefix_cache()
    assert num_cached(blocks, list(range(9))) == 0
    blocks.check_empty()


@pytest.mark.parametrize("reset_while", ["running", "swapped"])
def test_blocks_from_before_a_reset_are_never_published_again(reset_while: str) -> None:
    """A live sequence keeps its pages, but they are of the old weights: nobody may find them."""
    blocks = BlockManager(10, SIZE, num_host_pages=10)
    prompt = list(range(12))
    seq, child = make_sequence(1, prompt), make_sequence(2, prompt)
    admit(blocks, seq)
    if reset_while == "swapped":
        blocks.swap_out(seq)
    blocks.reset_prefix_cache()
    if reset_while == "running":
        blocks.fork(seq, child)
        child.num_computed = 12
        blocks.publish(child)
        blocks.swap_out(seq)
    blocks.admit(seq)
    blocks.publish(seq)
    blocks.check_integrity()
    assert num_cached(blocks, prompt) == 0


# --- forks ---------------------------------------------------------------------------------------


def test_forks_share_pages_until_one_writes() -> None:
    blocks = BlockManager(10, SIZE)
    parent, child = make_sequence(1, range(6)), make_sequence(2, range(6))
    admit(blocks, parent)
    blocks.fork(parent, child)
    child.num_computed = 6
    blocks.check_integrity()
    full, half = pages_of(blocks, parent)
    assert pages_of(blocks, child) == [full, half]

    assert blocks.missing_blocks(child, 7) == [(0, 1)]
    (append,), copies = blocks.reserve(child, [(0, 1)])
    assert copies == [(half, append.block_id)] and append.block_index == 1
    assert pages_of(blocks, child) == [full, append.block_id]
    assert pages_of(blocks, parent) == [full, half]
    assert not blocks.missing_blocks(parent, 7), "the last holder writes in place"
    blocks.check_integrity()


def test_a_new_page_needs_no_copy() -> None:
    blocks = BlockManager(10, SIZE)
    parent, child = make_sequence(1, range(8)), make_sequence(2, range(8))
    admit(blocks, parent)
    blocks.fork(parent, child)
    child.num_computed = 8
    assert blocks.missing_blocks(child, 9) == [(0, 2)]
    (append,), copies = blocks.reserve(child, [(0, 2)])
    assert not copies and append.block_index == 2


def test_a_fork_outlives_its_parent() -> None:
    blocks = BlockManager(10, SIZE)
    parent, child = make_sequence(1, range(6)), make_sequence(2, range(6))
    admit(blocks, parent)
    blocks.fork(parent, child)
    blocks.forget(parent)
    blocks.check_integrity()
    child.num_computed = 6
    assert not blocks.missing_blocks(child, 7)
    blocks.forget(child)
    blocks.check_empty()


# --- swapping ------------------------------------------------------------------------------------


def test_swapping_out_and_in() -> None:
    blocks = BlockManager(3, SIZE, num_host_pages=3)
    seq = make_sequence(1, range(10))
    admit(blocks, seq)
    pages = pages_of(blocks, seq)
    assert blocks.can_swap_out(seq)
    out = blocks.swap_out(seq)
    assert [page for page, _ in out] == pages
    assert blocks.device.num_used == 0 and blocks.host.num_used == 3
    blocks.check_integrity()

    for _ in range(3):  # the device's copies are gone
        blocks.device.release(blocks.device.take(1))
    blocks.device.release(blocks.device.take(3))
    assert blocks.admit(seq, num_spared=1) is None, "it takes all three"
    back = blocks.admit(seq)
    assert back is not None
    assert [host_page for host_page, _ in back] == [host_page for _, host_page in out]
    assert [page for _, page in back] == pages_of(blocks, seq)
    assert blocks.host.num_used == 0
    blocks.check_integrity()


def test_what_is_still_on_the_device_is_not_copied_back() -> None:
    blocks = BlockManager(5, SIZE, num_host_pages=5)
    seq = make_sequence(1, range(10))
    admit(blocks, seq)
    pages = pages_of(blocks, seq)
    blocks.swap_out(seq)
    assert len(blocks.admit(seq) or ()) == 1, "only the half page, which has no hash"
    assert pages_of(blocks, seq)[:2] == pages[:2]


def test_what_the_host_holds_already_is_not_copied_out() -> None:
    blocks = BlockManager(10, SIZE, num_host_pages=10)
    first, second = make_sequence(1, range(10)), make_sequence(2, range(10))
    admit(blocks, first)
    admit(blocks, second)
    assert len(blocks.swap_out(first)) == 3
    assert len(blocks.swap_out(second)) == 1
    assert blocks.host.num_used == 4
    blocks.forget(first)
    blocks.forget(second)
    blocks.check_integrity()
    blocks.check_empty()


def test_a_new_sequence_finds_swapped_blocks_on_the_host() -> None:
    blocks = BlockManager(3, SIZE, num_host_pages=3)
    seq = make_sequence(1, range(10))
    admit(blocks, seq)
    blocks.swap_out(seq)
    blocks.device.release(blocks.device.take(3))
    second = make_sequence(2, range(10))
    assert blocks.prefixes.match(second) == 2
    swap_in = admit(blocks, second)
    assert len(swap_in) == 2, "the device holds none of them"
    assert [page for _, page in swap_in] == pages_of(blocks, second)[:2]
    assert num_cached(blocks, list(range(8))) == 2, "findable on the device again"
    blocks.check_integrity()


def test_a_swapped_prefill_gets_all_its_pages_back() -> None:
    blocks = BlockManager(5, SIZE, num_host_pages=5)
    seq = make_sequence(1, range(18))
    blocks.admit(seq, blocks.prefixes.match(seq))
    seq.num_prefill, seq.num_computed = 18, 6
    assert len(blocks.swap_out(seq)) == 2, "what is not computed need not be kept"
    assert blocks.admit(seq, num_spared=1) is None, "it takes all five"
    blocks.admit(seq)
    assert len(pages_of(blocks, seq)) == 5
    blocks.check_integrity()


def test_a_full_host_refuses_to_swap() -> None:
    blocks = BlockManager(5, SIZE, num_host_pages=2)
    seq = make_sequence(1, range(10))
    admit(blocks, seq)
    assert not blocks.can_swap_out(seq)


def test_a_swap_needs_host_pages_only_for_what_is_computed() -> None:
    blocks = BlockManager(5, SIZE, num_host_pages=2)
    seq = make_sequence(1, range(18))
    blocks.admit(seq, blocks.prefixes.match(seq))
    seq.num_prefill, seq.num_computed = 18, 6
    assert blocks.can_swap_out(seq)
    blocks.swap_out(seq)
    blocks.check_integrity()


def test_what_a_recomputation_costs() -> None:
    blocks = BlockManager(5, SIZE)
    seq = make_sequence(1, range(10))
    admit(blocks, seq)
    assert blocks.num_uncached_tokens(seq) == 2

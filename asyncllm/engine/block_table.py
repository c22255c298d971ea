"""The block tables of a sequence, one per cache group, and the order of taking and freeing pages.

A group holds the blocks from `first` on; a window has passed those before it. A page's name in the
prefix cache is the block's hash, followed by the group's number in all groups but the first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from asyncllm.cache_group import CacheGroup
from asyncllm.engine.page_pool import PagePool

OfGroup = tuple[list[bytes], int]  # names of a group's published blocks, number of its pages


@dataclass(slots=True)
class GroupPages:
    """A sequence's pages in one group, of blocks `first`, `first` + 1, and so on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)  # on the device
    host_pages: list[int] = field(default_factory=list)  # while swapped

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(slots=True)
class BlockTable:
    """The pages of a sequence."""

    groups: list[GroupPages]
    num_published: int = 0  # blocks
    may_publish: bool = True  # false without a prefix cache, or if filled before its reset
    # For recurrent layers:
    num_found: int = 0  # blocks in the prefix cache at admission, with or without a snapshot
    num_saved: int = 0  # blocks before its last snapshot of the prompt
    num_decoded: int = 0  # blocks before its last snapshot of the answer

    def wanted(
        self, groups: SequenceOf[CacheGroup], hashes: list[bytes], end: int
    ) -> tuple[list[OfGroup], list[bytes], int]:
        """The arguments of `hold` for all blocks before `end`: per group, the names of published
        blocks and the number of pages; then all names, and the number of all pages. hashes: of
        published blocks. It avoids a call per group, as it delays the first token."""
        lists: list[OfGroup] = []
        names: list[bytes] = []
        num_pages = 0
        for g, held in enumerate(self.groups):
            of_group, count = block_names(hashes, g) if g else hashes, end
            if groups[g].window is not None:
                of_group, count = of_group[held.first :], groups[g].end(held.first, end)
            lists += [(of_group, count - held.first)]
            names += of_group
            num_pages += count - held.first
        return lists, names, num_pages

    def release_pages(self, pool: PagePool) -> None:
        _release(pool, [(held.first, held.pages) for held in self.groups])
        for held in self.groups:
            held.pages = []

    def release_host_pages(self, pool: PagePool) -> None:
        _release(pool, [(held.first, held.host_pages) for held in self.groups])
        for held in self.groups:
            held.host_pages = []


def block_names(hashes: list[bytes], group: int) -> list[bytes]:
    """Names of blocks in a group; in the first group they are the hashes."""
    return [block_hash + bytes((group,)) for block_hash in hashes] if group else hashes


def hold(
    pool: PagePool, wanted: list[OfGroup], names: list[bytes], num_pages: int
) -> tuple[list[list[int]], set[int]]:
    """Hold the pages that `BlockTable.wanted` lists. Returns them per group, and the set of new
    ones, which must be filled."""
    pages, new = pool.hold(names, num_pages)
    if not wanted[1:]:
        return [pages], new
    named, rest = iter(pages), iter(pages[len(names) :])
    lists = [
        [*islice(named, len(of_group)), *islice(rest, count - len(of_group))]
        for of_group, count in wanted
    ]
    return lists, new


def _release(pool: PagePool, lists: list[tuple[int, list[int]]]) -> None:
    """Release pages, last blocks first, so that the ends of sequences are evicted first. lists:
    (first block, pages) per group."""
    if len(lists) == 1:
        pool.release(reversed(lists[0][1]))
        return
    blocks = [(first + i, page) for first, pages in lists for i, page in enumerate(pages)]
    blocks.sort(key=itemgetter(0), reverse=True)
    pool.release(page for _, page in blocks)

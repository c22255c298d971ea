"""The pages of one sequence, by cache group, and the order in which a pool takes and gets them.

A group holds the blocks from `first` on: what a window has left behind is before it. The hash of a
block names its page in the first group; in the others the group's number follows it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from asyncllm.cache_group import CacheGroup
from asyncllm.engine.page_pool import PagePool

OfGroup = tuple[list[bytes], int]  # names of its published blocks, number of its pages


@dataclass(slots=True)
class GroupPages:
    """One sequence's pages in one group: of blocks `first`, `first` + 1, and so on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)  # on the device
    host_pages: list[int] = field(default_factory=list)  # while swapped

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages."""

    groups: list[GroupPages]
    num_published: int = 0  # blocks
    may_publish: bool = True  # not without a prefix cache, nor what was filled before its reset
    # Where layers are recurrent:
    num_found: int = 0  # blocks that had pages when it was admitted, with states or without
    num_saved: int = 0  # blocks before its own last snapshot of the prompt
    num_decoded: int = 0  # and of the answer

    def wanted(
        self, groups: SequenceOf[CacheGroup], hashes: list[bytes], end: int
    ) -> tuple[list[OfGroup], list[bytes], int]:
        """By group the names of the blocks before `end` that are published, by their `hashes`, and
        the number of all; then all names, and the number of pages. Without a call for each group:
        before a first prompt's step each counts."""
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
    """The names of blocks in a group; in the first group these are the hashes."""
    return [block_hash + bytes((group,)) for block_hash in hashes] if group else hashes


def hold(
    pool: PagePool, wanted: list[OfGroup], names: list[bytes], num_pages: int
) -> tuple[list[list[int]], set[int]]:
    """Hold what `BlockTable.wanted` lists. Returns the pages by group, and all that are to be
    filled."""
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
    """Lists of pages, each with its first block: the last blocks first, so that tails are evicted
    first."""
    if len(lists) == 1:
        pool.release(reversed(lists[0][1]))
        return
    blocks = [(first + i, page) for first, pages in lists for i, page in enumerate(pages)]
    blocks.sort(key=itemgetter(0), reverse=True)
    pool.release(page for _, page in blocks)

"""Reference-counted pages of the device, or of the host for swapped pages.

It knows neither sequences nor tokens. A page is used (count > 0) or free. A free page that was
published under a hash keeps its content, and can be found until it is taken. There is no separate
eviction policy: free pages are taken least recently freed first, those without a hash before all
others, so `_free` is the LRU list.
Methods take many pages at a time, because a call per page would cost more than its work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class PagePool:
    """Pages `first` .. `first + num_pages - 1`, all free at the start."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self.num_pages = num_pages
        self._first = first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, first + num_pages))
        self._counts = [0] * (first + num_pages)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def free_pages(self) -> list[int]:
        return list(self._free)

    def is_free(self, page: int) -> bool:
        return self._counts[page] == 0

    def is_shared(self, page: int) -> bool:
        return self._counts[page] > 1

    def find(self, block_hash: bytes) -> int | None:
        """The page with this block, used or free; None if there is none."""
        return self._page_of.get(block_hash)

    def picture(self, every: int) -> str:
        """A letter for each `every`-th page: "." free, "c" cached, "u" used, "s" shared."""
        pages = range(self._first, self._first + self.num_pages, every)
        counts = self._counts[self._first :: every]
        return "".join(
            ("u" if count == 1 else "s") if count else ("c" if page in self._hash_of else ".")
            for page, count in zip(pages, counts, strict=True)
        )

    def take(self, num_pages: int) -> list[int]:
        """Take the least recently freed pages for new content, with count 1 and without a hash."""
        free, counts, hash_of, page_of = self._free, self._counts, self._hash_of, self._page_of
        assert num_pages <= len(free), "take() from an empty pool: the caller must check num_free"
        pages = list(islice(free, num_pages))
        for page in pages:
            del free[page]
            counts[page] = 1
            if page in hash_of:
                del page_of[hash_of.pop(page)]
        return pages

    def num_left(self, hashes: Sequence[bytes], num_pages: int) -> int:
        """The number of free pages after a `hold` with these arguments."""
        found = [self._page_of.get(block_hash) for block_hash in hashes]
        num_used = len([page for page in found if page is not None and self._counts[page]])
        return len(self._free) - num_pages + num_used

    def hold(self, hashes: Sequence[bytes], num_pages: int) -> tuple[list[int], set[int]]:
        """Hold `num_pages` pages: those with these blocks, and new ones. Also returns the set of
        new ones, which must be filled.

        Existing pages are shared first, so that taking new ones cannot evict them.
        """
        found = [self._page_of.get(block_hash) for block_hash in hashes]
        for page in found:
            if page is not None:
                self.share(page)
        new = self.take(num_pages - len(found) + found.count(None))
        rest = iter(new)
        pages = [next(rest) if page is None else page for page in found]
        pages += rest
        self.publish(pages[: len(hashes)], hashes)
        return pages, set(new)

    def share(self, page: int) -> None:
        """Add a user of `page`."""
        if self._counts[page] == 0:
            del self._free[page]
        self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user of each page. The last one frees it; its hash stays findable."""
        free, counts, hash_of = self._free, self._counts, self._hash_of
        for page in pages:
            count = counts[page] - 1
            assert count >= 0, f"page {page} released more often than taken"
            counts[page] = count
            if count == 0:
                free[page] = None
                if page not in hash_of:
                    free.move_to_end(page, last=False)

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make each page findable by its hash, unless another page has the same block."""
        counts, hash_of, page_of = self._counts, self._hash_of, self._page_of
        for page, block_hash in zip(pages, hashes, strict=True):
            assert counts[page] > 0, f"page {page} published while free"
            if block_hash not in page_of:
                if page in hash_of:
                    del page_of[hash_of[page]]
                page_of[block_hash] = page
                hash_of[page] = block_hash

    def expire(self, block_hash: bytes) -> None:
        """If a free page holds this block, make it the next one to be taken."""
        page = self._page_of.get(block_hash)
        if page is not None and page in self._free:
            self._free.move_to_end(page, last=False)

    def forget_all(self) -> None:
        """Forget all hashes."""
        self._page_of.clear()
        self._hash_of.clear()

    def check_integrity(self, users: dict[int, int]) -> None:
        """Assert that counts match `users` (page -> number of holders) and all maps agree."""
        for page in range(self._first, self._first + self.num_pages):
            count = users.get(page, 0)
            assert self._counts[page] == count, (
                f"page {page}: counted {self._counts[page]}, held by {count}"
            )
            assert (page in self._free) == (count == 0), f"page {page}: free list disagrees"
        assert all(page >= self._first for page in users), "a reserved page is in use"
        assert {page: h for h, page in self._page_of.items()} == self._hash_of, "hash maps differ"

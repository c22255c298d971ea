"""Which pages hold which sequence's KV: allocation, sharing, copy-on-write, prefix cache, swap.

No torch: it hands out page numbers, and the moves (swap, copy) that the device must make before the
step that was planned with them. It does not know why a sequence is admitted or preempted.

  publish       a full page becomes findable by its hash, for steps after the one that fills it: a
                prompt's at once, an answer's several at a time, which is cheaper, or at its end
  swap          a preempted sequence's pages move to host pages; both copies stay findable

Invariant: `check_integrity()`. With no live sequence every page is free and every map of sequences
is empty.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from asyncllm.engine.block_hashes import BlockHashes
from asyncllm.engine.page_pool import PagePool
from asyncllm.step_plan import PageAppend
from asyncllm.types import PADDING_PAGE, Sequence


@dataclass(slots=True)
class _Table:
    """One sequence's pages, in order of position."""

    pages: list[int] = field(default_factory=list)  # on the device
    host_pages: list[int] = field(default_factory=list)  # while swapped
    num_published: int = 0
    may_publish: bool = True  # not without a prefix cache, nor what was filled before its reset


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """The longest cached prefix: each block's device page, or the host page that holds it."""

    pages: tuple[tuple[int | None, int | None], ...]  # (device page, host page), one is None

    def __len__(self) -> int:
        return len(self.pages)


class BlockManager:
    """Pages 1 .. num_pages of the device (page 0 is padding) and `num_host_pages` for swapping."""

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        num_host_pages: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.device = PagePool(num_pages, first=PADDING_PAGE + 1)
        self.host = PagePool(num_host_pages)
        self._tables: dict[int, _Table] = {}  # by seq_id: sequences that own pages
        self._hashes = BlockHashes(block_size)

    # --- queries ---------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pages_of(self, seq: Sequence) -> list[int]:
        """The device pages of `seq` in order; a copy."""
        return list(self._tables[seq.seq_id].pages)

    def match_prefix(self, seq: Sequence) -> PrefixMatch:
        """The cached blocks at the start of `seq`; at least its last token is left to compute."""
        if not self.enable_prefix_caching:
            return PrefixMatch(())
        most = (len(seq.token_ids) - 1) // self.block_size
        found: list[tuple[int | None, int | None]] = []
        for i in range(most):  # hashed up to the first miss: a long prompt may never be cached
            block_hash = self._hashes.first(seq, i + 1)[i]
            page = self.device.find(block_hash)
            host_page = None if page is not None else self.host.find(block_hash)
            if page is None and host_page is None:
                break
            found.append((page, host_page))
        return PrefixMatch(tuple(found))

    def num_pages_to_admit(self, seq: Sequence, match: PrefixMatch) -> int:
        """Free pages that `admit` would use up (free pages that it revives count)."""
        used_already = sum(
            1 for page, _ in match.pages if page is not None and not self.device.is_free(page)
        )
        return self.num_blocks(len(seq.token_ids)) - used_already

    def num_pages_to_swap_in(self, seq: Sequence) -> int:
        """As `num_pages_to_admit`, for a swapped sequence and the token after its last."""
        on_device = self._still_on_device(seq)
        held = sum(1 for p in on_device if p is not None and not self.device.is_free(p))
        return self.num_blocks(max(seq.num_prefill, seq.num_computed + 1)) - held

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.num_blocks(seq.num_computed) <= self.host.num_free

    def num_uncached_tokens(self, seq: Sequence) -> int:
        """Tokens that a recomputation would have to compute, if nothing is evicted meanwhile."""
        published = self._tables[seq.seq_id].num_published
        return len(seq.token_ids) - published * self.block_size

    # --- transitions -----------------------------------------------------------------------

    def admit(self, seq: Sequence, match: PrefixMatch) -> list[tuple[int, int]]:
        """Give `seq` pages for all its known tokens, the matched ones shared.

        Returns the swap-ins (host page, device page) of blocks that only the host held.
        """
        assert seq.seq_id not in self._tables, f"sequence {seq.seq_id} owns pages already"
        table = _Table(may_publish=self.enable_prefix_caching)
        # Hold all matched pages first, so that taking new ones cannot evict them.
        for page, host_page in match.pages:
            if page is not None:
                self.device.share(page)
            else:
                assert host_page is not None
                self.host.share(host_page)
        swap_in: list[tuple[int, int]] = []
        hashes = self._hashes.known(seq)
        for i, (page, host_page) in enumerate(match.pages):
            if page is None:
                assert host_page is not None
                page = self.device.take()
                swap_in.append((host_page, page))
                self.device.publish(page, hashes[i])  # steps run in order: filled before any reader
                self.host.release(host_page)
            table.pages.append(page)
        table.num_published = len(match.pages)
        num_missing = self.num_blocks(len(seq.token_ids)) - len(table.pages)
        table.pages += self.device.take_many(num_missing)
        self._tables[seq.seq_id] = table
        return swap_in

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares all of `parent`'s pages; the first to write to a shared page copies it."""
        source = self._tables[parent.seq_id]
        for page in source.pages:
            self.device.share(page)
        self._tables[child.seq_id] = replace(source, pages=list(source.pages), host_pages=[])
        self._hashes.fork(parent, child)

    def needs_page(self, seq: Sequence, position: int) -> bool:
        """Whether writing KV at `position` takes a free page (a new one, or a private copy)."""
        pages = self._tables[seq.seq_id].pages
        index = position // self.block_size
        return index >= len(pages) or self.device.is_shared(pages[index])

    def extend(self, seqs: SequenceOf[Sequence]) -> list[PageAppend]:
        """A page for each whose next position begins one, where it has none yet; enough are free.

        As `reserve` where nothing is shared, for all rows of a step that need one.
        """
        full: list[tuple[Sequence, list[int]]] = []
        for seq in seqs:
            pages = self._tables[seq.seq_id].pages
            if seq.num_computed == len(pages) * self.block_size:
                full.append((seq, pages))
        appends: list[PageAppend] = []
        for (seq, pages), page in zip(full, self.device.take_many(len(full)), strict=True):
            appends.append(PageAppend(seq.slot, len(pages), page))
            pages.append(page)
        return appends

    def reserve(self, seq: Sequence, position: int) -> tuple[PageAppend, tuple[int, int] | None]:
        """Take the page that `needs_page` asked for; the copy (from, to) where it was shared."""
        pages = self._tables[seq.seq_id].pages
        index = position // self.block_size
        assert index <= len(pages), f"sequence {seq.seq_id}: position {position} skips a page"
        page = self.device.take()
        copy = None
        if index == len(pages):
            pages.append(page)
        else:
            copy = (pages[index], page)
            self.device.release(pages[index])
            pages[index] = page
        return PageAppend(seq.slot, index, page), copy

    def publish(self, seq: Sequence) -> None:
        """Make the pages of `seq` findable that are full of known tokens.

        They are computed, or will be by a step before any that is planned from here on.
        """
        table = self._tables[seq.seq_id]
        num_full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not table.may_publish or num_full <= table.num_published:
            return
        new = slice(table.num_published, num_full)
        self.device.publish_many(table.pages[new], self._hashes.first(seq, num_full)[new])
        table.num_published = num_full

    def free(self, seq: Sequence) -> None:
        """`seq` gives back all it owns, last pages first, so that tails are evicted first."""
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            self.device.release_many(reversed(table.pages))
            self.host.release_many(reversed(table.host_pages))

    def forget(self, seq: Sequence) -> None:
        """`seq` is finished: free it and drop its hashes."""
        self.free(seq)
        self._hashes.forget(seq)

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move `seq` to host pages; the copies (device page, host page) that are needed."""
        table = self._tables[seq.seq_id]
        num_blocks = self.num_blocks(seq.num_computed)
        copies: list[tuple[int, int]] = []
        for i, page in enumerate(table.pages[:num_blocks]):
            block_hash = self._published_hash(seq, table, i)
            host_page = self.host.find(block_hash) if block_hash else None
            if host_page is not None:
                self.host.share(host_page)
            else:
                host_page = self.host.take()
                copies.append((page, host_page))
                if block_hash:
                    self.host.publish(host_page, block_hash)
            table.host_pages.append(host_page)
        self.device.release_many(reversed(table.pages))
        table.pages = []
        return copies

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        """Bring `seq` back; the copies (host page, device page) of what has left the device."""
        table = self._tables[seq.seq_id]
        on_device = self._still_on_device(seq)
        for page in on_device:
            if page is not None:
                self.device.share(page)
        copies: list[tuple[int, int]] = []
        for i, (held, host_page) in enumerate(zip(on_device, table.host_pages, strict=True)):
            page = held
            if page is None:
                page = self.device.take()
                copies.append((host_page, page))
                block_hash = self._published_hash(seq, table, i)
                if block_hash:
                    self.device.publish(page, block_hash)
            table.pages.append(page)
        self.host.release_many(reversed(table.host_pages))
        table.host_pages = []
        # A mid-prefill sequence gets the rest of its pages back as well.
        num_missing = self.num_blocks(seq.num_prefill) - len(table.pages)
        table.pages += self.device.take_many(max(num_missing, 0))
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all blocks. Live sequences keep their pages, but publish none of them again."""
        self.device.forget_all()
        self.host.forget_all()
        for table in self._tables.values():
            table.num_published, table.may_publish = 0, False

    # --- inside ----------------------------------------------------------------------------

    def _still_on_device(self, seq: Sequence) -> list[int | None]:
        """For each swapped page of `seq`, the device page that still holds its content."""
        table = self._tables[seq.seq_id]
        return [
            self.device.find(block_hash)
            if (block_hash := self._published_hash(seq, table, i))
            else None
            for i in range(len(table.host_pages))
        ]

    def _published_hash(self, seq: Sequence, table: _Table, index: int) -> bytes | None:
        return self._hashes.known(seq)[index] if index < table.num_published else None

    def check_integrity(self) -> None:
        """Assert that every page's count is the number of tables that hold it."""
        users: dict[int, int] = {}
        host_users: dict[int, int] = {}
        for table in self._tables.values():
            for page in table.pages:
                users[page] = users.get(page, 0) + 1
            for page in table.host_pages:
                host_users[page] = host_users.get(page, 0) + 1
        self.device.check_integrity(users)
        self.host.check_integrity(host_users)

    def check_empty(self) -> None:
        """Assert that no sequence is known."""
        assert not self._tables, f"pages of finished sequences: {sorted(self._tables)}"
        self._hashes.check_empty()

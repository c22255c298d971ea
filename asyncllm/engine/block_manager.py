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

import hashlib
import secrets
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from asyncllm.engine.page_pool import PagePool
from asyncllm.step_plan import PageAppend
from asyncllm.types import PADDING_PAGE, Sequence

HASH_BYTES = 16


@dataclass(slots=True)
class _Table:
    """One sequence's pages, in order of position."""

    pages: list[int] = field(default_factory=list)  # on the device
    host_pages: list[int] = field(default_factory=list)  # while swapped
    num_published: int = 0
    may_publish: bool = True  # not without a prefix cache, nor what was filled before its reset


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

    def match_prefix(self, seq: Sequence) -> int:
        """How many blocks at the start of `seq` are cached; its last token is left to compute."""
        if not self.enable_prefix_caching:
            return 0
        most = (len(seq.token_ids) - 1) // self.block_size
        for i in range(most):  # hashed up to the first miss: a long prompt may never be cached
            block_hash = self._hashes.first(seq, i + 1)[i]
            if self.device.find(block_hash) is None and self.host.find(block_hash) is None:
                return i
        return most

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.num_blocks(seq.num_computed) <= self.host.num_free

    def num_uncached_tokens(self, seq: Sequence) -> int:
        """Tokens that a recomputation would have to compute, if nothing is evicted meanwhile."""
        published = self._tables[seq.seq_id].num_published
        return len(seq.token_ids) - published * self.block_size

    # --- transitions -----------------------------------------------------------------------

    def admit(
        self, seq: Sequence, num_cached: int = 0, num_spared: int = 0
    ) -> list[tuple[int, int]] | None:
        """Give `seq`, a new or a swapped one, pages for all its known tokens.

        num_cached: the blocks of a new one that `match_prefix` found; they are shared. num_spared:
        pages that must stay free. None, and nothing is taken, where they would not; else the
        swap-ins (host page, device page) of blocks that only the host holds.
        """
        table = self._tables.get(seq.seq_id)
        if table is None:
            table = _Table(num_published=num_cached, may_publish=self.enable_prefix_caching)
        assert not table.pages, f"sequence {seq.seq_id} owns pages already"
        hashes = self._hashes.known(seq)[: table.num_published]
        num_pages = self.num_blocks(len(seq.token_ids))
        if self.device.num_left(hashes, num_pages) < num_spared:
            return None
        self._tables[seq.seq_id] = table
        # New pages are published before they are filled: steps run in order, so no reader is early.
        table.pages, new = self.device.hold(hashes, num_pages)
        host_pages: SequenceOf[int | None] = table.host_pages or list(map(self.host.find, hashes))
        swap_in = [
            (host_page, page)
            for host_page, page in zip(host_pages, table.pages, strict=False)
            if page in new and host_page is not None
        ]
        if not table.host_pages:
            for host_page, _ in swap_in:  # in use just now: the others are evicted first
                self.host.share(host_page)
                table.host_pages.append(host_page)
        self.host.release(reversed(table.host_pages))
        table.host_pages = []
        return swap_in

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares all of `parent`'s pages; the first to write to a shared page copies it."""
        source = self._tables[parent.seq_id]
        for page in source.pages:
            self.device.share(page)
        self._tables[child.seq_id] = replace(source, pages=list(source.pages), host_pages=[])
        self._hashes.fork(parent, child)

    def missing_blocks(self, seq: Sequence, end: int) -> list[int]:
        """The blocks for which writing KV from `num_computed` to `end` takes a free page.

        That is a new one, or a private copy of a shared one.
        """
        pages = self._tables[seq.seq_id].pages
        blocks = range(seq.num_computed // self.block_size, self.num_blocks(end))
        return [i for i in blocks if i >= len(pages) or self.device.is_shared(pages[i])]

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
        for (seq, pages), page in zip(full, self.device.take(len(full)), strict=True):
            appends.append(PageAppend(seq.slot, len(pages), page))
            pages.append(page)
        return appends

    def reserve(
        self, seq: Sequence, missing: list[int]
    ) -> tuple[list[PageAppend], list[tuple[int, int]]]:
        """Take pages for `missing_blocks`; the copies (from, to) of those that were shared."""
        pages = self._tables[seq.seq_id].pages
        taken = self.device.take(len(missing))
        copies: list[tuple[int, int]] = []
        for index, page in zip(missing, taken, strict=True):
            assert index <= len(pages), f"sequence {seq.seq_id}: block {index} skips a page"
            if index == len(pages):
                pages.append(page)
            else:
                copies.append((pages[index], page))
                self.device.release([pages[index]])
                pages[index] = page
        return [PageAppend(seq.slot, *each) for each in zip(missing, taken, strict=True)], copies

    def publish(self, seq: Sequence) -> None:
        """Make the pages of `seq` findable that are full of known tokens.

        They are computed, or will be by a step before any that is planned from here on.
        """
        table = self._tables[seq.seq_id]
        num_full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not table.may_publish or num_full <= table.num_published:
            return
        new = slice(table.num_published, num_full)
        self.device.publish(table.pages[new], self._hashes.first(seq, num_full)[new])
        table.num_published = num_full

    def free(self, seq: Sequence) -> None:
        """`seq` gives back all it owns, last pages first, so that tails are evicted first."""
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            self.device.release(reversed(table.pages))
            self.host.release(reversed(table.host_pages))

    def forget(self, seq: Sequence) -> None:
        """`seq` is finished: free it and drop its hashes."""
        self.free(seq)
        self._hashes.forget(seq)

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move `seq` to host pages; the copies (device page, host page) that are needed."""
        table = self._tables[seq.seq_id]
        hashes = self._hashes.known(seq)[: table.num_published]
        table.host_pages, new = self.host.hold(hashes, self.num_blocks(seq.num_computed))
        pairs = zip(table.pages, table.host_pages, strict=False)
        copies = [(page, host_page) for page, host_page in pairs if host_page in new]
        self.device.release(reversed(table.pages))
        table.pages = []
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all blocks. Live sequences keep their pages, but publish none of them again."""
        self.device.forget_all()
        self.host.forget_all()
        for table in self._tables.values():
            table.num_published, table.may_publish = 0, False

    # --- inside ----------------------------------------------------------------------------

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


class BlockHashes:
    """The names of blocks: H(block's token ids, parent's hash), from the request's cache key on.

    A block's hash says all that its KV depends on, so equal hashes may share a page. Each is made
    once per sequence, when it is first asked for: a long prompt whose beginning is not cached is
    not hashed. Keyed with a secret of the process, so that no client can construct a collision.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[int, list[bytes]] = {}  # by seq_id
        self._keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=secrets.token_bytes(32))

    def known(self, seq: Sequence) -> list[bytes]:
        """Those made so far, of its first blocks."""
        return self._known.get(seq.seq_id, [])

    def first(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes at least the first `num_blocks` blocks of `seq`, whose tokens must be known."""
        hashes = self._known.setdefault(seq.seq_id, [])
        first, size = len(hashes), self._block_size
        if first >= num_blocks:
            return hashes
        end = num_blocks * size
        assert end <= len(seq.token_ids), "hash of tokens that are not known yet"
        parent = hashes[-1] if hashes else seq.request.cache_key
        tokens = array("i", seq.token_ids[first * size : end])
        block_bytes, tokens_bytes = size * tokens.itemsize, tokens.tobytes()
        for start in range(0, len(tokens_bytes), block_bytes):
            digest = self._keyed.copy()
            digest.update(tokens_bytes[start : start + block_bytes] + parent)
            parent = digest.digest()
            hashes.append(parent)
        return hashes

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._known[child.seq_id] = list(self.known(parent))

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq.seq_id, None)

    def check_empty(self) -> None:
        """Assert that no sequence is known."""
        assert not self._known, f"hashes of finished sequences: {sorted(self._known)}"

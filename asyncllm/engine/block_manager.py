"""The pages of each sequence's KV: allocation, sharing, copy-on-write, prefix cache, swapping.

No torch: it returns page numbers, and the moves (swaps, copies) that the device must do before the
step that is planned with them. It does not know why a sequence is admitted or preempted.

  group     layers that hold the same blocks of a sequence. Each group has a block table; all draw
            from one page pool (cache_group.py). `trim` frees the pages that a window has passed
  publish   put a full page into the prefix cache, for steps after the one that fills it: a
            prompt's pages at once, an answer's a few at a time, which is cheaper, and at its end
  swap      move a preempted sequence's pages to host pages; the prefix cache keeps both copies
  states    of recurrent layers: rows of another pool (state_pool.py)

Invariants: `check_integrity()`. Without live sequences all pages are free and all maps are empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from asyncllm.cache_group import CacheGroup
from asyncllm.engine.block_hashes import BlockHashes
from asyncllm.engine.block_table import BlockTable, GroupPages, block_names, hold
from asyncllm.engine.page_pool import PagePool
from asyncllm.engine.prefix_cache import PrefixCache
from asyncllm.engine.state_pool import StatePool
from asyncllm.step_plan import PageAppend
from asyncllm.types import PADDING_PAGE, Sequence


class BlockManager:
    """Pages 1 .. num_pages of the device (page 0 is padding) and `num_host_pages` for swapping."""

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        num_host_pages: int = 0,
        enable_prefix_caching: bool = True,
        groups: SequenceOf[CacheGroup] | None = None,
        states: StatePool | None = None,
    ) -> None:
        """groups: None for a single group without a window. states: of recurrent layers."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.device = PagePool(num_pages, first=PADDING_PAGE + 1)
        self.host = PagePool(num_host_pages)
        self.states = states
        self._groups = groups or (CacheGroup(block_size),)
        self.num_groups = len(self._groups)
        # Groups that free pages while a sequence runs.
        self.windows = [g for g, group in enumerate(self._groups) if group.window is not None]
        self._tables: dict[int, BlockTable] = {}  # by seq_id: sequences that own pages
        self._hashes = BlockHashes(block_size)
        self.prefixes = PrefixCache(self.device, self.host, states, self._groups, self._hashes)

    # --- queries ---------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pages_of(self, seq: Sequence, end: int | None = None) -> list[list[int]]:
        """The device pages of `seq`, per group, as new lists; PADDING_PAGE for blocks that a window
        has passed. end: only blocks before this one."""
        lists: list[list[int]] = []
        for held in self._tables[seq.seq_id].groups:
            lists += [([PADDING_PAGE] * held.first + held.pages)[:end]]
        return lists

    def num_pages_to_swap(self, seq: Sequence) -> int:
        end = self.num_blocks(seq.num_computed)
        return sum(end - held.first for held in self._tables[seq.seq_id].groups)

    def can_swap_out(self, seq: Sequence) -> bool:
        has_row = self.states is None or self.states.host.num_free > 0
        return has_row and self.num_pages_to_swap(seq) <= self.host.num_free

    def num_uncached_tokens(self, seq: Sequence) -> int:
        """Tokens to compute again after preemption, unless cached blocks are evicted meanwhile."""
        published = self._tables[seq.seq_id].num_published
        while published and not self.prefixes.has_state(seq, published):
            published -= 1
        return len(seq.token_ids) - published * self.block_size

    # --- transitions -----------------------------------------------------------------------

    def admit(
        self, seq: Sequence, num_cached: int = 0, num_spared: int = 0
    ) -> list[tuple[int, int]] | None:
        """Allocate pages for all known tokens of `seq`, which is new or swapped out; for layers
        with a window, for as many as they hold at a time.

        num_cached: blocks of a new sequence that `PrefixCache.match` found, to be shared.
        num_spared: pages that must stay free; if they would not, returns None and allocates none.
        Returns the swap-ins (host page, device page) of blocks that only the host holds.
        """
        swapped, start = self._tables.get(seq.seq_id), num_cached * self.block_size
        table = swapped or BlockTable([], num_cached, self.enable_prefix_caching)
        if swapped is None:
            if self.states is not None and self.enable_prefix_caching:
                table.num_found = self.prefixes.num_found(seq)
            for group in self._groups:
                table.groups += [GroupPages(group.first_block(start) if start else 0)]
        hashes = self._hashes.known(seq)[: table.num_published]
        end = self.num_blocks(len(seq.token_ids))
        wanted, names, num_pages = table.wanted(self._groups, hashes, end)
        if self.device.num_left(names, num_pages) < num_spared:
            return None
        self._tables[seq.seq_id] = table
        # New pages are published before they are filled. Steps run in order, so no step reads them
        # before that.
        lists, new = hold(self.device, wanted, names, num_pages)
        swap_in: list[tuple[int, int]] = []
        for held, pages, (of_group, _) in zip(table.groups, lists, wanted, strict=True):
            assert not held.pages, f"sequence {seq.seq_id} owns pages already"
            held.pages = pages
            on_host = held.host_pages if swapped else map(self.host.find, of_group)
            swap_in += [
                (host_page, page)
                for host_page, page in zip(on_host, pages, strict=False)
                if page in new and host_page is not None
            ]
        if swapped:
            table.release_host_pages(self.host)
        elif swap_in:  # mark the host pages as recently used: others are evicted first
            for host_page, _ in swap_in:
                self.host.share(host_page)
            self.host.release(host_page for host_page, _ in reversed(swap_in))
        return swap_in

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares all pages of `parent`; the first to write to a shared page copies it."""
        source = self._tables[parent.seq_id]
        for held in source.groups:
            for page in held.pages:
                self.device.share(page)
        groups = [GroupPages(held.first, list(held.pages)) for held in source.groups]
        self._tables[child.seq_id] = replace(source, groups=groups)
        self._hashes.fork(parent, child)

    def missing_blocks(self, seq: Sequence, end: int) -> list[tuple[int, int]]:
        """The (group, block) pairs that need a free page to write KV from `num_computed` to `end`:
        a new page, or a private copy of a shared one."""
        start, num_blocks = seq.num_computed // self.block_size, self.num_blocks(end)
        return [
            (g, i)
            for g, held in enumerate(self._tables[seq.seq_id].groups)
            for i in range(start, self._groups[g].end(held.first, num_blocks))
            if i >= held.end or self.device.is_shared(held.pages[i - held.first])
        ]

    def extend(self, seqs: SequenceOf[Sequence]) -> list[PageAppend]:
        """A new page for each sequence whose next position begins a block; enough pages are free.

        It does what `trim` and `reserve` do, for many sequences without shared pages.
        """
        full: list[tuple[Sequence, int, GroupPages]] = []
        appends: list[PageAppend] = []
        for seq in seqs:
            appends += self.trim(seq)
            for g, held in enumerate(self._tables[seq.seq_id].groups):
                if seq.num_computed == held.end * self.block_size:
                    full.append((seq, g, held))
        for (seq, g, held), page in zip(full, self.device.take(len(full)), strict=True):
            appends.append(PageAppend(seq.slot, held.end, page, g))
            held.pages.append(page)
        return appends

    def reserve(
        self, seq: Sequence, missing: list[tuple[int, int]]
    ) -> tuple[list[PageAppend], list[tuple[int, int]]]:
        """Allocate pages for `missing_blocks`. Also returns the copies (from, to) of shared
        pages."""
        groups = self._tables[seq.seq_id].groups
        appends: list[PageAppend] = []
        copies: list[tuple[int, int]] = []
        for (g, index), page in zip(missing, self.device.take(len(missing)), strict=True):
            held = groups[g]
            assert held.first <= index <= held.end, f"{seq.seq_id}: block {index} skips a page"
            if index == held.end:
                held.pages.append(page)
            else:
                shared = held.pages[index - held.first]
                copies.append((shared, page))
                self.device.release([shared])
                held.pages[index - held.first] = page
            appends.append(PageAppend(seq.slot, index, page, g))
        return appends, copies

    def trim(self, seq: Sequence) -> list[PageAppend]:
        """Free the pages that no token from `num_computed` on attends to. Published ones stay in
        the prefix cache. A step in flight may still read them: new owners write in later steps."""
        appends: list[PageAppend] = []
        for g in self.windows:
            held = self._tables[seq.seq_id].groups[g]
            first = self._groups[g].first_block(seq.num_computed)
            left, blocks = held.pages[: first - held.first], range(held.first, first)
            del held.pages[: len(left)]
            held.first = first
            self.device.release(left)
            appends += [PageAppend(seq.slot, i, PADDING_PAGE, g) for i in blocks]
        return appends

    def publish(self, seq: Sequence) -> None:
        """Put the pages of `seq` that are full of known tokens into the prefix cache.

        They are computed already, or by a step that runs before any that is planned from now on.
        """
        table = self._tables[seq.seq_id]
        num_full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not table.may_publish or num_full <= table.num_published:
            return
        hashes = self._hashes.first(seq, num_full)
        for g, held in enumerate(table.groups):
            new = range(max(table.num_published, held.first), num_full)
            pages = held.pages[new.start - held.first : new.stop - held.first]
            self.device.publish(pages, block_names(hashes[new.start : new.stop], g))
        table.num_published = num_full

    def save_states(self, seq: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Rows for state snapshots within a chunk of a prompt, from token `start` to `end`, each
        with its number of tokens from `start`.

        Snapshots are taken at the last whole block, for requests that repeat or continue the
        prompt, and where its pages diverge from those of other prompts. The prompt's snapshot at an
        earlier last block is the first to be overwritten.
        """
        states, table, size = self.states, self._tables[seq.seq_id], self.block_size
        if states is None or not table.may_publish:
            return ()
        last = min(end, len(seq.token_ids) - 1) // size
        saves: list[tuple[int, int]] = []
        for num_blocks in sorted({table.num_found, last}):
            if start < num_blocks * size <= end:
                hashes = self._hashes.first(seq, num_blocks)
                row = states.save(hashes[num_blocks - 1])
                if row is not None:
                    saves.append((num_blocks * size - start, row))
        if last * size > start:
            if table.num_saved not in (0, table.num_found):
                states.expire(self._hashes.known(seq)[table.num_saved - 1])
            table.num_saved = last
        return tuple(saves)

    def save_decoded(self, seqs: SequenceOf[Sequence]) -> list[tuple[int, int]]:
        """(slot, row) for state snapshots before the step, of sequences that begin a new block of
        their answers, so that the next turn of a chat continues from there. A sequence's new
        snapshot replaces its last one."""
        saves: list[tuple[int, int]] = []
        for seq in seqs:
            table, num_blocks = self._tables[seq.seq_id], seq.num_computed // self.block_size
            if self.states is None or not table.may_publish:
                continue
            hashes = self._hashes.first(seq, num_blocks)
            row = self.states.save(hashes[num_blocks - 1])
            if row is not None:
                saves.append((seq.slot, row))
                if table.num_decoded:
                    self.states.expire(hashes[table.num_decoded - 1])
                table.num_decoded = num_blocks
        return saves

    def free(self, seq: Sequence) -> None:
        """Free all pages and host state of `seq`."""
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            table.release_pages(self.device)
            table.release_host_pages(self.host)
        if self.states is not None:
            self.states.leave_host(seq.seq_id)

    def forget(self, seq: Sequence) -> None:
        """Free a finished sequence and its hashes."""
        self.free(seq)
        self._hashes.forget(seq)

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move `seq` to host pages. Returns the copies (device page, host page) to make."""
        self.trim(seq)
        table = self._tables[seq.seq_id]
        hashes = self._hashes.known(seq)[: table.num_published]
        wanted = table.wanted(self._groups, hashes, self.num_blocks(seq.num_computed))
        lists, new = hold(self.host, *wanted)
        copies: list[tuple[int, int]] = []
        for held, host_pages in zip(table.groups, lists, strict=True):
            held.host_pages = host_pages
            pairs = zip(held.pages, host_pages, strict=False)
            copies += [(page, host_page) for page, host_page in pairs if host_page in new]
        table.release_pages(self.device)
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks. Live sequences keep their pages, but never publish them."""
        self.device.forget_all()
        self.host.forget_all()
        if self.states is not None:
            self.states.forget_all()
        for table in self._tables.values():
            table.num_published, table.may_publish = 0, False

    def check_integrity(self) -> None:
        """Assert that each page's count is the number of block tables that hold it."""
        users: Counter[int] = Counter()
        host_users: Counter[int] = Counter()
        for table in self._tables.values():
            for group, held in zip(self._groups, table.groups, strict=True):
                assert len(held.pages) <= group.max_blocks, "a window's pages are not freed"
                users.update(held.pages)
                host_users.update(held.host_pages)
        self.device.check_integrity(users)
        self.host.check_integrity(host_users)
        if self.states is not None:
            self.states.check_integrity()

    def check_empty(self) -> None:
        """Assert that no sequence is known."""
        assert not self._tables, f"pages of finished sequences: {sorted(self._tables)}"
        self._hashes.check_empty()

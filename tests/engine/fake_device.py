"""A device in plain Python that obeys a `StepPlan` to the letter, for tests without a model.

It knows nothing of the scheduler: what it reads, it reads through its own block tables, by slot,
as attention kernels do. A KV cell is a digest of its token, of its position and of all cells
before it, of all cache groups, as far as their windows reach, as they were found in the pages: like
the KV of a deep model it depends on the whole context. So a page shared wrongly, reused or given
back too early, copied too late or never swapped back changes the tokens that come out. Pages start
as garbage and nobody cleans them. Where layers are recurrent, a slot has a state, too: a digest of
all tokens so far, on which cells depend, and which is not in the pages.

Steps run in the order of their launch, like a stream: at once, or only when somebody waits. Of a
pipeline each step has two parts, `begin` and `end`, and others come between them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from asyncllm.step_plan import CommonStep, StepPlan
from asyncllm.types import (
    PADDING_PAGE,
    PADDING_SLOT,
    Request,
    Sequence,
    SequenceStatus,
    StepResult,
)

VOCAB_SIZE = 64

# (`first_cell`, the state before the token), then for each group the cells that a token sees
Seen = tuple[Any, ...]
ZERO_STATE = 0


def first_cell(cache_key: bytes) -> int:
    """The cell before position 0: an adapter or a salt changes all KV after it."""
    return crc32(cache_key)


def seen_from(window: int | None, position: int) -> int:
    """The first position that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def moved_state(state: int, token_id: int) -> int:
    """The state that recurrent layers keep, one token on."""
    return hash((state, token_id))


def kv_cells(token_id: int, seen: Seen) -> list[int]:
    """The KV of a token in each group, after what it sees but for itself."""
    return [hash((group, token_id, seen)) for group in range(len(seen) - 1)]


def next_token(seen: Seen, seed: int, banned: frozenset[int]) -> int:
    """The token that follows one that sees this, itself included, in the random order of `seed`."""
    token_id = hash((seed, seen)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def banned_tokens(request: Request, output_ids: list[int]) -> frozenset[int]:
    """The last tokens of those bad words that `output_ids` is about to complete."""
    end = len(output_ids)
    return frozenset(
        word[-1]
        for word in request.bad_words_ids
        if tuple(output_ids[max(0, end - len(word) + 1) :]) == word[:-1]
    )


def masked_tokens(banned: frozenset[int], masked: Iterable[int]) -> frozenset[int]:
    """The tokens that must not come where a grammar forbids `masked`: it wins over other bans."""
    masked = frozenset(masked)
    together = banned | masked
    return masked if len(together) == VOCAB_SIZE else together


@dataclass(slots=True)
class _Slot:
    seed: int = 0
    first: int = 0
    last_token: int = -1
    position: int = -1
    tables: list[list[int]] = field(default_factory=list)  # by group


class FakeLaunched:
    """A step in the device's queue. `turns`: event loop turns until its tokens are there."""

    def __init__(self, device: FakeDevice, plan: StepPlan, turns: int) -> None:
        self.plan = plan
        self.result: StepResult | None = None
        self.contexts: list[tuple[int, Seen]] = []  # once it has begun
        self.common: CommonStep | None = None
        self._device = device
        self._turns = turns
        # What a runner packs at launch, because the host moves on: slots and masks.
        self.sample_slots = [seq.slot for seq in plan.sampled]
        self.banned: list[frozenset[int]] | None = None
        if not plan.needs_host:
            self.banned = [self._banned(seq, None) for seq in plan.sampled]

    def sample(self, masked_rows: np.ndarray) -> None:
        """The second launch: what rows of the host's must know is known."""
        if self.plan.needs_host:
            assert self.banned is None
            bits = dict(zip(masked_rows.tolist(), self._device.masks, strict=False))
            rows = enumerate(self.plan.sampled)
            self.banned = [self._banned(seq, bits.get(i)) for i, seq in rows]
        if self._device.in_parts:
            self._device.queue_end(self)
        if not self._device.lazy:
            self._device.run_until(self)

    @staticmethod
    def _banned(seq: Sequence, mask: np.ndarray | None) -> frozenset[int]:
        if seq.needs_host and seq.status is not SequenceStatus.FINISHED:
            assert seq.num_in_flight == 1, f"{seq.seq_id}: its mask needs a token in flight"
        outputs = seq.token_ids[seq.num_prompt_tokens :]
        banned = banned_tokens(seq.request, outputs)
        if mask is None:
            return banned
        masked = {i for i in range(VOCAB_SIZE) if not int(mask[i // 32]) >> (i % 32) & 1}
        return masked_tokens(banned, masked)

    async def wait(self) -> StepResult:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self._device.run_until(self)
        assert self.result is not None
        return self.result


class FakeDevice:
    """`num_pages` device pages after the padding page, `num_host_pages`, `max_num_seqs` slots."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_host_pages: int,
        block_size: int,
        max_num_seqs: int,
        rng: random.Random,
        lazy: bool,
        max_turns: int = 3,
        windows: tuple[int | None, ...] = (None,),
        states: tuple[int, int] | None = None,
        in_parts: bool = False,
    ) -> None:
        """windows: by group. states: numbers of snapshots and of host rows; None: no layer is
        recurrent. in_parts: every step is to be sampled by a launch of its own."""
        self.in_parts = in_parts
        self.block_size = block_size
        self._windows = windows
        self._rng = rng
        self.lazy = lazy
        self._max_turns = max_turns
        self.masks = np.zeros((max_num_seqs, VOCAB_SIZE // 32), np.int32)
        self._pages = [self._garbage() for _ in range(PADDING_PAGE + 1 + num_pages)]
        self._host_pages = [self._garbage() for _ in range(num_host_pages)]
        self._slots = [_Slot() for _ in range(max_num_seqs + 1)]
        self._has_states = states is not None
        num_snapshots, num_host_states = states or (0, 0)
        num_states = max_num_seqs + num_snapshots
        self._states = [ZERO_STATE, *(rng.getrandbits(60) for _ in range(num_states))]
        self._host_states = [rng.getrandbits(60) for _ in range(num_host_states)]
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, plan: StepPlan) -> FakeLaunched:
        return self.queue(self.pack(plan))

    def pack(self, plan: StepPlan) -> FakeLaunched:
        """Read what a launch reads of sequences, as they are now."""
        check_plan(plan)
        return FakeLaunched(self, plan, self._rng.randint(0, self._max_turns))

    def queue(self, packed: FakeLaunched) -> FakeLaunched:
        self._queue.append(partial(self._begin if self.in_parts else self._execute, packed))
        if not self.lazy and not packed.plan.needs_host and not self.in_parts:
            self.run_until(packed)
        return packed

    def queue_end(self, launched: FakeLaunched) -> None:
        self._queue.append(partial(self._end, launched))

    def run_until(self, launched: FakeLaunched) -> None:
        """Execute the queue up to and including `launched`."""
        while launched.result is None:
            self._queue.popleft()()

    # --- one step, in the order of the plan's fields -------------------------------------------

    def _execute(self, step: FakeLaunched) -> None:
        self._begin(step)
        self._end(step)

    def _end(self, step: FakeLaunched) -> None:
        step.result = StepResult(self._sample(step, step.contexts))

    def _begin(self, step: FakeLaunched) -> None:
        plan = step.plan
        for page, host_page in plan.swap_out:
            self._host_pages[host_page] = list(self._pages[page])
        copies = [(list(self._pages[source]), target) for source, target in plan.page_copies]
        for content, target in copies:  # all reads before all writes, as KVCache.copy_pages
            self._pages[target] = content
        for host_page, page in plan.swap_in:
            self._pages[page] = list(self._host_pages[host_page])
        for init in plan.slot_inits:
            self._slots[init.slot] = _Slot(
                seed=init.seq.seed,
                first=first_cell(init.seq.request.cache_key),
                last_token=init.token_ids[-1],
                position=init.num_computed,
                tables=[list(pages) for pages in init.block_ids],
            )
        for slot, index, page, group in plan.page_appends:
            table = self._slots[slot].tables[group]
            assert index <= len(table), f"slot {slot}: entry {index} skips one"
            table[index : index + 1] = [page]
        moves = plan.states
        for slot_id, host_row in moves.swap_out:
            self._host_states[host_row] = self._states[slot_id]
        for slot_id, row in moves.save:
            self._states[row] = self._states[slot_id]
        for row, slot_id in moves.restore:
            self._states[slot_id] = self._states[row]
        for host_row, slot_id in moves.swap_in:
            self._states[slot_id] = self._host_states[host_row]
        step.contexts = self._forward(plan)
        for parent, child in moves.fork:
            self._states[child] = self._states[parent]

    def _forward(self, plan: StepPlan) -> list[tuple[int, Seen]]:
        """Each sample's next position and what it sees, read back from the pages after all
        writes.

        Rows run in random order: none may depend on another of the same step.
        """
        inputs: list[tuple[int, int, list[int]]] = []  # (slot, start, tokens), decodes first
        decodes = zip(plan.decodes.slots.tolist(), plan.decodes.positions.tolist(), strict=True)
        for slot_id, position in decodes:
            slot = self._slots[slot_id]
            assert slot.position == position, "device and host disagree on a position"
            inputs.append((slot_id, position, [slot.last_token]))
        for row in plan.prefills:
            for pages, table in zip(row.block_ids, self._slots[row.slot].tables, strict=True):
                assert pages == table[: len(pages)], "row and slot: other pages"
            inputs.append((row.slot, row.start, row.token_ids))
        saves = {row.slot: dict(row.saves) for row in plan.prefills}
        written: set[tuple[int, int]] = set()
        for slot_id, start, token_ids in self._rng.sample(inputs, len(inputs)):
            for position, token_id in enumerate(token_ids, start):
                cells = kv_cells(token_id, self._seen(slot_id, position, position))
                for group, cell in enumerate(cells):
                    place = self._place(slot_id, group, position)
                    assert place not in written, f"two rows write to page and offset {place}"
                    written.add(place)
                    self._pages[place[0]][place[1]] = cell
                if self._has_states:
                    moved = moved_state(self._states[slot_id], token_id)
                    row = saves.get(slot_id, {}).get(position - start + 1, slot_id)
                    self._states[row] = self._states[slot_id] = moved
        ends = [(slot, start + len(ids)) for slot, start, ids in inputs]
        contexts = [(end, self._seen(slot, end - 1, end)) for slot, end in ends]
        num_samples = [1] * len(plan.decodes) + [len(row.samples) for row in plan.prefills]
        return [c for c, n in zip(contexts, num_samples, strict=True) for _ in range(n)]

    def _sample(self, step: FakeLaunched, contexts: list[tuple[int, Seen]]) -> list[int]:
        token_ids = []
        assert step.banned is not None, "a step is run that nobody sampled"
        rows = zip(step.sample_slots, contexts, step.banned, strict=True)
        for slot_id, (position, seen), banned in rows:
            slot = self._slots[slot_id]
            assert slot.first == seen[0][0], "a sample in a slot of another request"
            slot.last_token = next_token(seen, slot.seed, banned)
            slot.position = position
            token_ids.append(slot.last_token)
        return token_ids

    def _seen(self, slot_id: int, position: int, end: int) -> Seen:
        """The cells before `end` that a slot's token at `position` sees."""
        groups = (
            tuple(self._cell(slot_id, group, i) for i in range(seen_from(window, position), end))
            for group, window in enumerate(self._windows)
        )
        state = self._states[slot_id] if self._has_states else ZERO_STATE
        return (self._slots[slot_id].first, state), *groups

    def _cell(self, slot_id: int, group: int, position: int) -> int:
        page, offset = self._place(slot_id, group, position)
        return self._pages[page][offset]

    def _place(self, slot_id: int, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        page = self._slots[slot_id].tables[group][index]
        assert page != PADDING_PAGE, "a live row reads or writes the padding page"
        return page, offset

    def _garbage(self) -> list[int]:
        return [self._rng.getrandbits(60) for _ in range(self.block_size)]


def check_plan(plan: StepPlan) -> None:
    """Assert what a device may rely on: within one step no target twice, nothing into padding."""
    slots = plan.decodes.slots.tolist() + [row.slot for row in plan.prefills]
    _assert_distinct("a slot's row", slots)
    _assert_distinct("an initialised slot", [init.slot for init in plan.slot_inits])
    assert PADDING_SLOT not in slots and all(seq.slot for seq in plan.sampled)
    _assert_distinct("a page of swap_out", [host_page for _, host_page in plan.swap_out])
    targets = [page for _, page in plan.page_copies] + [page for _, page in plan.swap_in]
    _assert_distinct("a page of copies and swap_in", targets)
    entries = [
        (init.slot, group, i)
        for init in plan.slot_inits
        for group, pages in enumerate(init.block_ids)
        for i in range(len(pages))
    ]
    entries += [(append.slot, append.group, append.block_index) for append in plan.page_appends]
    _assert_distinct("an entry of a block table", entries)
    assert not (plan.swap_out and plan.swap_in), "host pages move both ways in one step"
    _assert_distinct("a state before the step", [to for _, to in moves_in(plan)])
    saves = [state_row for row in plan.prefills for _, state_row in row.saves]
    saved = {state_row for _, state_row in plan.states.save}
    assert not saved & {row for row, _ in plan.states.restore}, "a snapshot is lost before its use"
    assert {slot for slot, _ in plan.states.save} <= set(plan.decodes.slots.tolist())
    saves += [state_row for _, state_row in plan.states.save]
    _assert_distinct("a snapshot", saves)
    assert not set(saves) & {*slots, PADDING_SLOT}, "a snapshot in a slot"
    for row in plan.prefills:
        assert row.token_ids, "a prefill row without tokens"
        assert all(0 < place <= len(row.token_ids) for place, _ in row.saves)


def moves_in(plan: StepPlan) -> list[tuple[int, int]]:
    """States that are in slots before the forward pass."""
    return [*plan.states.restore, *plan.states.swap_in]


def _assert_distinct(what: str, items: Iterable[object]) -> None:
    seen = list(items)
    assert len(set(seen)) == len(seen), f"{what} twice in one step: {seen}"

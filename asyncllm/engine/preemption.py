"""How a running sequence gives way where pages are short: swapped out, or computed again later.

It does not decide whose turn it is. A swapped sequence keeps what is computed, in host pages; one
that is computed again keeps its tokens alone, and finds of its pages what others left in the cache.
"""

from __future__ import annotations

from asyncllm.config import PreemptionMode
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.running_set import RunningSet
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.step_draft import StepDraft
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.types import Sequence, SequenceStatus, SwapCost


class Preemption:
    """Moves sequences from `running` back to `waiting`, and counts them in `stats`."""

    def __init__(
        self,
        blocks: BlockManager,
        waiting: WaitingQueue,
        running: RunningSet,
        stats: SchedulerStats,
        mode: PreemptionMode,
        swap_cost: SwapCost | None,
    ) -> None:
        """swap_cost: None: whatever can be swapped is, in mode "auto"."""
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._stats = stats
        self._mode = mode
        self._swap_cost = swap_cost

    def preempt(self, seq: Sequence, draft: StepDraft) -> None:
        """Take slot and pages from a running sequence and put it back into the queue."""
        draft.preempted = True
        seq.request.metrics.num_preemptions += 1
        self._running.remove(seq)
        self._blocks.publish(seq)  # what is recomputed may find it
        if self._should_swap(seq):
            draft.swap_out += self._blocks.swap_out(seq)
            seq.status = SequenceStatus.SWAPPED
            self._stats.num_preemptions_swap += 1
        else:
            self._blocks.free(seq)
            seq.num_computed = 0
            seq.status = SequenceStatus.WAITING
            self._stats.num_preemptions_recompute += 1
        self._waiting.add(seq)

    def _should_swap(self, seq: Sequence) -> bool:
        """Whether it can be, and is asked for or costs less time, there and back."""
        if self._mode == "recompute" or not self._blocks.can_swap_out(seq):
            return False
        if self._mode == "swap" or self._swap_cost is None:
            return True
        cost = self._swap_cost
        num_pages = self._blocks.num_blocks(seq.num_computed)
        recompute = self._blocks.num_uncached_tokens(seq) * cost.seconds_per_token
        return 2 * num_pages * cost.seconds_per_page < recompute

"""Preemption: a running sequence loses its slot and pages and is queued again.

It is swapped out, by copies to the host within the next step, or recomputed later, where its pages
may still be in the prefix cache. In mode "auto" the measured costs decide (`SwapCost`).
"""

from __future__ import annotations

from asyncllm.config import PreemptionMode
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.prefill_planner import StepDraft
from asyncllm.engine.running_set import RunningSet
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.types import Sequence, SequenceStatus, SwapCost


class Preemption:
    """Uses the scheduler's pages and queue; counts preemptions in `stats`."""

    def __init__(
        self,
        blocks: BlockManager,
        waiting: WaitingQueue,
        stats: SchedulerStats,
        mode: PreemptionMode,
        swap_cost: SwapCost | None,
    ) -> None:
        """swap_cost: for mode "auto"; None swaps whenever there is room."""
        self._blocks, self._waiting = blocks, waiting
        self._stats, self._mode, self._swap_cost = stats, mode, swap_cost

    def preempt(self, seq: Sequence, running: RunningSet, draft: StepDraft) -> None:
        """Take slot and pages from a sequence of `running` and queue it."""
        draft.preempted = True
        seq.request.metrics.num_preemptions += 1
        slot, states = seq.slot, self._blocks.states
        running.remove(seq)
        self._blocks.publish(seq)  # recomputing it may hit the prefix cache
        if self._should_swap(seq):
            draft.swap_out += self._blocks.swap_out(seq)
            if states is not None:
                draft.states.swap_out.append((slot, states.swap_out(seq.seq_id)))
            seq.status = SequenceStatus.SWAPPED
            self._stats.num_preemptions_swap += 1
        else:
            self._blocks.free(seq)
            seq.num_computed = 0
            seq.status = SequenceStatus.WAITING
            self._stats.num_preemptions_recompute += 1
        self._waiting.add(seq)

    def _should_swap(self, seq: Sequence) -> bool:
        """Whether there is room to swap it, and swapping out and in is faster than recomputing."""
        if self._mode == "recompute" or not self._blocks.can_swap_out(seq):
            return False
        if self._mode == "swap" or self._swap_cost is None:
            return True
        cost = self._swap_cost
        num_pages = self._blocks.num_pages_to_swap(seq)
        recompute = self._blocks.num_uncached_tokens(seq) * cost.seconds_per_token
        one_way = num_pages * cost.seconds_per_page + cost.seconds_per_state
        return 2 * one_way < recompute

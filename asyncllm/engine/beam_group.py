"""A beam search among the scheduler's sequences: which of them carries which beam.

A request of width w has w sequences. At first one of them computes the prompt; from then on up to w
are beams, each with the pages of its text, shared as far as the texts are the same. A beam that has
been sampled from is held until the others are, too, wherever preemption has put them. Then the
search chooses: of the beams that continue one parent the first keeps its sequence, the others are
forks of it (copy-on-write) in sequences that have lost their beam. Where either has no pages or no
slot, the fork is computed again instead, which the prefix cache makes cheap.
"""

from __future__ import annotations

from asyncllm.engine.beam_search import BeamSearch
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.running_set import RunningSet
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.types import Request, Sequence, SequenceStatus, TokenLogprobs


class BeamGroup:
    """One request's beams."""

    def __init__(
        self, request: Request, blocks: BlockManager, waiting: WaitingQueue, running: RunningSet
    ) -> None:
        params = request.sampling_params
        self.search = BeamSearch(
            width=params.num_sequences,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_top_logprobs=request.num_shown_logprobs or 0,
        )
        self._request = request
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._beams = request.sequences[:1]  # of search.live, in its order
        self._rows: dict[int, TokenLogprobs] = {}  # of beams that are held, by seq_id

    def take(self, seq: Sequence, row: TokenLogprobs) -> None:
        """What may follow this beam. After the last beam's: all go one token on."""
        assert not seq.held, f"sequence {seq.seq_id} was sampled while it was held"
        if seq.status is not SequenceStatus.RUNNING:
            self._waiting.remove(seq)
        seq.held = True
        if seq.status is not SequenceStatus.RUNNING:
            self._waiting.add(seq)
        self._rows[seq.seq_id] = row
        if len(self._rows) == len(self._beams):
            parents = self.search.advance([self._rows[beam.seq_id] for beam in self._beams])
            self._rows.clear()
            if not self.search.is_over:
                self._go_on([self._beams[parent] for parent in parents])

    def _go_on(self, parents: list[Sequence]) -> None:
        """parents: those of the search's live beams, in their order."""
        kept = set(parents)
        self._waiting.take_siblings(self._request.sequences[0])
        spares = [seq for seq in self._request.sequences if seq not in kept]
        for seq in spares:
            self._release(seq)
        beams: list[Sequence] = []
        for parent in parents:
            if parent in kept:
                kept.remove(parent)
                beams.append(parent)
            else:
                beams.append(self._fork(parent, spares.pop(0)))
        for seq, beam in zip(beams, self.search.live, strict=True):
            seq.token_ids.append(beam.token_id)
            self._resume(seq)
        self._waiting.hold_back(spares)
        self._beams = beams

    def _release(self, seq: Sequence) -> None:
        """`seq` carries no beam any more: it has no slot and no pages."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        self._blocks.forget(seq)
        seq.status, seq.held = SequenceStatus.WAITING, False
        seq.num_computed = 0

    def _fork(self, parent: Sequence, child: Sequence) -> Sequence:
        """`child` as a second `parent`, tokens and, if it can be, pages."""
        child.token_ids = list(parent.token_ids)
        child.num_prefill, child.num_cached_tokens = parent.num_prefill, parent.num_cached_tokens
        if parent.status is SequenceStatus.RUNNING and self._running.num_free_slots:
            self._blocks.fork(parent, child)
            child.num_computed = parent.num_computed
            self._running.add(child)
            self._running.forked |= {parent, child}
        return child

    def _resume(self, seq: Sequence) -> None:
        seq.held = False
        if seq.status is SequenceStatus.RUNNING:
            self._running.rewritten.add(seq)
        else:
            self._waiting.add(seq)

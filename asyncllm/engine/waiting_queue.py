"""The sequences that wait for a slot: new and preempted ones.

They are in scheduling order, by the scheduler's `key`: a preempted sequence keeps its place. The
queue counts its prompt tokens, as the chunk of a step depends on them. It also holds back siblings
(n > 1), until the first sequence of their request has computed the prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from asyncllm.types import Sequence


class WaitingQueue:
    """Sequences that are WAITING or SWAPPED."""

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._seqs: list[Sequence] = []
        self._key = key
        self._siblings: dict[str, list[Sequence]] = {}  # by request
        self.num_prompt_tokens = 0  # of all sequences, cached tokens included

    @property
    def head(self) -> Sequence:
        return self._seqs[0]

    def add(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=self._key)
        self.num_prompt_tokens += len(seq.request.prompt_token_ids)

    def remove(self, seq: Sequence) -> None:
        """Remove `seq` from the queue, or from the siblings held back."""
        siblings = self._siblings.get(seq.request.request_id, [])
        if seq in siblings:
            siblings.remove(seq)
            if not siblings:
                del self._siblings[seq.request.request_id]
            return
        self._seqs.remove(seq)
        self.num_prompt_tokens -= seq.num_prompt_tokens

    def hold_back(self, siblings: list[Sequence]) -> None:
        """Hold sequences of a request back until `take_siblings`."""
        for seq in siblings:
            self._siblings.setdefault(seq.request.request_id, []).append(seq)

    def take_siblings(self, seq: Sequence) -> list[Sequence]:
        """The siblings of `seq` that were held back."""
        return self._siblings.pop(seq.request.request_id, [])

    def held_back(self) -> list[Sequence]:
        return [seq for siblings in self._siblings.values() for seq in siblings]

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def check_integrity(self) -> None:
        keys = [self._key(seq) for seq in self._seqs]
        assert keys == sorted(keys), "the queue is out of order"
        num_tokens = sum(seq.num_prompt_tokens for seq in self._seqs)
        assert all(self._siblings.values()), "nobody is held back, and remembered"
        assert num_tokens == self.num_prompt_tokens, "the queue has miscounted its tokens"

"""How engines that share experts agree on each step, so that all of them do it at the same time.

    engine 0   plan 7 | say what it needs | hear the others ... | launch 7
    engine 1                 hear engine 0 | nothing to plan: say so | launch 7, padding alone

A round is one step. Whoever has work says what it needs of the next round; who has none waits until
another has spoken, and then says that. Whoever has heard all knows the step, since all compute the
same from the same words; so an engine is ahead of another by one word at most, and when nobody has
work nobody speaks. It is said while the step before runs. Knows no sockets and no steps; a word
that does not fit the others' ends the engine, and so all of them (supervisor.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from asyncllm.engine.data_parallel.wire import Message
from asyncllm.step_plan import CommonStep, StepNeed


class OutOfStepError(RuntimeError):
    """The engines do not step together any more: who is the reason, and why."""


class Said(Message):
    """`last`: the step of the round before."""

    round: int
    need: StepNeed
    lead_seconds: float  # that its host takes to plan and launch a step
    last: CommonStep | None


class Lockstep:
    """One engine's part. `tell` gives a word to each of the others, `wake` is called when one of
    them has spoken first."""

    def __init__(self, engine: int, others: Iterable[int], tell: Callable[[Said], object]) -> None:
        self.wake: Callable[[], object] = lambda: None
        self.round = 0
        self.last: CommonStep | None = None  # of the round before; who launches it sets it
        self._engine, self._tell = engine, tell
        self._heard: dict[int, deque[Said]] = {other: deque() for other in others}
        self._own: Said | None = None  # in the round that is being agreed on
        self._agreed: asyncio.Future[list[Said]] | None = None
        self.lost: str | None = None  # which engine, and why

    @property
    def is_begun(self) -> bool:
        """Whether another engine waits for this one's word."""
        return any(self._heard.values())

    @property
    def missing(self) -> list[int]:
        """Those whose word the next step waits for."""
        return [engine for engine, words in self._heard.items() if not words]

    def say(self, need: StepNeed, lead_seconds: float) -> asyncio.Future[list[Said]]:
        """Say what this engine needs of the next step. The words of all, by engine, once they are
        there; raises `OutOfStepError`."""
        assert self._own is None, "it has spoken in this round"
        self._own = Said(self.round, need, lead_seconds, self.last)
        self._agreed = asyncio.get_running_loop().create_future()
        self._tell(self._own)
        if self.lost is not None:
            self._agreed.set_exception(OutOfStepError(self.lost))
        self._settle()
        return self._agreed

    def hear(self, engine: int, said: Said) -> None:
        """Another engine's word, in the order of its words."""
        self._heard[engine].append(said)
        if self._own is None:
            self.wake()
        else:
            self._settle()

    def lose(self, engine: int, why: str) -> None:
        """No word will come from it any more: so no step can be agreed on. While there is no work,
        it is for who started the engines to see it."""
        self.lost = self.lost or f"engine {engine} is lost: {why}"
        if self._agreed is not None and not self._agreed.done():
            self._agreed.set_exception(OutOfStepError(self.lost))

    def _settle(self) -> None:
        assert self._own is not None and self._agreed is not None
        if self.missing or self._agreed.done():
            return
        words = {engine: words.popleft() for engine, words in self._heard.items()}
        own, agreed = self._own, self._agreed
        self._own, self.round = None, self.round + 1
        for engine, said in words.items():
            if (said.round, said.last) != (own.round, own.last):
                agreed.set_exception(
                    OutOfStepError(
                        f"engine {engine} is at step {said.round} after {said.last}, engine "
                        f"{self._engine} at step {own.round} after {own.last}"
                    )
                )
                return
        words[self._engine] = own
        agreed.set_result([words[engine] for engine in sorted(words)])

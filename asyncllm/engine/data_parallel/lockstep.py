"""How engines that share experts agree on each step, which all of them run at the same time.

    engine 0   plan 7 | send its need | receive the others' | launch 7
    engine 1                  receive engine 0's | nothing to plan: send that | launch 7, padding

Each step is a round: every engine sends its need to every other engine, and knows the step when it
has received all needs, as all compute the same step from them. An engine with work begins the
round; one without work sends its need only after it has received another's. So without work nothing
is sent, and no engine is ahead of another by more than one message. This module knows neither
sockets nor steps. A message that does not fit ends the engine, and with it all engines
(supervisor.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from asyncllm.engine.data_parallel.wire import Message
from asyncllm.step_plan import CommonStep, StepNeed


class OutOfStepError(RuntimeError):
    """The engines cannot go on together. The text names the engine that is the cause, and why."""


class Said(Message):
    """One engine's message in a round. `last`: the step of the round before."""

    round: int
    need: StepNeed
    lead_seconds: float  # that its host takes to plan and launch a step
    last: CommonStep | None


class Lockstep:
    """The state of one engine. `tell` sends a message to all others. `wake` is called when another
    engine has begun a round."""

    def __init__(self, engine: int, others: Iterable[int], tell: Callable[[Said], object]) -> None:
        self.wake: Callable[[], object] = lambda: None
        self.round = 0
        self.last: CommonStep | None = None  # set by the caller when it knows a round's step
        self.lost: str | None = None  # the first engine that was lost, and why
        self._engine, self._tell = engine, tell
        self._heard: dict[int, deque[Said]] = {other: deque() for other in others}
        self._own: Said | None = None  # sent in the current round
        self._agreed: asyncio.Future[list[Said]] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether another engine waits for this one's message."""
        return any(self._heard.values())

    @property
    def missing(self) -> list[int]:
        """The engines whose messages are missing in this round."""
        return [engine for engine, messages in self._heard.items() if not messages]

    def say(self, need: StepNeed, lead_seconds: float) -> asyncio.Future[list[Said]]:
        """Send this engine's message. The result is all engines' messages, in the order of the
        engines; or `OutOfStepError`."""
        assert self._own is None, "a round has one message of each engine"
        self._own = Said(self.round, need, lead_seconds, self.last)
        self._agreed = asyncio.get_running_loop().create_future()
        self._tell(self._own)
        if self.lost is not None:
            self._agreed.set_exception(OutOfStepError(self.lost))
        self._settle()
        return self._agreed

    def hear(self, engine: int, said: Said) -> None:
        """Take the next message of another engine."""
        self._heard[engine].append(said)
        if self._own is None:
            self.wake()
        else:
            self._settle()

    def lose(self, engine: int, why: str) -> None:
        """No further message will come from this engine. Fails this round, or the next one; without
        work it is up to the engines' parent to notice."""
        self.lost = self.lost or f"engine {engine} is lost: {why}"
        if self._agreed is not None and not self._agreed.done():
            self._agreed.set_exception(OutOfStepError(self.lost))

    def _settle(self) -> None:
        assert self._own is not None and self._agreed is not None
        if self.missing or self._agreed.done():
            return
        said = {engine: messages.popleft() for engine, messages in self._heard.items()}
        own, agreed = self._own, self._agreed
        self._own, self.round = None, self.round + 1
        for engine, other in said.items():
            if (other.round, other.last) != (own.round, own.last):
                agreed.set_exception(
                    OutOfStepError(
                        f"engine {engine} is at step {other.round} after {other.last}, engine "
                        f"{self._engine} at step {own.round} after {own.last}"
                    )
                )
                return
        said[self._engine] = own
        agreed.set_result([said[engine] for engine in sorted(said)])

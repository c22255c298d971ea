"""The host's cost of a token in function calls: the same on every machine.

The path is the real one from plan to transport: scheduler, step builder, output processor, server,
SSE frames. Calls per token have a ceiling, and grow neither with the batch nor with the length of
the texts; nothing is made per token that the event loop has to carry.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.config import EngineArgs
from asyncllm.engine.output_processor import OutputProcessor
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.server.chat.response import ChatView
from asyncllm.server.http.sse import STREAMS_PER_SLICE, FrameQueue, SSEStream
from asyncllm.server.inputs.call import Call
from asyncllm.server.outputs.chunks import ChunkStream
from asyncllm.server.outputs.generation import Generation
from asyncllm.server.protocol import ChatRequest
from asyncllm.types import StepResult
from asyncllm.worker.step_packer import StepPacker
from tests.engine.builders import finish, make_request, make_scheduler

BLOCK_SIZE = 16
STEPS = BLOCK_SIZE  # measured: every row takes a page in one of them
CALLS_PER_TOKEN = {  # what they are, and about a tenth of head room
    "plan": 1.1,
    "build": 0.1,
    "finish": 3.4,
    "text": 3.3,
    "emit": 8.9,
    "write": 10.5,
}


class Transport:
    def __init__(self) -> None:
        self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.num_writes += 1

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Host:
    """`num_rows` streams of a server, stepped by hand, without a device."""

    def __init__(self, num_rows: int) -> None:
        path = EngineArgs("tiny").create_engine_config().tokenizer_path
        assert path is not None
        tokenizer = Tokenizer.from_folder(path, None)
        self.token_id = tokenizer.encode("Hello")[-1]
        num_pages = num_rows * 100
        self.scheduler = make_scheduler(
            num_pages, BLOCK_SIZE, max_num_seqs=num_rows, max_num_batched_tokens=8192
        )
        self.packer = StepPacker(num_rows + 1, BLOCK_SIZE)
        self.outputs = OutputProcessor(tokenizer)
        self.frames = FrameQueue()
        self.transports = [Transport() for _ in range(num_rows)]
        self.calls: collections.Counter[str] = collections.Counter()
        self.num_steps = 0
        self._phase = ""
        for number, transport in enumerate(self.transports):
            self._add_stream(number, transport)

    def _add_stream(self, number: int, transport: Transport) -> None:
        request = make_request(number + 1, [5, 6, 7], max_tokens=1500, temperature=0)
        call = Call("chatcmpl-0", "tiny", [request.prompt_token_ids], request.sampling_params)
        http: Any = SimpleNamespace(transport=transport)
        stream = SSEStream(http, self.frames)
        stream._transport = http.transport  # as `open` does
        names: Any = None  # nobody asks for logprobs
        view = ChatView(ChatRequest(messages=[]), call, names)
        answer = ChunkStream(stream, call, view, None)
        engine: Any = None  # nothing is aborted
        generation = Generation(engine, call, lambda: answer)

        def sink(output: Any) -> None:
            generation._receive(request.request_id, 0, output)

        self.outputs.add(request, sink, generation._text_sink(0))
        self.scheduler.add(request)

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await self.step()

    async def step(self) -> None:
        self._phase = "plan"
        plan = self.scheduler.plan()
        assert plan is not None
        self._phase = "build"
        self.packer.pack(plan)
        self._phase = ""
        result = StepResult([self.token_id] * len(plan.sampled))
        self._phase = "finish"
        updates = self.scheduler.finish_step(plan, result)
        self._phase = "text"
        assert self.outputs.process(updates, {}, now=float(self.num_steps)) == []
        self._phase = "write"
        for _ in range(-(-len(self.transports) // STREAMS_PER_SLICE)):
            await asyncio.sleep(0)
        self._phase = ""
        self.outputs.take_iteration_stats()
        self.num_steps += 1

    async def count_calls(self) -> dict[str, float]:
        """Calls of Python and C functions per phase and token, over STEPS steps."""
        self.calls.clear()
        sys.setprofile(self._profile)
        try:
            await self.run(STEPS)
        finally:
            sys.setprofile(None)
        num_tokens = STEPS * len(self.transports)
        return {phase: self.calls[phase] / num_tokens for phase in CALLS_PER_TOKEN}

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call") and self._phase:
            name = frame.f_code.co_name
            if event == "call" and name == "_emit_all":
                self._phase = "emit"
            self.calls[self._phase] += 1


async def running(num_rows: int) -> Host:
    """All rows decode, and the first pages are full."""
    host = Host(num_rows)
    await host.run(STEPS + 4)
    return host


@pytest.mark.slow
def test_calls_per_token_have_a_ceiling() -> None:
    calls = asyncio.run(_calls(256))
    for phase, ceiling in CALLS_PER_TOKEN.items():
        assert 0 < calls[phase] <= ceiling, f"{phase}: {calls[phase]:.2f} calls per token"


@pytest.mark.slow
def test_calls_per_token_do_not_grow_with_the_batch() -> None:
    few, many = asyncio.run(_calls(64)), asyncio.run(_calls(256))
    for phase in CALLS_PER_TOKEN:
        assert many[phase] <= 1.05 * few[phase] + 0.05, f"{phase}: {few[phase]} to {many[phase]}"


@pytest.mark.slow
def test_who_leaves_and_who_joins_costs_no_call_per_row() -> None:
    few, many = calls_to_plan_changes(64), calls_to_plan_changes(256)
    assert many - few < 1.2 * (256 - 64), "about 14 for each row that begins a page, no other"


def calls_to_plan_changes(num_rows: int) -> float:
    """Calls per plan, mean of STEPS, where in each step one row is gone and another is new."""
    scheduler = make_scheduler(
        num_rows * 100, BLOCK_SIZE, max_num_seqs=num_rows, max_num_batched_tokens=8192
    )
    for number in range(num_rows):
        scheduler.add(make_request(number, [5] * (1 + number % BLOCK_SIZE), max_tokens=1500))
    num_calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    for step in range(2 * STEPS):
        if step >= STEPS:
            scheduler.abort(f"r{step * 3}")
            scheduler.add(make_request(num_rows + step, [5], max_tokens=1500))
            sys.setprofile(count)
        try:
            plan = scheduler.plan()
        finally:
            sys.setprofile(None)
        assert plan is not None and len(plan.sampled) == num_rows
        finish(scheduler, plan)
    return num_calls / STEPS


CALLS_TO_FIRST_STEP = {1: 204, 8: 1003}  # prompts of 128 tokens


@pytest.mark.parametrize("num_prompts", CALLS_TO_FIRST_STEP)
def test_what_an_idle_engine_does_before_the_device_has_prompts_has_a_ceiling(
    num_prompts: int,
) -> None:
    """Plan and arrays; blocks are hashed for the prefix cache when the device is at work."""
    scheduler = make_scheduler(1000, BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=8192)
    packer = StepPacker(9, BLOCK_SIZE)
    calls: list[int] = []
    num_calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    for burst in range(3):
        for number in range(num_prompts):
            prompt = range(300 + burst, 428 + burst)
            scheduler.add(make_request(8 * burst + number, [number, *prompt][:128], max_tokens=1))
        num_calls = 0
        sys.setprofile(count)
        try:
            plan = scheduler.plan()
            assert plan is not None
            packer.pack(plan)
        finally:
            sys.setprofile(None)
        calls.append(num_calls)
        finish(scheduler, plan)
        assert scheduler.plan() is None
    fewest = min(calls[1:])  # the collector may run in one of them, and end what others left
    assert fewest <= CALLS_TO_FIRST_STEP[num_prompts], f"{fewest} calls"


async def _calls(num_rows: int) -> dict[str, float]:
    return await (await running(num_rows)).count_calls()


@pytest.mark.slow
def test_cost_does_not_grow_with_the_history() -> None:
    async def test() -> None:
        host = await running(64)
        short, short_bytes = await host.count_calls(), await bytes_per_step(host)
        await host.run(1000)
        long, long_bytes = await host.count_calls(), await bytes_per_step(host)
        for phase in CALLS_PER_TOKEN:
            assert long[phase] <= 1.05 * short[phase], f"{phase}: {short[phase]} to {long[phase]}"
        assert long_bytes <= 1.25 * short_bytes, "something copies the text so far"

    asyncio.run(test())


async def bytes_per_step(host: Host) -> int:
    """A step's memory at its peak; the least of STEPS, in which no list happened to grow."""
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(STEPS):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            await host.step()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return min(peaks)
    finally:
        tracemalloc.stop()


def test_one_write_per_stream_and_step() -> None:
    async def test() -> None:
        host = await running(64)
        before = [transport.num_writes for transport in host.transports]
        await host.run(STEPS)
        after = [transport.num_writes for transport in host.transports]
        assert [b - a for a, b in zip(before, after, strict=True)] == [STEPS] * 64

    asyncio.run(test())


def test_nothing_is_scheduled_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task, no future, no timer; a callback per slice of streams, and the test's own turns."""
    made: collections.Counter[str] = collections.Counter()

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return method(*args, **options)

        return call

    async def test() -> None:
        host = await running(256)
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            for name in ("create_future", "create_task", "call_soon", "call_later", "call_at"):
                patch.setattr(loop, name, counted(name, getattr(loop, name)))
            await host.run(STEPS)

    asyncio.run(test())
    num_slices = STEPS * 256 // STREAMS_PER_SLICE
    num_turns = num_slices  # that `step` gives them
    assert made == {"call_soon": num_slices + num_turns}

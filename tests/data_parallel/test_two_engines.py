"""Two engines behind one face, in one process or in two: answers are one engine's."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    CompletionOutput,
    InvalidRequestError,
    Logprob,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
from asyncllm.engine.data_parallel.group import EngineGroup
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.logprobs import LazyPromptLogprobs
from asyncllm.errors import EngineDeadError, RequestFailedError
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.engine.adapter_files import write_tiny_adapter
from tests.engine.test_async_engine import ENDLESS, GREEDY, small_engine
from tests.waiting import run, until

PROMPTS = [f"Once upon a time {i}" for i in range(8)]
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=5, max_tokens=12, n=2, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1),
    "structured": SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-c]{3,5}")
    ),
    "beams": SamplingParams(n=2, use_beam_search=True, max_tokens=6),
}


async def answers(engine: AsyncLLMEngine, params: SamplingParams) -> list[Any]:
    outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
    return [
        (o.prompt, o.prompt_token_ids, rounded(o.prompt_logprobs), rounded(o.outputs))
        for o in outputs
    ]


def rounded(value: Any) -> Any:
    """Log-probabilities depend on the batch in their last digits."""
    if isinstance(value, CompletionOutput | Logprob):
        return rounded(asdict(value))
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple | LazyPromptLogprobs):
        return [*map(rounded, value)]
    return round(value, 3) if isinstance(value, float) else value


def two_engines(backend: str = "uni", **changes: Any) -> AsyncLLMEngine:
    return small_engine(data_parallel_size=2, data_parallel_backend=backend, **changes)


both = pytest.mark.parametrize("backend", ["uni", pytest.param("mp", marks=pytest.mark.slow)])


def group_of(engine: AsyncLLMEngine) -> EngineGroup:
    group = engine._running()
    assert isinstance(group, EngineGroup)
    return group


@both
def test_answers_equal_one_engines(backend: str) -> None:
    async def main() -> None:
        async with small_engine() as one:
            expected = {name: await answers(one, params) for name, params in KINDS.items()}
        async with two_engines(backend) as two:
            for name, params in KINDS.items():
                assert await answers(two, params) == expected[name], name
            assert min(r.recorder.generation_tokens for r in two.replicas) > 0
            await until(lambda: not two.stats().num_used_pages)
            two.check_integrity()
            two.check_idle()

    run(main())


@pytest.mark.slow
@both
def test_a_conversation_stays_where_it_is_cached(backend: str) -> None:
    async def main() -> None:
        async with two_engines(backend, max_num_batched_tokens=512) as engine:
            prompts = [[7 + i] * 100 for i in range(4)]
            for prompt in prompts:
                await engine.generate(prompt, GREEDY)
            again = [await engine.generate([*prompt, 9, 9], GREEDY) for prompt in prompts]
            assert all(output.num_cached_tokens == 96 for output in again)
            engine.reset_prefix_cache()
            after = await engine.generate([*prompts[0], 9, 9], GREEDY)
            assert after.num_cached_tokens == 0
            engine.check_idle()

    run(main())


@both
def test_aborts_and_refusals_leave_nothing(backend: str) -> None:
    async def main() -> None:
        async with two_engines(backend) as engine:
            with pytest.raises(InvalidRequestError, match="out of vocabulary"):
                await engine.generate([1 << 30], GREEDY)
            refused = {"max_tokens": 100_000}
            for prompt in ("Hello", [3] * 5):
                with pytest.raises(InvalidRequestError, match="maximum context length"):
                    await engine.generate(prompt, SamplingParams(**refused))
            tasks = [asyncio.ensure_future(_end_of(engine, f"r{i}")) for i in range(6)]
            await until(lambda: engine.stats().num_running == 6)
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.generate("Hello", GREEDY, "r0")
            engine.abort([f"r{i}" for i in range(5)])
            tasks[5].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert ended[:5] == ["abort"] * 5
            await until(lambda: engine.stats().num_running == 0)
            engine.check_integrity()
            engine.check_idle()
            assert sum((r.recorder.aborts for r in engine.replicas), Counter())["application"] == 6

    run(main())


async def _end_of(engine: AsyncLLMEngine, name: str) -> str | None:
    return (await engine.generate("Hello", ENDLESS, name)).outputs[0].finish_reason


@pytest.mark.slow
@both
def test_an_adapter_is_on_all_of_them(backend: str, tmp_path: Path) -> None:
    adapter = LoRARequest("it", lora_path=write_tiny_adapter(tmp_path / "it", 1))

    async def main() -> None:
        async with two_engines(backend, enable_lora=True) as engine:
            await engine.add_lora(adapter)
            assert await engine.list_loras() == [adapter]
            work = (engine.generate(p, GREEDY, lora_request=adapter) for p in PROMPTS)
            texts = [output.outputs[0].text for output in await asyncio.gather(*work)]
            plain = [o.outputs[0].text for o in await asyncio.gather(
                *(engine.generate(p, GREEDY) for p in PROMPTS))]  # fmt: skip
            assert all(a != b for a, b in zip(texts, plain, strict=True))
            assert await engine.remove_lora("it") and not await engine.remove_lora("it")
            assert engine.find_lora("it") is None
            with pytest.raises(ValueError, match="nowhere"):
                await engine.add_lora(LoRARequest("it", lora_path=tmp_path / "nowhere"))
            assert await engine.list_loras() == []
            engine.check_idle()

    run(main())


@pytest.mark.slow
def test_a_request_waits_until_all_engines_have_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it may load the adapter (`generate`), or names one (`add_request`)."""
    adapter = LoRARequest("it", lora_path=write_tiny_adapter(tmp_path / "it", 1))

    async def main() -> None:
        async with two_engines(enable_lora=True) as engine:
            second = group_of(engine).members[1].lora
            add, may_load, ended = second.add, asyncio.Event(), set()

            async def wait_and_add(request: LoRARequest, *, reload: bool = False) -> None:
                await may_load.wait()
                await add(request, reload=reload)

            def sink(output: RequestOutput) -> None:
                if output.finished:
                    ended.add((output.request_id, output.outputs[0].finish_reason))

            monkeypatch.setattr(second, "add", wait_and_add)
            loading = asyncio.ensure_future(engine.add_lora(adapter))
            await until(lambda: engine.find_lora("it"))
            works = [engine.generate(p, GREEDY, lora_request=adapter) for p in PROMPTS]
            named = [
                engine.add_request(f"named {i}", "Hello", GREEDY, sink, lora_request=adapter)
                for i in range(2)
            ]
            asked = asyncio.gather(*works, *named)
            await asyncio.sleep(0.1)
            assert not loading.done() and not asked.done()
            may_load.set()
            await asyncio.gather(loading, asked)
            await until(lambda: len(ended) == 2)
            assert {reason for _, reason in ended} <= {"stop", "length"}
            engine.check_idle()

    run(main())


def test_a_lost_device_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise RuntimeError("the device is gone")

    async def main() -> None:
        async with two_engines() as engine:
            first, second = group_of(engine).members
            tasks = [asyncio.ensure_future(_end_of(engine, f"r{i}")) for i in range(4)]
            await until(lambda: engine.stats().num_running == 4)
            assert isinstance(first, EngineCore) and isinstance(second, EngineCore)
            for name in ("launch", "drain"):
                monkeypatch.setattr(first.worker, name, lost)
            await until(first.health)
            engine.abort(["r0", "r1", "r2", "r3"])
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert Counter(type(end) for end in ended) == {RequestFailedError: 2, str: 2}
            assert engine.health() is None
            assert [r.health() is None for r in engine.replicas] == [False, True]
            before = second.recorder.generation_tokens
            await answers(engine, GREEDY)
            assert second.recorder.generation_tokens - before == len(PROMPTS) * 12
            for name in ("launch", "drain"):
                monkeypatch.setattr(second.worker, name, lost)
            with pytest.raises(RequestFailedError):
                await engine.generate("Hello", GREEDY)
            assert "engine 0: the device is lost" in await engine.wait_failed()
            assert "engine 1" in str(engine.health())
            with pytest.raises(EngineDeadError):
                await engine.generate("Hello", GREEDY)

    run(main())


@pytest.mark.slow
@both
def test_a_snapshot_is_of_both(backend: str) -> None:
    async def main() -> None:
        async with two_engines(backend) as engine:
            await answers(engine, GREEDY)
            ended = {"length": len(PROMPTS)}
            await until(lambda: engine.snapshot().totals.finished.items() >= ended.items())
            await until(lambda: len(engine.snapshot().pages.cells) == 240)  # after a beat
            snapshot = engine.snapshot()
            assert snapshot.totals.generation_tokens == len(PROMPTS) * 12
            assert snapshot.latencies.time_to_first_token.count == len(PROMPTS)
            assert snapshot.pages.num_pages == len(snapshot.pages.cells) == 240
            starts = [step.start for step in snapshot.steps]
            assert starts == sorted(starts)

    run(main())

"""The engine inside somebody's asyncio application: every way a request can begin and end."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from typing import Any

import pytest
import torch

from asyncllm import (
    AsyncLLMEngine,
    ContextLengthError,
    EngineArgs,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    RequestFailedError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from asyncllm.engine import engine_steps, input_processor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.sampling_params import RepetitionDetectionParams
from asyncllm.step_plan import StepPlan
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.waiting import PATIENCE_SECONDS, run, until

SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "swap_space": 0.01,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


def small_engine(**changes: Any) -> AsyncLLMEngine:
    return AsyncLLMEngine("tiny", **SMALL | changes)


async def settle(engine: AsyncLLMEngine) -> None:
    """All in flight ends before a request that comes after it; then nothing may be left."""
    await engine.generate("the last", GREEDY)
    engine.check_idle()


def set_queue_clock_forward(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Requests that wait for their first step have waited so much longer."""
    expire = LiveRequests.expire
    monkeypatch.setattr(LiveRequests, "expire", lambda self, now: expire(self, now + seconds))


def test_gradients_stay_the_applications() -> None:
    """They are off in the engine's own threads alone: others of this process may train."""

    async def main() -> None:
        async with small_engine(model_impl="transformers") as engine:
            assert torch.is_grad_enabled()
            async for _ in engine.generate("Hello", GREEDY):
                assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            assert await asyncio.to_thread(torch.is_grad_enabled)
            weight = torch.ones(2, requires_grad=True)
            (2 * weight).sum().backward()
            assert weight.grad is not None and weight.grad.tolist() == [2, 2]
        assert torch.is_grad_enabled()

    run(main())


def test_a_request_from_another_loop_is_refused_at_once() -> None:
    async def ask(engine: AsyncLLMEngine) -> None:
        with pytest.raises(RuntimeError, match="run_coroutine_threadsafe"):
            await engine.generate("Hello", GREEDY)
        with pytest.raises(RuntimeError, match="run_coroutine_threadsafe"):
            await engine.add_request("one", "Hello", GREEDY, lambda output: None)

    async def main() -> None:
        async with small_engine() as engine:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.to_thread(asyncio.run, ask(engine))
            await settle(engine)

    run(main())


def test_another_loop_is_refused_while_the_engine_starts_and_may_not_close_it() -> None:
    async def ask(engine: AsyncLLMEngine) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for refused in (engine.generate("Hello", GREEDY), engine.start(), engine.aclose()):
                with pytest.raises(RuntimeError, match="run_coroutine_threadsafe"):
                    await refused

    async def main() -> None:
        engine = small_engine()
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        assert engine.health() == "loading"
        await asyncio.to_thread(asyncio.run, ask(engine))
        await starting
        await asyncio.to_thread(asyncio.run, ask(engine))
        await settle(engine)
        await engine.aclose()

    run(main())


def test_parameters_are_those_of_the_call() -> None:
    async def main() -> None:
        engine = small_engine()
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop_token_ids=[])
        generation = engine.generate("Hello", params)  # the engine has not started
        params.max_tokens = 9
        params.stop_token_ids.extend(range(200))  # type: ignore[union-attr]
        assert len((await generation).outputs[0].token_ids) == 3
        await engine.aclose()

    run(main())


@pytest.mark.parametrize(("name", "value"), [("top_p", 7), ("temperature", math.nan), ("n", 0)])
def test_parameters_that_were_changed_are_checked_at_the_call(name: str, value: float) -> None:
    engine = small_engine()
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidRequestError, match=name):
        engine.generate("Hello", params)


def test_parameters_inside_parameters_are_checked_and_copied_too() -> None:
    engine = small_engine()
    detection = RepetitionDetectionParams(4, 1, 2)
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(repetition_detection=detection, structured_outputs=wanted)
    own = params.checked_copy()
    wanted.choice = ["other"]
    assert own.structured_outputs is not None and own.structured_outputs.choice == ["yes", "no"]
    wanted.choice = None
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        engine.generate("Hello", params)
    wanted.choice = ["yes"]
    detection.min_count = -3
    assert own.repetition_detection is not None and own.repetition_detection.min_count == 2
    with pytest.raises(InvalidRequestError, match="min_count"):
        engine.generate("Hello", params)


def test_awaited_and_iterated_agree() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            final = await engine.generate("Once upon a time", GREEDY)
            assert final.finished and final.outputs[0].finish_reason == "length"
            assert len(final.outputs[0].token_ids) == 12
            assert final.prompt == "Once upon a time"
            seen: list[RequestOutput] = [
                o async for o in engine.generate("Once upon a time", GREEDY)
            ]
            assert [len(o.outputs[0].token_ids) for o in seen] == list(range(1, 13))
            assert seen[-1].outputs[0].text == final.outputs[0].text
            delta = SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            parts = [o.outputs[0] async for o in engine.generate("Once upon a time", delta)]
            assert "".join(p.text for p in parts) == final.outputs[0].text
            assert [t for p in parts for t in p.token_ids] == final.outputs[0].token_ids
            engine.check_idle()

    run(main())


def test_what_grammars_need_is_made_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def noted(*args: Any) -> object:
        made.append(args)
        return object()

    monkeypatch.setattr(input_processor, "Vocabulary", noted)

    async def main() -> None:
        monkeypatch.setattr(engine_steps, "LONG_QUIET_SECONDS", PATIENCE_SECONDS)
        async with small_engine() as engine:
            await engine.generate("Once", GREEDY)
            assert not made
        monkeypatch.setattr(engine_steps, "LONG_QUIET_SECONDS", 0.0)
        async with small_engine() as engine:
            await until(lambda: made)
            await engine.generate("Once", GREEDY)
            assert len(made) == 1

    run(main())


def test_awaited_again_or_after_a_loop() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            generation = engine.generate("Once upon a time", GREEDY)
            final = await generation
            assert await generation is final
            looped = engine.generate("Once upon a time", GREEDY)
            async for output in looped:
                last = output
            assert (await looped) is last
            assert last.outputs[0].token_ids == final.outputs[0].token_ids
            delta = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
            deltas = engine.generate("a", delta)
            await anext(deltas)
            with pytest.raises(RuntimeError, match="by deltas"):
                await deltas
            refused = engine.generate("")
            with pytest.raises(InvalidRequestError):
                await refused
            with pytest.raises(RuntimeError, match="no final output"):
                await refused

    run(main())


@pytest.mark.slow
def test_all_prompt_forms_are_the_same_prompt() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            text = "What is the capital of France?"
            ids = engine.tokenizer.encode(text)
            forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
            outputs = [await engine.generate(form, GREEDY) for form in forms]
            assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
            chat = await engine.generate([{"role": "user", "content": text}], GREEDY)
            assert chat.prompt_token_ids != ids and len(chat.prompt_token_ids) > len(ids)

    run(main())


def test_metrics_are_ordered() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            m = (await engine.generate("hello", GREEDY)).metrics
            assert m is not None
            times = (
                m.arrival_time,
                m.first_scheduled_time,
                m.first_token_time,
                m.last_token_time,
                m.finished_time,
            )
            assert list(times) == sorted(t for t in times if t is not None)

    run(main())


@pytest.mark.slow
def test_n_answers_share_the_prompt_and_differ() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
            output = await engine.generate("Tell me a story about a fox.", params)
            assert [c.index for c in output.outputs] == [0, 1, 2, 3]
            assert len({tuple(c.token_ids) for c in output.outputs}) == 4
            again = await engine.generate("Tell me a story about a fox.", params)
            assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
            engine.check_idle()

    run(main())


def test_a_seed_is_the_same_alone_and_in_a_batch_and_under_preemption() -> None:
    async def main() -> None:
        params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
        async with small_engine() as engine:
            alone = (await engine.generate("Tell me a story.", params)).outputs[0].token_ids
        async with small_engine(num_gpu_blocks_override=16) as engine:
            others = [engine.generate(f"What is {i} + {i}?", ENDLESS_SAMPLED) for i in range(7)]
            batch = await asyncio.gather(engine.generate("Tell me a story.", params), *others)
            stats = engine.stats()
            assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
            assert batch[0].outputs[0].token_ids == alone
            engine.check_idle()

    run(main())


ENDLESS_SAMPLED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)


def test_leaving_the_loop_early_frees_the_request() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            async for output in engine.generate("hello", ENDLESS):
                if len(output.outputs[0].token_ids) > 3:
                    break
            await settle(engine)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
def test_cancelling_the_awaiting_task_frees_the_request(after_s: float) -> None:
    async def main() -> None:
        async with small_engine() as engine:
            task = asyncio.ensure_future(engine.generate("hello", ENDLESS))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settle(engine)

    run(main())


def test_abort_ends_the_stream_with_a_reason() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            task = asyncio.ensure_future(engine.generate("hello", ENDLESS, request_id="a"))
            await until(lambda: engine.stats().num_running == 1)
            engine.abort("a")
            engine.abort(["a", "never existed"])
            assert (await task).outputs[0].finish_reason == "abort"
            await settle(engine)

    run(main())


def test_refused_requests_name_the_field_and_own_nothing() -> None:
    async def main() -> None:
        async with small_engine(max_model_len=256) as engine:
            cases: list[tuple[Any, SamplingParams, str]] = [
                ([], GREEDY, "prompt"),
                ("x", SamplingParams(max_tokens=4096), "max_tokens"),
                ([10**9], GREEDY, "prompt"),
                ("x", SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
                ("x", SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids"),
                ("x", SamplingParams(logprobs=21), "logprobs"),
            ]
            for prompt, params, param in cases:
                with pytest.raises(InvalidRequestError) as refused:
                    await engine.generate(prompt, params)
                assert refused.value.param == param
            with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
                await engine.generate([1] * 300, GREEDY)
            engine.check_idle()

    run(main())


def test_a_request_that_can_never_fit_is_refused() -> None:
    async def main() -> None:
        async with small_engine(num_gpu_blocks_override=4) as engine:
            assert engine.max_model_len == 64  # four pages of 16
            with pytest.raises(ContextLengthError):
                await engine.generate([1] * 60, SamplingParams(max_tokens=10))
            whole = await engine.generate([1] * 60, SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(whole.outputs[0].token_ids) == 4
            engine.check_idle()

    run(main())


def test_the_queue_has_a_limit() -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1, max_queued_requests=2) as engine:
            running = asyncio.ensure_future(engine.generate("a", ENDLESS, request_id="run"))
            await until(lambda: engine.stats().num_running == 1)
            waiting = [
                asyncio.ensure_future(engine.generate("b", GREEDY, request_id=f"w{i}"))
                for i in range(2)
            ]
            await until(lambda: engine.stats().num_waiting == 2)
            with pytest.raises(QueueFullError, match="max_queued_requests is 2"):
                await engine.generate("c", GREEDY)
            engine.abort(["run", "w0", "w1"])
            await asyncio.gather(running, *waiting)
            await settle(engine)

    run(main())


def test_the_queue_has_a_limit_of_tokens() -> None:
    """At the limit, and one above."""

    async def main() -> None:
        async with small_engine(max_num_seqs=1, max_queued_tokens=40) as engine:
            running = asyncio.ensure_future(engine.generate([1], ENDLESS, request_id="run"))
            await until(lambda: engine.stats().num_running == 1)
            waiting = [
                asyncio.ensure_future(engine.generate([1] * n, GREEDY, request_id=f"w{n}"))
                for n in (25, 15)
            ]
            await until(lambda: engine.stats().num_waiting == 2)
            with pytest.raises(QueueFullError, match="40 prompt tokens wait already"):
                await engine.generate([1], GREEDY)
            engine.abort(["run", "w25"])
            await asyncio.gather(running, *waiting)
            await settle(engine)

    run(main())


def test_a_prompt_over_the_whole_limit_may_wait_alone() -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1, max_queued_tokens=10) as engine:
            output = await engine.generate([1] * 30, GREEDY)
            assert output.finished
            await settle(engine)

    run(main())


def test_a_request_that_waits_too_long_ends_and_running_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1, max_queue_seconds=300) as engine:
            running = asyncio.ensure_future(engine.generate("a", ENDLESS, request_id="run"))
            await until(lambda: engine.stats().num_running == 1)
            late = asyncio.ensure_future(engine.generate("b", GREEDY))
            await until(lambda: engine.stats().num_waiting == 1)
            set_queue_clock_forward(monkeypatch, 301)
            with pytest.raises(QueueFullError, match=r"over max_queue_seconds \(300\)"):
                await late
            assert engine.stats().num_running == 1
            engine.abort("run")
            await running
            await settle(engine)

    run(main())


def test_a_request_id_in_use_is_refused() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            first = asyncio.ensure_future(engine.generate("a", ENDLESS, request_id="same"))
            await until(lambda: engine.stats().num_running == 1)
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.generate("b", GREEDY, request_id="same")
            assert engine.stats().num_running == 1  # the refusal did not hurt the first
            engine.abort("same")
            await first

    run(main())


def test_aclose_ends_streams_with_an_error_and_leaves_no_thread() -> None:
    async def main() -> None:
        threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGINT)
        engine = small_engine()
        await engine.start()
        task = asyncio.ensure_future(engine.generate("a", ENDLESS))
        await until(lambda: engine.stats().num_running == 1)
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(RequestFailedError, match="closed"):
            await task
        with pytest.raises(EngineDeadError):
            await engine.generate("b", GREEDY)
        assert engine.health() == "closed"
        assert not set(threading.enumerate()) - threads
        assert signal.getsignal(signal.SIGINT) is handler

    run(main())


def test_two_engines_in_one_process() -> None:
    async def main() -> None:
        async with small_engine() as one, AsyncLLMEngine("tiny-draft", **SMALL) as two:
            a, b, c = await asyncio.gather(
                one.generate("hello", GREEDY),
                two.generate("hello", GREEDY),
                one.generate("hello", GREEDY),
            )
            assert a.outputs[0].token_ids == c.outputs[0].token_ids
            assert a.outputs[0].token_ids != b.outputs[0].token_ids

    run(main())


def test_from_engine_args_and_lazy_start() -> None:
    async def main() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(model="tiny", **SMALL))
        assert engine.health() == "loading"
        try:
            assert (await engine.generate("hello", GREEDY)).finished
            assert engine.health() is None
            assert engine.startup["kv_pages"] == 120
        finally:
            await engine.aclose()

    run(main())


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with small_engine() as engine:
            expected = (await engine.generate("hello", GREEDY)).outputs[0].token_ids
            core = engine._core
            assert core is not None
            launch = core.worker.launch

            def fail_once(plan: StepPlan) -> Any:
                if plan.decodes:
                    monkeypatch.setattr(core.worker, "launch", launch)
                    raise ArithmeticError("planted")
                return launch(plan)

            monkeypatch.setattr(core.worker, "launch", fail_once)
            with pytest.raises(RequestFailedError, match="planted"):
                await engine.generate("hello", GREEDY)
            engine.check_idle()
            assert (await engine.generate("hello", GREEDY)).outputs[0].token_ids == expected

    run(main())


@pytest.mark.parametrize("lost", [False, True], ids=["step failed", "device lost"])
def test_a_failing_step_hurts_the_queued_only_if_the_device_is_lost(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1) as engine:
            core = engine._core
            assert core is not None
            running = asyncio.ensure_future(engine.generate("a", ENDLESS))
            await until(lambda: engine.stats().num_running == 1)
            queued = asyncio.ensure_future(engine.generate("hello", GREEDY))
            await until(lambda: engine.stats().num_waiting == 1)
            launch = core.worker.launch

            def fail(*_: Any) -> Any:
                monkeypatch.setattr(core.worker, "launch", launch)
                raise ArithmeticError("planted")

            monkeypatch.setattr(core.worker, "launch", fail)
            if lost:
                monkeypatch.setattr(core.worker, "drain", fail)
            with pytest.raises(RequestFailedError, match="planted"):
                await running
            if lost:
                with pytest.raises(RequestFailedError, match="device is lost"):
                    await queued
                assert "device is lost" in await engine.wait_failed()
                assert "device is lost" in (engine.health() or "")
                with pytest.raises(EngineDeadError):
                    await engine.generate("more", GREEDY)
                monkeypatch.undo()
            else:
                assert (await queued).finished
                engine.check_idle()

    run(main())


def test_a_plan_that_raises_midway_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with small_engine(num_gpu_blocks_override=8) as engine:
            core = engine._core
            assert core is not None
            leave_slot = core.live.scheduler.running.remove

            def fail_in_preemption(seq: Any) -> None:
                leave_slot(seq)  # the sequence is in no list any more
                raise ArithmeticError("planted")

            monkeypatch.setattr(core.live.scheduler.running, "remove", fail_in_preemption)
            results = await asyncio.gather(
                *(engine.generate(f"story {i}", ENDLESS_SAMPLED) for i in range(4)),
                return_exceptions=True,
            )
            assert all(isinstance(result, RequestFailedError) for result in results)
            engine.check_idle()
            assert (await engine.generate("hello", GREEDY)).finished

    run(main())


def test_bad_configuration_fails_before_loading() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        AsyncLLMEngine("tiny", max_model_len=10**6)
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        AsyncLLMEngine("tiny", gpu_memory_utilization=1.5)
    with pytest.raises(ModelLoadError, match="neither a folder nor built in"):
        AsyncLLMEngine("no such model")
    with pytest.raises(TypeError, match="no_such_flag"):
        AsyncLLMEngine("tiny", no_such_flag=1)


@pytest.mark.parametrize(
    "flags",
    [{"num_gpu_blocks_override": 10**10}, {"swap_space": 10**8}, {"kv_cache_memory_bytes": 2**60}],
)
def test_a_cache_that_has_no_memory_names_the_flags(flags: dict[str, Any]) -> None:
    async def main() -> None:
        engine = small_engine(**{"num_gpu_blocks_override": None} | flags)
        with pytest.raises(ValueError, match=r"no memory for .* KV pages"):
            await engine.start()
        await engine.aclose()

    run(main())


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    async def main() -> None:
        threads = threading.active_count()
        engine = AsyncLLMEngine("tiny", num_gpu_blocks_override=2, max_model_len=1024)
        with pytest.raises(ValueError, match="needs more KV cache"):
            await engine.start()
        await engine.aclose()
        assert threading.active_count() <= threads + 1  # the one that loaded may be ending

    run(main())

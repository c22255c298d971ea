"""A fault in observing a step costs no answer, and all that was emitted is observed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncllm import RequestFailedError, StructuredOutputsParams
from asyncllm.engine import engine_steps
from asyncllm.engine.step_clock import StepClock
from asyncllm.outputs import RequestOutput
from tests.engine.test_async_engine import GREEDY, settle, small_engine
from tests.waiting import run, until

SHORT = replace(GREEDY, max_tokens=3, ignore_eos=True)


def test_a_step_whose_times_cannot_be_read_is_logged_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does the application's own handler of its loop hear of it, or who asks for a snapshot."""
    finished = StepClock.finished

    def fail_at_last(self: StepClock, plan: Any) -> Any:
        record = finished(self, plan)
        if record.kind == "decode":
            raise ArithmeticError("planted")
        return record

    async def main() -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
        async with small_engine() as engine:
            expected = (await engine.generate("hello", SHORT)).outputs
            await settle(engine)
            steps = [step.kind for step in engine.snapshot().steps]
            with monkeypatch.context() as patch:
                patch.setattr(StepClock, "finished", fail_at_last)
                assert (await engine.generate("hello", SHORT)).outputs == expected
                await settle(engine)
                after = engine.snapshot()
            assert [step.kind for step in after.steps] == [*steps, "prefill", "prefill"]
            assert after.totals.finished["length"] == 4
            tokens = 2 * (SHORT.max_tokens or 0) + 2 * (GREEDY.max_tokens or 0)
            assert after.totals.generation_tokens == tokens
        assert not unhandled

    run(main())
    assert "the times of step" in caplog.text and "planted" in caplog.text


def test_what_clients_were_told_before_a_step_failed_is_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grammars' thread fails before the loop's next turn, in which observers would have heard."""
    plain, num_left = engine_steps.constrain, 3

    def constrain(*args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise ArithmeticError("planted")
        return plain(*args)

    async def main() -> None:
        told: list[RequestOutput] = []
        async with small_engine() as engine:
            monkeypatch.setattr(engine_steps, "constrain", constrain)
            wanted = StructuredOutputsParams(regex="[a-z]{40}")
            params = replace(SHORT, max_tokens=30, structured_outputs=wanted, ignore_eos=False)
            await engine.add_request("r", "hello", params, told.append)
            await until(lambda: told and told[-1].finished)
            assert [len(output.outputs[0].token_ids) for output in told] == [1, 1, 0], "updates"
            assert isinstance(told[-1].error, RequestFailedError)
            assert [step.kind for step in engine.snapshot().steps] == ["prefill", "decode"]
            await settle(engine)

    run(main())

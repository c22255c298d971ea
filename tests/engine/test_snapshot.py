"""The snapshot of a live engine, and of clocks that tests set."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from asyncllm import EngineDeadError, SamplingParams
from asyncllm.engine.page_pool import PagePool
from tests.engine.test_async_engine import ENDLESS, settle, small_engine
from tests.waiting import run, until


def test_snapshot_of_a_live_engine() -> None:
    async def main() -> None:
        engine = small_engine()
        with pytest.raises(EngineDeadError):
            engine.snapshot()
        async with engine:
            quiet = engine.snapshot()
            assert (quiet.running, quiet.waiting, quiet.steps) == (0, 0, [])
            assert quiet.latencies.inter_token.count == 0
            assert quiet.latencies.inter_token.p50_ms is None
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            work = [engine.generate(f"Once upon a time {i}", params) for i in range(3)]
            await asyncio.gather(*work)
            after = engine.snapshot()
            assert after.totals.generation_tokens == 60
            assert after.totals.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
            assert after.latencies.time_to_first_token.count == 3
            assert after.latencies.inter_token.count == 57
            assert after.latencies.e2e.count == after.latencies.queue.count == 3
            assert after.latencies.inter_token.p50_ms is not None
            assert after.rates.generation_tokens_per_s > 0
            assert after.rates.host_us_per_token is not None
            assert 0 < after.rates.device_busy_share <= 1
            assert sum(step.tokens for step in after.steps) >= 60 - 3
            assert after.steps[0].kind == "prefill" and after.steps[-1].kind == "decode"
            assert all(step.duration > 0 for step in after.steps)
            starts = [step.start for step in after.steps]
            assert starts == sorted(starts) and starts[-1] < after.monotonic
            assert engine.snapshot(last_steps=2).steps == after.steps[-2:]
            assert len(after.pages.cells) == after.pages.num_pages == 120
            assert after.pages.num_used == 0 and "u" not in after.pages.cells
            rendered = orjson.loads(orjson.dumps(after))
            assert rendered["steps"][0]["kind"] == "prefill"
            assert rendered["totals"]["generation_tokens"] == 60

    run(main())


def test_an_answer_that_was_given_is_in_the_snapshot() -> None:
    """Observers hear of its last step a turn of the loop later."""

    async def main() -> None:
        async with small_engine() as engine:
            await engine.generate("Once upon a time", SamplingParams(max_tokens=3, ignore_eos=True))
            totals, recorded = engine.snapshot().totals, len(engine.recorder.timeline)
            assert (totals.generation_tokens, totals.finished["length"]) == (3, 1)
            await settle(engine)
            ids = [step.step_id for step in engine.snapshot().steps]
            assert recorded < len(ids) and ids == sorted(set(ids)), "each once"

    run(main())


def test_picture_of_pages() -> None:
    pool = PagePool(6, first=1)
    pages = pool.take(4)
    pool.share(pages[1])
    pool.publish([pages[2]], [b"hash"])
    pool.release(pages[2:])
    assert pool.picture(1) == "usc..."
    assert pool.picture(4) == "u."


def test_every_end_is_counted_at_once() -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1, max_num_batched_tokens=32) as engine:
            running = asyncio.ensure_future(engine.generate("Once upon a time", ENDLESS))
            waiting = asyncio.ensure_future(engine.generate("Once upon a time", ENDLESS))
            await until(lambda: engine.stats().num_waiting and len(engine.recorder.timeline) >= 3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert engine.recorder.aborts == {"application": 1}
            assert engine.recorder.finished["abort"] == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert engine.recorder.finished["abort"] == 2
            await settle(engine)
            steps = engine.replicas[0].work.steps
            # One of the request that ran, one of what `settle` asks.
            assert steps["mixed", "eager"] == 2 and steps["decode", "eager"] >= 1
            assert engine.recorder.host_seconds["launch"] > 0
            assert engine.recorder.host_seconds["finish"] > 0
            assert engine.recorder.prompt_tokens == engine.recorder.prefill_tokens
            last = asyncio.ensure_future(engine.generate("Once upon a time", ENDLESS))
            await until(lambda: engine.stats().num_running)
        await asyncio.gather(last, return_exceptions=True)
        assert engine.recorder.finished["error"] == 1

    run(main())

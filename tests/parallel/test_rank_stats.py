"""/metrics and /health say which rank is late, and which is dead."""

from __future__ import annotations

import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import AsyncLLMEngine
from asyncllm.mesh_config import RankStats
from tests.parallel.engines import SMALL, followers
from tests.server.http_harness import Server, run, serving
from tests.waiting import until


async def by_rank(server: Server, name: str) -> dict[str, float]:
    _, text = await server.get("/metrics")
    return {
        sample.labels["rank"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"asyncllm:{name}"
    }


@pytest.mark.slow
def test_a_rank_that_is_late_and_then_dead() -> None:
    async def test() -> None:
        args = SMALL | {"tensor_parallel_size": 2, "distributed_timeout_seconds": 16}
        engine = AsyncLLMEngine("tiny", **args)
        async with serving(engine) as server:
            (follower,) = followers()
            assert await by_rank(server, "rank_up") == {"0": 1, "1": 1}
            assert await server.get("/health") == (200, "")
            os.kill(follower, signal.SIGSTOP)
            await until(
                lambda: [each.lag_seconds > 2 for each in ranks_of(engine)] == [False, True]
            )
            lags = await by_rank(server, "rank_lag_seconds")
            assert lags["0"] == 0 and 2 < lags["1"] < 16
            status, text = await server.get("/health")
            assert status == 200 and text.startswith("engine 0: rank 1 is ")
            os.kill(follower, signal.SIGCONT)
            await until(lambda: not any(each.lag_seconds for each in ranks_of(engine)))
            assert await server.get("/health") == (200, "")
            os.kill(follower, signal.SIGKILL)
            await until(engine.health)
            assert await by_rank(server, "rank_up") == {"0": 1, "1": 0}
            status, said = await server.get("/health")
            why = "rank 1 of 2 failed: its process ended with -9"
            assert status == 503 and said["error"]["message"].startswith(why)
            await until(lambda: engine.health() is None)  # it is started again
            assert await by_rank(server, "rank_up") == {"0": 1, "1": 1}

    run(test())


def ranks_of(engine: AsyncLLMEngine) -> list[RankStats]:
    (replica,) = engine.replicas
    return list(replica.ranks())

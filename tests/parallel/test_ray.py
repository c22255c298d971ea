"""Ranks that a Ray cluster of two local nodes places, with Ray's own processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, EngineArgs
from asyncllm.errors import ModelLoadError
from tests.parallel.engines import SMALL, expect_same
from tests.parallel.test_joined_ranks import expect_end
from tests.parallel.test_lost_ranks import ENDS_WITHIN_SECONDS
from tests.parallel.test_two_ranks import ASKS, answers
from tests.waiting import run, until

# In the environment of all that a cluster starts: another process of the tests may have one, too.
MARK = "ASYNCLLM_TEST_CLUSTER"
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """With a connection to it, as an application of Ray's has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(MARK, mark())
        ray = pytest.importorskip("ray")
        command = [sys.executable, "-m", "tests.parallel.ray_cluster"]
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as nodes:
            assert nodes.stdin and nodes.stdout
            address = nodes.stdout.readline().strip()
            assert address, "the cluster has not started"
            ray.init(address=address, configure_logging=False)
            yield
            ray.shutdown()


def mark() -> str:
    return f"of {os.getpid()}"


def ranks() -> set[int]:
    """Process ids of this cluster's ranks beyond the first that live."""
    own = f"{MARK}={mark()}\0".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_rank = b"worker.ranks.follower" in (folder / "cmdline").read_bytes()
            is_own = own in (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if is_rank and is_own and state != "Z":
            found.add(int(folder.name))
    return found


def parent(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_the_answers_of_one_rank(cluster: None) -> None:
    """Twice: what the first engine reserved is free again."""
    import ray

    expected = run(answers("tiny", ASKS))

    async def ask() -> None:
        for _ in range(2):
            async with AsyncLLMEngine("tiny", **SMALL, **RAY) as engine:
                assert len(ranks()) == 1
                assert ray.available_resources().get("CPU", 0) == 0
                outputs = await asyncio.gather(*(engine.generate(*each) for each in ASKS))
                engine.check_idle()
            expect_same(outputs, expected)
            await until(lambda: not ranks())

    run(ask())
    assert ray.is_initialized()  # the application's


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "ended with -9"), (signal.SIGSTOP, "has not answered for 3 s")],
)
def test_a_rank_of_ray_that_dies_or_stands_still(
    cluster: None, number: signal.Signals, reason: str
) -> None:
    async def test() -> None:
        args = SMALL | RAY | {"num_gpu_blocks_override": 2000, "distributed_timeout_seconds": 3}
        async with AsyncLLMEngine("tiny", **args) as engine:
            (rank,) = ranks()
            asyncio.get_running_loop().call_later(0.3, os.kill, rank, number)
            await expect_end(engine, reason)
            async with asyncio.timeout(ENDS_WITHIN_SECONDS):
                await until(lambda: not ranks())  # one that stands still, too

    run(test())


@pytest.mark.slow
def test_a_task_of_ray_that_dies(cluster: None) -> None:
    """The rank that it watches ends with it."""

    async def test() -> None:
        args = SMALL | RAY | {"num_gpu_blocks_override": 2000}
        async with AsyncLLMEngine("tiny", **args) as engine:
            (rank,) = ranks()
            task = parent(rank)
            asyncio.get_running_loop().call_later(0.3, os.kill, task, signal.SIGKILL)
            await expect_end(engine, "died")
            assert not ranks()

    run(test())


@pytest.mark.slow
def test_a_cluster_without_room(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.worker.ranks import ray_ranks

    monkeypatch.setattr(ray_ranks, "JOIN_SECONDS", 1.0)

    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **SMALL | RAY | {"tensor_parallel_size": 4})
        with pytest.raises(ModelLoadError, match=r"Ray has no place for 4 ranks of \{'CPU': 1"):
            await engine.start()
        await engine.aclose()
        assert not ranks()

    run(test())


def test_without_ray_the_flag_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = EngineArgs("tiny", device="cpu", **RAY)
    with pytest.raises(ValueError, match=r"ray: pip install 'asyncllm\[ray\]'"):
        args.create_engine_config()

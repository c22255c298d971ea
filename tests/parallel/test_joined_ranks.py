"""Ranks that join by `asyncllm worker`: two "hosts" are two processes that only TCP connects."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.errors import EngineDeadError, ModelLoadError, RequestFailedError
from tests.parallel.engines import SMALL, expect_same, followers
from tests.parallel.test_lost_ranks import ENDS_WITHIN_SECONDS, LONG, collect
from tests.parallel.test_two_ranks import ASKS, answers
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, run, until

SECRET = "7c1f0e4a9d3b5826"


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return str(file)


def free_port() -> int:
    """Joiners are told of it before rank 0 listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def worker(port: int, *flags: str, secret: str = SECRET) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "asyncllm", "worker", "--join", f"127.0.0.1:{port}", *flags]
    variables = os.environ | {"ASYNCLLM_JOIN_SECRET": secret, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=variables, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def hosts(port: int, secret_file: str, **args: Any) -> dict[str, Any]:
    return {"nnodes": 2, "master_port": port, "join_secret_file": secret_file} | args


async def expect_end(engine: AsyncLLMEngine, reason: str) -> None:
    """Two requests that run end within ENDS_WITHIN_SECONDS, and the engine does: ranks that others
    have started do not come back by its doing."""
    running = [asyncio.ensure_future(collect(engine, prompt)) for prompt in ("Once", "The dog")]
    start = time.monotonic()
    for each in running:
        with pytest.raises((RequestFailedError, EngineDeadError)):
            await each
    assert time.monotonic() - start < ENDS_WITHIN_SECONDS
    assert reason in await asyncio.wait_for(engine.wait_failed(), ENDS_WITHIN_SECONDS)
    health = engine.health()
    assert health is not None and "rank 1 of 2" in health and reason in health
    with pytest.raises(EngineDeadError):
        await engine.generate("Once", LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}],
    ids=["tp2", "tp2-pp2"],
)
def test_the_answers_of_one_rank(ranks: dict[str, int], secret_file: str) -> None:
    expected = run(answers("tiny", ASKS))
    port, num_joined = free_port(), 2 if len(ranks) == 2 else 1

    async def ask() -> None:
        args = SMALL | hosts(port, secret_file, **ranks)
        async with AsyncLLMEngine("tiny", **args) as engine:
            assert len(followers()) == num_joined - 1  # this host's own
            outputs = await asyncio.gather(*(engine.generate(*each) for each in ASKS))
            engine.check_idle()
        expect_same(outputs, expected)

    with ExitStack() as stack:
        workers = [stack.enter_context(worker(port)) for _ in range(num_joined)]
        run(ask())
        assert [each.wait(PATIENCE_SECONDS) for each in workers] == [0] * num_joined


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "its connection from 127.0.0.1:"),
        (signal.SIGTERM, "its connection from 127.0.0.1:"),
        (signal.SIGSTOP, "has not answered for 3 s"),
    ],
)
def test_a_joined_rank_that_dies_or_stands_still(
    number: signal.Signals, reason: str, secret_file: str
) -> None:
    port = free_port()

    async def test() -> None:
        args = hosts(port, secret_file, tensor_parallel_size=2, distributed_timeout_seconds=3)
        args = SMALL | {"num_gpu_blocks_override": 2000} | args
        async with AsyncLLMEngine("tiny", **args) as engine:
            asyncio.get_running_loop().call_later(0.3, os.kill, joined.pid, number)
            await expect_end(engine, reason)

    with worker(port) as joined:
        run(test())
        if number is signal.SIGSTOP:  # when it runs again it finds that its connection has ended
            os.kill(joined.pid, signal.SIGCONT)
        assert joined.wait(ENDS_WITHIN_SECONDS) == (0 if number is signal.SIGSTOP else -number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_ends_ends_its_joined_ranks(number: signal.Signals, secret_file: str) -> None:
    port = free_port()
    flags = ("-tp=2", "--nnodes=2", f"--master-port={port}", f"--join-secret-file={secret_file}")
    with worker(port) as joined, served(*flags, "--max-num-seqs", "4") as server:
        server.process.send_signal(number)
        code = server.process.wait(PATIENCE_SECONDS)
        assert code == (-number if number is signal.SIGKILL else 0)
        assert joined.wait(ENDS_WITHIN_SECONDS) == 0


@pytest.mark.slow
def test_a_start_that_is_cancelled_while_ranks_are_waited_for(secret_file: str) -> None:
    port = free_port()

    async def test() -> None:
        args = SMALL | hosts(port, secret_file, tensor_parallel_size=4)
        engine = AsyncLLMEngine("tiny", **args)
        starting = asyncio.create_task(engine.start())
        line = ""
        while "joined" not in line:
            line = await asyncio.to_thread(joined.stderr.readline)  # type: ignore[union-attr]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        start = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - start < ENDS_WITHIN_SECONDS
        await until(lambda: not followers())

    with worker(port) as joined:
        run(test())
        assert joined.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_a_worker_that_may_not_join_says_why(secret_file: str) -> None:
    port = free_port()

    async def test() -> None:
        args = SMALL | hosts(port, secret_file, tensor_parallel_size=2)
        engine = AsyncLLMEngine("tiny", **args)
        starting = asyncio.create_task(engine.start())
        for flags, secret, why in (
            ((), "another secret of mine", "rank 0 refuses: its secret is another"),
            (("--rank=7",), SECRET, "rank 0 refuses: rank 7 is none of those that join"),
            ((), "short", "ASYNCLLM_JOIN_SECRET: a secret has at least 16 bytes, got 5"),
        ):
            with worker(port, *flags, secret=secret) as joined:
                _, said = await asyncio.to_thread(joined.communicate, timeout=PATIENCE_SECONDS)
                assert joined.returncode == 1
                assert said.startswith(f"asyncllm: error: {why}") and said.count("\n") == 1
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.aclose()

    run(test())


def test_a_worker_that_finds_no_server() -> None:
    with worker(port := free_port(), "--join-timeout=0.1") as joined:
        _, said = joined.communicate(timeout=PATIENCE_SECONDS)
        assert joined.returncode == 1
        assert f"no server is reached at 127.0.0.1:{port}: " in said


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"nnodes": 2}, "1 is no multiple of nnodes 2"),
        ({"nnodes": 3, "tensor_parallel_size": 2}, "is no multiple of nnodes 3"),
        ({"master_addr": "0.0.0.0"}, r"master_addr '0\.0\.0\.0' is no address by which"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "served by a server each",
        ),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            "uni is for one rank, not 2",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "ASYNCLLM_JOIN_SECRET: a secret has at least"),
    ],
)
def test_what_cannot_be_joined_is_said_at_once(
    args: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNCLLM_JOIN_SECRET", raising=False)
    with pytest.raises((ModelLoadError, ValueError), match=complaint):
        run(answers("tiny", ASKS, **{"master_port": free_port()} | args))
    assert not followers()

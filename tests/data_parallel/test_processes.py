"""Engines in processes that die, hang or lose their parent, by real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import asyncllm
from asyncllm import AsyncLLMEngine, ModelLoadError
from asyncllm.errors import RequestFailedError
from tests.data_parallel.test_two_engines import answers, group_of, two_engines
from tests.engine.test_async_engine import ENDLESS, GREEDY
from tests.parallel.engines import followers
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, run, until

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny"
END_SECONDS = 10.0  # in which requests of a lost engine end

pytestmark = pytest.mark.slow


def engine_processes(parent: int | None = None) -> list[int]:
    """Process ids of the engines that live, of this process or of another."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            is_engine = b"data_parallel.process" in (folder / "cmdline").read_bytes()
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if is_engine and state != "Z" and int(ppid) == (parent or os.getpid()):
            found.append(int(folder.name))
    return sorted(found)


def lives(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end_of(process_ids: list[int]) -> None:
    until_time = time.monotonic() + END_SECONDS
    while any(map(lives, process_ids)):
        assert time.monotonic() < until_time, "an engine's process is left"
        time.sleep(0.01)


async def _ends(engine: AsyncLLMEngine, count: int) -> list[Any]:
    work = (engine.generate("Hello", ENDLESS) for _ in range(count))
    return await asyncio.gather(*work, return_exceptions=True)


@pytest.mark.true_start
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_its_requests_and_is_started_again(number: signal.Signals) -> None:
    async def main() -> None:
        async with two_engines("mp") as engine:
            expected = await answers(engine, GREEDY)
            running = asyncio.ensure_future(_ends(engine, 4))
            await until(lambda: [r.stats().num_running for r in engine.replicas] == [2, 2])
            victim = group_of(engine).members[0]
            process_id = victim._process._process.pid  # type: ignore[attr-defined]
            start = time.monotonic()
            os.kill(process_id, number)
            await until(lambda: victim.health() is not None)
            assert time.monotonic() - start < END_SECONDS
            assert not lives(process_id)
            assert engine.health() is None  # the other serves
            assert await answers(engine, GREEDY) == expected
            await until(lambda: victim.health() is None)
            before = engine.replicas[0].recorder.generation_tokens
            assert await answers(engine, GREEDY) == expected
            assert engine.replicas[0].recorder.generation_tokens > before
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert not engine_processes()

    run(main())


def test_the_error_names_request_and_engine() -> None:
    async def main() -> None:
        async with two_engines("mp") as engine:
            running = asyncio.ensure_future(_ends(engine, 2))
            await until(lambda: [r.stats().num_running for r in engine.replicas] == [1, 1])
            for process_id in engine_processes():
                os.kill(process_id, signal.SIGKILL)
            async with asyncio.timeout(END_SECONDS):
                ended = await running
            assert all(isinstance(each, RequestFailedError) for each in ended)
            assert any("engine 1: its connection is closed (signal 9)" in str(e) for e in ended)
            assert "engine 0" in str(engine.health())
            await until(lambda: engine.health() is None)
            await answers(engine, GREEDY)
            engine.check_idle()
        assert not engine_processes()

    run(main())


@pytest.mark.true_start
def test_what_cannot_start_leaves_no_process(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")

    async def main() -> None:
        engine = AsyncLLMEngine(
            str(tmp_path), device="cpu", data_parallel_size=2, data_parallel_backend="mp"
        )
        with pytest.raises((ModelLoadError, ValueError)):
            await engine.start()
        assert not engine_processes()
        start = asyncio.create_task((other := two_engines("mp")).start())
        await until(engine_processes)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not engine_processes()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_leaves_no_engine(number: signal.Signals) -> None:
    """Nor a rank of one."""
    with served("-dp", "2", "--data-parallel-backend", "mp", "-tp", "2") as server:
        engines = engine_processes(server.process.pid)
        ranks = [rank for engine in engines for rank in followers(engine)]
        assert len(engines) == len(ranks) == 2
        body = json.dumps({"prompt": "Once", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            assert answer.status == 200
        if number is signal.SIGKILL:
            for each in (engines[0], *ranks):
                os.kill(each, signal.SIGSTOP)  # nor one that cannot run Python
        server.process.send_signal(number)
        code = server.process.wait(PATIENCE_SECONDS)
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
        wait_for_the_end_of([*engines, *ranks])


def test_ctrl_c_reaches_the_server_alone() -> None:
    """A terminal sends it to its whole process group: engines drain with their server."""
    code = (
        "import asyncio, os, signal\n"
        "from asyncllm import AsyncLLMEngine, SamplingParams\n"
        "async def main():\n"
        "    async with AsyncLLMEngine('tiny', device='cpu', num_gpu_blocks_override=100,\n"
        "        swap_space=0, data_parallel_size=2, data_parallel_backend='mp') as engine:\n"
        "        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)\n"
        "        work = engine.generate('Hello', SamplingParams(max_tokens=50, ignore_eos=True))\n"
        "        task = asyncio.ensure_future(work)\n"
        "        await asyncio.sleep(0.05)\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "        print(len((await task).outputs[0].token_ids))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True,
        timeout=PATIENCE_SECONDS, check=True,
    )  # fmt: skip
    assert done.stdout == "50\n"


def test_a_stream_of_a_lost_engine_ends_with_an_error_event() -> None:
    """/health and /metrics name the engine, and the other streams go on."""
    with served("-dp", "2", "--data-parallel-backend", "mp") as server:
        engines = engine_processes(server.process.pid)
        body = {"prompt": "Once", "max_tokens": 1200, "ignore_eos": True, "stream": True}
        streams = [ask(server.url, body) for _ in range(2)]
        for stream in streams:
            assert b"text" in stream.readline()
        os.kill(engines[0], signal.SIGKILL)
        start, is_named = time.monotonic(), False
        while time.monotonic() - start < END_SECONDS and not is_named:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as health:
                is_named = health.read().startswith(b"engine 0: its process was lost")
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as metrics:
            shown = metrics.read().decode()
        assert is_named
        assert 'asyncllm:engine_up{engine="0",model_name="tiny"} 0' in shown
        assert 'asyncllm:engine_up{engine="1",model_name="tiny"} 1' in shown
        ends = sorted(stream.read().strip().rpartition(b"data: ")[2] for stream in streams)
        assert ends[0] == b"[DONE]" and b"error" in ends[1]


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)


def test_engines_of_two_ranks_each() -> None:
    async def main() -> None:
        async with two_engines("uni") as engine:
            expected = await answers(engine, GREEDY)
        async with two_engines("mp", tensor_parallel_size=2) as engine:
            assert await answers(engine, GREEDY) == expected
            engine.check_idle()
            victim, processes = group_of(engine).members[0], engine_processes()
            (rank,) = followers(processes[0])
            os.kill(rank, signal.SIGKILL)
            await until(lambda: victim.health() is not None)
            assert "rank 1 of 2 failed" in str(victim.health())
            assert engine.health() is None  # the other serves
            assert await answers(engine, GREEDY) == expected
            await until(lambda: victim.health() is None)  # its ranks alone were started again
            assert engine_processes() == processes and followers(processes[0]) != {rank}
            ranks = [each for process in processes for each in followers(process)]
        assert not engine_processes()
        wait_for_the_end_of(ranks)

    run(main())

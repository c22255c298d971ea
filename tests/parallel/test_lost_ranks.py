"""Ranks that die, stand still, fall behind or do something else; and processes that end with them.

Real processes and real signals. Whatever happens to a rank, requests end with an error within 10 s.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, EngineArgs, LoRARequest, RequestOutput, SamplingParams
from asyncllm.engine import core_loader
from asyncllm.engine.adapters import AdapterManager
from asyncllm.engine.core import MAX_RESTARTS
from asyncllm.errors import EngineDeadError, ModelLoadError, RequestFailedError
from asyncllm.model_config import resolve_model_path
from asyncllm.worker.packed_step import padding_prompt
from asyncllm.worker.ranks import group
from asyncllm.worker.ranks.group import RankLostError, WorkerGroup
from asyncllm.worker.ranks.messages import Kind, encode, step_content
from tests.engine.adapter_files import write_tiny_adapter
from tests.parallel.engines import SMALL, Ask, expect_same, followers, greedy
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, run, until

LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
ENDS_WITHIN_SECONDS = 10
ENGINES_OF_TWO = "tensor_parallel_size=2, data_parallel_size=2, data_parallel_backend='mp'"
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@asynccontextmanager
async def engine_of_two(**args: Any) -> AsyncIterator[tuple[AsyncLLMEngine, int]]:
    """And the process id of rank 1."""
    args = SMALL | {"num_gpu_blocks_override": 2000, "tensor_parallel_size": 2} | args
    async with AsyncLLMEngine("tiny", **args) as engine:
        (follower,) = followers()
        yield engine, follower
    assert not followers()


async def expect_all_end(engine: AsyncLLMEngine, reason: str, *, comes_back: bool = False) -> None:
    """Two requests that run end within ENDS_WITHIN_SECONDS, and say why; others are refused, for
    good or until the rank comes back."""
    running = [asyncio.ensure_future(collect(engine, prompt)) for prompt in ("Once", "The dog")]
    start = time.monotonic()
    for each in running:
        with pytest.raises((RequestFailedError, EngineDeadError)):
            await each
    assert time.monotonic() - start < ENDS_WITHIN_SECONDS
    if comes_back:
        await expect_lost(engine, f"rank 1 of 2 failed: {reason}")
        return
    assert reason in await asyncio.wait_for(engine.wait_failed(), ENDS_WITHIN_SECONDS)
    health = engine.health()
    assert health is not None and "rank 1 of 2" in health and reason in health
    with pytest.raises(EngineDeadError):
        await engine.generate("Once", LONG)


async def expect_lost(engine: AsyncLLMEngine, reason: str) -> None:
    """It says so, and refuses requests; then the ranks are there again, and answer as before."""
    async with asyncio.timeout(ENDS_WITHIN_SECONDS):
        while reason not in (engine.health() or ""):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match="the ranks are being started again"):
        await engine.generate("Once", LONG)
    await until(lambda: engine.health() is None)
    assert len(followers()) == 1
    engine.check_idle()
    engine.check_integrity()
    asks = [Ask("Once upon a time", greedy(12)), Ask("The dog", greedy(5))]
    expected = await answers_of_one_rank(asks)
    expect_same(await asyncio.gather(*(engine.generate(*ask) for ask in asks)), expected)


async def answers_of_one_rank(asks: list[Ask]) -> list[RequestOutput]:
    async with AsyncLLMEngine("tiny", **SMALL) as engine:
        return [await engine.generate(*ask) for ask in asks]


async def collect(engine: AsyncLLMEngine, prompt: str) -> None:
    async for _ in engine.generate(prompt, LONG):
        pass


@pytest.mark.true_start
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "its process ended with -9"),
        (signal.SIGSTOP, "it has not answered for 6 s"),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "is_busy"),
    [({}, True), ({}, False), (STAGES, True)],
    ids=["busy", "idle", "busy-stages"],
)
def test_a_rank_that_dies_or_stands_still(
    number: signal.Signals, reason: str, ranks: dict[str, int], is_busy: bool
) -> None:
    async def test() -> None:
        async with engine_of_two(distributed_timeout_seconds=6, **ranks) as (engine, follower):
            if is_busy:
                asyncio.get_running_loop().call_later(0.3, os.kill, follower, number)
                await expect_all_end(engine, reason, comes_back=True)
            else:
                os.kill(follower, number)
                await expect_lost(engine, f"rank 1 of 2 failed: {reason}")
            assert followers() != {follower}

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, STAGES], ids=["shards", "stages"])
def test_a_step_that_fails_before_the_group_has_said_why(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two come from different threads; whichever is first, the ranks are started again."""

    def late(self: WorkerGroup, tell: Callable[[str], object]) -> None:
        on_failure(self, lambda why: threading.Timer(1, tell, [why]).start())

    on_failure = WorkerGroup.on_failure
    monkeypatch.setattr(WorkerGroup, "on_failure", late)

    async def test() -> None:
        async with engine_of_two(**args) as (engine, follower):
            asyncio.get_running_loop().call_later(0.3, os.kill, follower, signal.SIGKILL)
            await expect_all_end(engine, "its process ended with -9", comes_back=True)

    run(test())


@pytest.mark.slow
def test_a_rank_that_waits_for_what_rank_0_does_not_do() -> None:
    async def test() -> None:
        async with engine_of_two(distributed_timeout_seconds=3) as (engine, _):
            step = padding_prompt(3, SMALL["block_size"])
            group_of(engine).send(Kind.STEP, *step_content(step))
            await expect_lost(
                engine, "rank 1 of 2 failed: it gets no further with its work for 3 s"
            )

    run(test())


@pytest.mark.slow
def test_a_rank_that_is_told_of_a_step_twice() -> None:
    """It would go on, a step behind, with calls of the mesh that fit."""

    async def test() -> None:
        async with engine_of_two(distributed_timeout_seconds=3) as (engine, _):
            thread = group_of(engine)._thread
            send, sent = thread.send, []

            def send_one_twice(frame: bytes) -> None:
                has_place = frame != encode(Kind.PING)
                if has_place:
                    sent.append(frame)
                for _ in range(2 if has_place and len(sent) == 9 else 1):
                    send(frame)

            thread.send = send_one_twice  # type: ignore[method-assign]
            await expect_all_end(engine, "ValueError: message", comes_back=True)

    run(test())


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> WorkerGroup:
    """A group whose second rank never answers."""
    ranks = SimpleNamespace(host="127.0.0.1", start=dict, close=lambda: None, kill=lambda: None)
    monkeypatch.setattr(group, "find_ranks", lambda config, is_cancelled: [ranks])
    return WorkerGroup(EngineArgs("tiny", tensor_parallel_size=2).create_engine_config())


def test_who_waits_for_an_answer_hears_that_the_group_is_closed(asking: WorkerGroup) -> None:
    (answer,) = asking.ask(Kind.READ_ADAPTER, "folder", 0)
    asking.close()
    with pytest.raises(RankLostError, match="the group is closed"):
        answer.result(0)


def test_a_rank_that_is_lost_while_another_thread_asks(asking: WorkerGroup) -> None:
    """Who asks is told: an answer that is registered after the loss would never come."""
    wait, asked = threading.Event(), threading.Event()

    class Delayed:
        """The lock, which the thread that asks gets late."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                asked.set()
                assert wait.wait(PATIENCE_SECONDS)
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    found: list[BaseException] = []

    def ask() -> None:
        try:
            for answer in asking.ask(Kind.SYNC, 0):
                answer.result(1)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    asking._lock = Delayed(asking._lock)  # type: ignore[assignment]
    thread.start()
    assert asked.wait(PATIENCE_SECONDS)
    asking._fail(1, "of this test")
    wait.set()
    thread.join()
    assert [type(error) for error in found] == [RankLostError]
    asking.close()


def group_of(engine: AsyncLLMEngine) -> WorkerGroup:
    assert engine._core is not None and engine._core.worker.group is not None
    return engine._core.worker.group


@pytest.mark.true_start
@pytest.mark.slow
def test_a_rank_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start raises what it says; the other one ends, too."""
    monkeypatch.setattr(group, "torch", SimpleNamespace(__version__="0.1", get_num_threads=int))

    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **SMALL | {"tensor_parallel_size": 4})
        with pytest.raises(ModelLoadError, match="of 4 failed: ValueError: rank 0 has torch"):
            await engine.start()
        await engine.aclose()
        assert not followers()

    run(test())


@pytest.mark.true_start
@pytest.mark.slow
def test_a_rank_that_dies_while_it_loads() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **SMALL | {"tensor_parallel_size": 2})
        starting = asyncio.create_task(engine.start())
        await until(followers)
        os.kill(*followers(), signal.SIGKILL)
        with pytest.raises(ModelLoadError, match="rank 1 of 2 failed: its process ended with -9"):
            await starting
        await engine.aclose()
        assert not followers()

    run(test())


@pytest.mark.true_start
@pytest.mark.slow
def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **SMALL | {"tensor_parallel_size": 2})
        starting = asyncio.create_task(engine.start())
        await until(followers)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.aclose()
        assert not followers()

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, STAGES], ids=["tp2", "pp2"])
def test_a_rank_that_is_slow_for_a_while_changes_nothing(ranks: dict[str, int]) -> None:
    async def test() -> None:
        async with engine_of_two(**ranks) as (engine, follower):
            ask = Ask("Once upon a time", greedy(60, ignore_eos=True))
            expected = await engine.generate(*ask)
            task = asyncio.create_task(_final(engine, ask))
            await asyncio.sleep(0.1)
            os.kill(follower, signal.SIGSTOP)
            await asyncio.sleep(1.5)
            os.kill(follower, signal.SIGCONT)
            expect_same([await task], [expected])
            assert engine.health() is None

    run(test())


async def _final(engine: AsyncLLMEngine, ask: Ask) -> Any:
    return await engine.generate(*ask)


@pytest.mark.slow
def test_a_step_that_fails_on_rank_0_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in it for ever."""

    async def test() -> None:
        async with engine_of_two(distributed_timeout_seconds=2) as (engine, _):
            runner = engine._core.worker.runner  # type: ignore[union-attr]

            def fails(*args: Any) -> None:
                raise RuntimeError("no step today")

            monkeypatch.setattr(runner, "_forward", fails)
            with pytest.raises(RequestFailedError, match="no step today"):
                await engine.generate("Once", LONG)
            await expect_lost(engine, "of 2 failed")

    run(test())


@pytest.mark.slow
def test_what_a_rank_does_not_understand_ends_it() -> None:
    async def test() -> None:
        async with engine_of_two() as (engine, _):
            group_of(engine).send(Kind.READY, "what")
            await expect_lost(engine, "rank 1 of 2 failed: ValueError: rank 0 said")

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)]
)
def test_a_server_that_ends_leaves_no_process(number: signal.Signals, code: int) -> None:
    with served("--tensor-parallel-size", "2", "--max-num-seqs", "4") as server:
        (follower,) = followers(server.process.pid)
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200
        if number is signal.SIGKILL:
            os.kill(follower, signal.SIGSTOP)  # nor one that cannot run Python
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE_SECONDS) == code
        run(until(lambda: not Path(f"/proc/{follower}").exists() or _is_zombie(follower)))


@pytest.mark.slow
def test_ctrl_c_reaches_the_server_alone() -> None:
    """A terminal sends SIGINT to the whole process group, while a rank may be in a step."""
    with served("--tensor-parallel-size", "2", "--max-num-seqs", "4") as server:
        (follower,) = followers(server.process.pid)
        assert os.getpgid(follower) != os.getpgid(server.process.pid)
        os.kill(follower, signal.SIGINT)  # by whomever: it is rank 0's to end it
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200


@pytest.mark.slow
def test_a_rank_that_is_lost_again_and_again() -> None:
    """Also while the engine is closed, and with adapters, which are read again where they are."""

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            lora = LoRARequest("a", lora_path=write_tiny_adapter(Path(folder) / "a"))
            gone = LoRARequest("gone", lora_path=write_tiny_adapter(Path(folder) / "gone"))
            ask = Ask("Once upon a time", greedy(8))
            async with engine_of_two(enable_lora=True) as (engine, _):
                expected = await engine.generate(*ask, lora_request=lora)
                await engine.add_lora(gone)
                shutil.rmtree(gone.lora_path)
                for _ in range(MAX_RESTARTS):
                    os.kill(*followers(), signal.SIGKILL)
                    await until(lambda: engine.health() is not None)
                    await until(lambda: engine.health() is None)
                    assert engine.find_lora("a") == lora and engine.find_lora("gone") is None
                expect_same([await engine.generate(*ask, lora_request=lora)], [expected])
                os.kill(*followers(), signal.SIGKILL)
                reason = await asyncio.wait_for(engine.wait_failed(), ENDS_WITHIN_SECONDS)
                assert reason == engine.health() == "rank 1 of 2 failed: its process ended with -9"
                assert not followers()

    run(test())


@pytest.mark.slow
def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """First without memory, then with a rank that is lost between two adapters."""

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            given = [
                LoRARequest(name, lora_path=write_tiny_adapter(Path(folder) / name))
                for name in ("one", "two")
            ]
            async with engine_of_two(enable_lora=True) as (engine, _):
                for each in given:
                    await engine.add_lora(each)
                start, add = core_loader._start_worker, AdapterManager.add

                def start_worker(*args: Any, **named: Any) -> Any:
                    monkeypatch.setattr(core_loader, "_start_worker", start)
                    raise ValueError("no memory")

                async def add_two(self: AdapterManager, request: LoRARequest) -> None:
                    if request == given[1]:
                        monkeypatch.setattr(AdapterManager, "add", add)
                        raise RankLostError("rank 1 of 2 failed")
                    await add(self, request)

                monkeypatch.setattr(core_loader, "_start_worker", start_worker)
                monkeypatch.setattr(AdapterManager, "add", add_two)
                os.kill(*followers(), signal.SIGKILL)
                await until(lambda: engine.health() is not None)
                await until(lambda: engine.health() is None)
                assert AdapterManager.add is add and core_loader._start_worker is start
                assert [engine.find_lora(each.lora_name) for each in given] == given
                await engine.generate("Once", greedy(4), lora_request=given[1])

    run(test())


@pytest.mark.true_start
@pytest.mark.slow
def test_an_engine_that_is_closed_while_its_ranks_start_again() -> None:
    async def test() -> None:
        async with AsyncLLMEngine("tiny", **SMALL | {"tensor_parallel_size": 2}) as engine:
            os.kill(*followers(), signal.SIGKILL)
            await until(lambda: engine.health() is not None)
            await until(followers)
        assert not followers()

    run(test())


@pytest.mark.slow
def test_a_server_that_loses_a_rank_serves_again_or_ends_with_an_error(tmp_path: Path) -> None:
    """/health says which rank is missing. Without the model's files there is no other start."""
    model = tmp_path / "tiny"
    shutil.copytree(resolve_model_path("tiny"), model)
    ranks = ("--tensor-parallel-size", "2", "--max-num-seqs", "4")
    with served(*ranks, model=str(model)) as server:
        os.kill(*followers(server.process.pid), signal.SIGKILL)
        run(until(lambda: "rank 1 of 2 failed: its process ended with -9" in health_of(server.url)))
        run(until(lambda: health_of(server.url) == ""))
        shutil.rmtree(model)
        os.kill(*followers(server.process.pid), signal.SIGKILL)
        assert server.process.wait(PATIENCE_SECONDS) == 1


def health_of(url: str) -> str:
    """The reason it gives for being unwell; nothing where all is well."""
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return ""
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return error.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "end", "code"),
    [
        ("tensor_parallel_size=2", "", 0),
        ("tensor_parallel_size=2", "os._exit(3)", 3),
        ("tensor_parallel_size=2", "os.killpg(0, signal.SIGINT)", -signal.SIGINT),  # Ctrl-C
        (ENGINES_OF_TWO, "os.killpg(0, signal.SIGINT)", -signal.SIGINT),
    ],
    ids=["end", "exit", "ctrl-c", "engines-ctrl-c"],
)
def test_a_program_without_a_main_guard(sizes: str, end: str, code: int, tmp_path: Path) -> None:
    """Nothing of it is run a second time, and no process is left, however it ends."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os, signal
            from asyncllm import AsyncLLMEngine, SamplingParams

            print("once")

            async def main():
                engine = AsyncLLMEngine("tiny", device="cpu", swap_space=0, {sizes})
                output = await engine.generate("Once", SamplingParams(max_tokens=4, temperature=0))
                print(len(output.outputs[0].token_ids), flush=True)
                {end}
                await asyncio.sleep(0)  # SIGINT cancels it here
                await engine.aclose()

            asyncio.run(main())
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OWNER": str(script), "PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    said, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert said.split() == ["once", "4"]
    assert process.returncode == code, errors
    run(until(lambda: not _named(script)))


def _named(script: Path) -> list[str]:
    """Processes that the script has left."""
    names = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            if f"OWNER={script}".encode() in environment and not _is_zombie(int(folder.name)):
                names.append(str(folder))
        except OSError:
            continue
    return names


def _is_zombie(pid: int) -> bool:
    """Ended, and not yet asked for by its new parent."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

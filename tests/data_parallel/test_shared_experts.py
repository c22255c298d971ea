"""Engines in processes of their own that share the experts of a mixture: each step is one of all.

What they answer in each regime is in tests/parallel/test_every_kind_of_model.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import (
    AsyncLLMEngine,
    InvalidRequestError,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from asyncllm.engine.data_parallel import spawn
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.errors import EngineDeadError, ModelLoadError, RequestFailedError
from tests.data_parallel import recorded_engine
from tests.data_parallel.test_processes import engine_processes, lives, wait_for_the_end_of
from tests.data_parallel.test_two_engines import group_of
from tests.models.tiny_checkpoints import CONFIGS, random_reference
from tests.parallel.engines import SMALL, Ask, expect_same, followers, greedy
from tests.parallel.test_every_kind_of_model import (
    write_adapter_of_experts,
    write_mixture_with_words,
)
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, run, until

pytestmark = pytest.mark.slow
END_SECONDS = 10.0  # in which requests of lost engines end
TWO: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
REGEX = StructuredOutputsParams(regex=r"(yes|no), [a-z]{3,9}\.")
ASKS = [
    Ask("Once upon a time there was a little dog who lived in a big house", greedy(14)),
    Ask("Answer:", greedy(12, structured_outputs=REGEX)),
    Ask("The", greedy(20)),
    Ask("A cat", SamplingParams(temperature=1.0, seed=7, max_tokens=9, logprobs=1)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture_with_words(tmp_path_factory.mktemp("mixture"), window=4096)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    async def alone() -> list[RequestOutput]:
        async with AsyncLLMEngine(str(folder), **SMALL) as engine:
            return [await engine.generate(*ask) for ask in ASKS]

    return run(alone())


@asynccontextmanager
async def engines(folder: Path, **args: Any) -> AsyncIterator[AsyncLLMEngine]:
    args = SMALL | {"num_gpu_blocks_override": 2000} | TWO | args
    async with AsyncLLMEngine(str(folder), **args) as engine:
        yield engine
    assert not engine_processes()


def num_steps(engine: AsyncLLMEngine) -> list[int]:
    return [sum(replica.work.steps.values()) for replica in engine.replicas]


async def quiet(engine: AsyncLLMEngine) -> list[int]:
    """Each engine's steps, once its process says that nothing was done for two seconds."""
    before: list[int] = []
    while before != (before := num_steps(engine)):  # noqa: ASYNC110
        await asyncio.sleep(2.5)
    return before


BOTH = pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "synchronous"])


@BOTH
def test_one_engine_has_all_of_the_work(
    folder: Path, expected: list[RequestOutput], is_ahead: bool
) -> None:
    """The other does each step with padding alone; and without work nobody steps."""

    async def main() -> None:
        async with engines(folder, async_scheduling=is_ahead) as engine:
            before = await quiet(engine)
            expect_same([await engine.generate(*ask) for ask in ASKS], expected)
            after = await quiet(engine)
            assert after[0] - before[0] == after[1] - before[1] > 20
            busy, idle = (replica.work for replica in engine.replicas)
            assert busy.num_tokens > 0 and idle.num_tokens == 0 and idle.num_padding > 0
            assert engine.replicas[1].recorder.generation_tokens == 0
            await asyncio.sleep(1)
            assert await quiet(engine) == after
            engine.check_idle()

    run(main())


@BOTH
def test_a_grammar_on_one_engine_while_the_other_decodes(
    folder: Path, expected: list[RequestOutput], is_ahead: bool
) -> None:
    async def main() -> None:
        async with engines(folder, async_scheduling=is_ahead) as engine:
            running = asyncio.ensure_future(engine.generate("Hello", LONG))
            await until(lambda: engine.stats().num_running == 1)
            for _ in range(3):  # on the engine without load
                expect_same([await engine.generate(*ASKS[1])], [expected[1]])
            assert min(replica.recorder.generation_tokens for replica in engine.replicas) > 20
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(lambda: engine.stats().num_running == 0)
            engine.check_idle()

    run(main())


@BOTH
def test_requests_come_and_go_at_random(
    folder: Path, expected: list[RequestOutput], is_ahead: bool
) -> None:
    rng = random.Random(5)

    async def client(engine: AsyncLLMEngine) -> None:
        for _ in range(6):
            await asyncio.sleep(rng.choice([0, 0, 0.05, 0.3]))
            place = rng.randrange(len(ASKS))
            if rng.random() < 0.3:
                async for _ in engine.generate(*ASKS[place]):
                    break  # it is aborted
            else:
                expect_same([await engine.generate(*ASKS[place])], [expected[place]])

    async def main() -> None:
        chunks = {"chunked_prefill_size": 5, "max_num_batched_tokens": 16}
        async with engines(folder, async_scheduling=is_ahead, **chunks) as engine:
            await asyncio.gather(*(client(engine) for _ in range(5)))
            await until(lambda: engine.stats().num_running == 0)
            engine.check_idle()
            engine.check_integrity()
            assert min(replica.work.num_tokens for replica in engine.replicas) > 0

    run(main())


@BOTH
@pytest.mark.parametrize("is_whole", [False, True], ids=["pieces", "whole"])
def test_all_replay_the_same_graphs(
    folder: Path,
    expected: list[RequestOutput],
    is_whole: bool,
    is_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also steps of which one engine has more rows than any graph, or than a graph's attention."""
    monkeypatch.setattr(spawn, "MODULE", "tests.data_parallel.recorded_engine")
    monkeypatch.setenv(recorded_engine.WHOLE, "1" if is_whole else "")
    sizes = {"prefill_graph_sizes": [8, 16, 32], "cuda_graph_sizes": [1, 3]}

    async def main() -> None:
        async with engines(folder, async_scheduling=is_ahead, max_model_len=40, **sizes) as engine:
            asks = [ASKS[i % len(ASKS)] for i in range(14)]
            found = await asyncio.gather(*(engine.generate(*ask) for ask in asks))
            expect_same(found, [expected[i % len(ASKS)] for i in range(14)])
            expect_same([await engine.generate(*ask) for ask in ASKS], expected)
            await quiet(engine)
            steps = [replica.work.steps for replica in engine.replicas]
            assert steps[0] == steps[1] and min(steps[0].values()) > 0, steps

    run(main())


def test_each_engine_has_an_adapter_of_its_own_in_the_same_slot(
    folder: Path, tmp_path: Path
) -> None:
    """One slot each, and three adapters of experts that come and go in it, beside rows without."""
    folders = [write_adapter_of_experts(tmp_path / str(seed), seed) for seed in range(3)]
    loras = [None, *(LoRARequest(each.name, lora_path=each) for each in folders)]
    args = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}

    async def answers(engine: AsyncLLMEngine) -> list[RequestOutput]:
        asks = [(*ask, lora) for lora in loras for ask in (ASKS[0], ASKS[2])] * 2
        every = [engine.generate(prompt, given, lora_request=lora) for prompt, given, lora in asks]
        return await asyncio.gather(*every)

    async def main() -> None:
        async with AsyncLLMEngine(str(folder), **SMALL | args) as one:
            expected = await answers(one)
        assert len({str(each.outputs[0].token_ids) for each in expected}) == 8
        async with engines(folder, **args) as engine:
            expect_same(await answers(engine), expected)
            assert min(replica.recorder.generation_tokens for replica in engine.replicas) > 0
            gone = LoRARequest("gone", lora_path=write_adapter_of_experts(tmp_path / "gone", 5))
            await engine.add_lora(gone)  # to memory, where only its experts' other parts are not
            shutil.rmtree(tmp_path / "gone")
            with pytest.raises(InvalidRequestError, match=r"engine 1: .*gone"):
                await engine.generate(*ASKS[0], lora_request=gone)
            expect_same([await engine.generate(*ASKS[0])], expected[:1])
            engine.check_idle()

    run(main())


def test_three_engines(tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS["qwen2-moe"]).save_pretrained(tmp_path)
    asks = [Ask({"prompt_token_ids": [7 + i] * (5 + i)}, greedy(9, detokenize=False)) for i in
            range(7)]  # fmt: skip
    args = {"skip_tokenizer_init": True}

    async def main() -> None:
        async with AsyncLLMEngine(str(tmp_path), **SMALL | args) as one:
            expected = await asyncio.gather(*(one.generate(*ask) for ask in asks))
        async with engines(tmp_path, data_parallel_size=3, **args) as three:
            found = await asyncio.gather(*(three.generate(*ask) for ask in asks))
            assert all(replica.recorder.generation_tokens for replica in three.replicas)
        expect_same(found, expected)

    run(main())


# --- what ends them ------------------------------------------------------------------------------


def members(engine: AsyncLLMEngine) -> list[RemoteCore]:
    return list(group_of(engine).members)  # type: ignore[arg-type]


def process_of(member: RemoteCore) -> int:
    return member.process._process.pid  # type: ignore[union-attr]


async def expect_all_lost(engine: AsyncLLMEngine, number: signal.Signals, busy: bool) -> str:
    """Within END_SECONDS of the first engine's signal requests end with an error. What /health says
    then."""
    running = [asyncio.ensure_future(engine.generate("Once", LONG)) for _ in range(4 * busy)]
    if busy:
        await until(lambda: [r.stats().num_running for r in engine.replicas] == [2, 2])
    start = time.monotonic()
    os.kill(process_of(members(engine)[0]), number)
    for each in running:
        # Of a silent engine its neighbours may say first that a common step does not end.
        with pytest.raises(RequestFailedError, match=r"engine 0|a step does not end"):
            await each
    await until(lambda: engine.health() is not None)
    assert time.monotonic() - start < END_SECONDS
    with pytest.raises(EngineDeadError):
        await engine.generate("Once", LONG)
    return str(engine.health())


@pytest.mark.parametrize(
    ("number", "reason", "busy"),
    [
        pytest.param(signal.SIGKILL, "(signal 9)", True, marks=pytest.mark.true_start),
        (signal.SIGKILL, "(signal 9)", False),
        (signal.SIGSTOP, "silent for", True),
    ],
)
def test_a_lost_engine_takes_the_others_with_it(
    folder: Path, expected: list[RequestOutput], number: signal.Signals, reason: str, busy: bool
) -> None:
    async def main() -> None:
        async with engines(folder) as engine:
            before = engine_processes()
            said = await expect_all_lost(engine, number, busy)
            assert reason in said and "engine 0:" in said and "engine 1:" in said, said
            await until(lambda: engine.health() is None)
            assert not {*before} & {*engine_processes()} and not any(map(lives, before))
            found = await asyncio.gather(*(engine.generate(*ask) for ask in ASKS))
            expect_same(found, expected)
            engine.check_idle()

    run(main())


def test_a_rank_of_one_engine_is_lost(folder: Path, expected: list[RequestOutput]) -> None:
    """Its engine does not start it again alone: the experts are of all."""

    async def main() -> None:
        async with engines(folder, tensor_parallel_size=2) as engine:
            before = engine_processes()
            ranks = [rank for each in before for rank in followers(each)]
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            await until(lambda: engine.health() is not None)
            assert "rank 1 of 2 failed: its process ended with -9" in str(engine.health())
            await until(lambda: engine.health() is None)
            assert not {*before} & {*engine_processes()}
            expect_same([await engine.generate(*ask) for ask in ASKS], expected)
        wait_for_the_end_of(ranks)

    run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_leaves_no_process(folder: Path, number: signal.Signals) -> None:
    flags = ("-dp", "2", "-tp", "2", "--enable-expert-parallel")
    with served(*flags, model=str(folder)) as server:
        left = engine_processes(server.process.pid)
        left += [rank for engine in left for rank in followers(engine)]
        assert len(left) == 4
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        stream = ask(server.url, body)
        assert b"text" in stream.readline()  # amid a step
        if number is signal.SIGKILL:
            for each in left:
                os.kill(each, signal.SIGSTOP)  # nor one that cannot run Python
        server.process.send_signal(number)
        code = server.process.wait(PATIENCE_SECONDS)
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
        wait_for_the_end_of(left)


def test_streams_end_with_an_error_event_and_metrics_name_the_engines(folder: Path) -> None:
    with served("-dp", "2", "--enable-expert-parallel", model=str(folder)) as server:
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        streams = [ask(server.url, body) for _ in range(2)]
        for stream in streams:
            assert b"text" in stream.readline()
        os.kill(engine_processes(server.process.pid)[1], signal.SIGKILL)
        for stream in streams:
            assert b"error" in stream.read().strip().rpartition(b"data: ")[2]
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as metrics:
            shown = metrics.read().decode()
        for engine in (0, 1):
            assert f'asyncllm:engine_up{{engine="{engine}",model_name="{folder}"}} 0' in shown
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{server.url}/health", timeout=10)
        assert b"engine 1" in refused.value.read()


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"data_parallel_backend": "uni"}, "data_parallel_backend uni: engines that share experts"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: engines that share experts"),
        ({"data_parallel_size": 17}, "at most 16 engines share experts"),
        ({"data_parallel_size": 3}, "data_parallel_size 3 times tensor_parallel_size 1 does not "
                                    "divide the number of experts 4"),
        ({"model_impl": "transformers"}, "enable_expert_parallel: Qwen3MoeForCausalLM is run by"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared(folder: Path, args: dict[str, Any], complaint: str) -> None:
    async def main() -> None:
        with pytest.raises((ValueError, ModelLoadError), match=complaint):
            async with engines(folder, **args):
                pass
        assert not engine_processes()

    run(main())


def test_a_model_without_experts() -> None:
    async def main() -> None:
        with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no experts for engines to"):
            async with engines(Path("tiny")):
                pass
        assert not engine_processes()

    run(main())

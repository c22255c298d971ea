"""Requests and when they are sent: arrivals, lengths, conversations, all from the seed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from loadtesting.arrival import arrival_times, read_trace
from loadtesting.record import Conversation, LoadTestError
from loadtesting.settings import Settings, slo_list
from loadtesting.worker import LAG_TICK_S, deal, watch_lag
from loadtesting.workload import draw_lengths, make_conversations


def arrivals(num: int, seed: int = 0, **settings: Any) -> np.ndarray:
    times_s = arrival_times(Settings(**settings), num, np.random.default_rng(seed))
    assert times_s is not None and (np.diff(times_s) >= 0).all()
    return times_s


def test_arrivals_follow_from_the_seed_and_keep_the_rate() -> None:
    times_s = arrivals(20_000, seed=1, request_rate=8.0)
    assert np.array_equal(times_s, arrivals(20_000, seed=1, request_rate=8.0))
    assert not np.array_equal(times_s, arrivals(20_000, seed=2, request_rate=8.0))
    assert times_s[-1] == pytest.approx(20_000 / 8)
    # Poisson: as many arrivals in a second as the variance of that number.
    counts = np.bincount(times_s.astype(int))
    assert counts.mean() == pytest.approx(8, rel=0.05)
    assert counts.var() == pytest.approx(8, rel=0.15)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps_s = np.diff(arrivals(50_000, seed=3, request_rate=10.0, burstiness=burstiness))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_named_arrivals() -> None:
    constant = arrivals(5, arrival="constant", request_rate=2.0)
    assert constant.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    # Poisson by name does not look at burstiness.
    poisson = arrivals(50_000, arrival="poisson", request_rate=10.0, burstiness=9.0)
    assert np.diff(poisson).std() == pytest.approx(0.1, rel=0.05)
    assert arrivals(5).tolist() == [0.0] * 5  # an infinite rate sends all at once
    closed = arrival_times(Settings(max_concurrency=4), 5, np.random.default_rng(0))
    assert closed is None


@pytest.mark.parametrize(("start", "end"), [(2.0, 18.0), (18.0, 2.0), (10.0, 10.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(start: float, end: float) -> None:
    times_s = arrivals(50_000, arrival="ramp", request_rate=start, ramp_to_rate=end)
    duration_s = times_s[-1]
    assert duration_s == pytest.approx(2 * 50_000 / (start + end))
    counts, edges = np.histogram(times_s, 20)
    middles = (edges[1:] + edges[:-1]) / 2
    asked = start + (end - start) * middles / duration_s
    assert counts / np.diff(edges) == pytest.approx(asked, rel=0.15)


MOONCAKE = """{"timestamp": 3000, "input_length": 30, "output_length": 3, "hash_ids": [1]}
{"timestamp": 1000, "input_length": 10, "output_length": 1}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,396,109
"""


def test_traces(tmp_path: Path) -> None:
    mooncake, azure, wrong = (tmp_path / name for name in ("a.jsonl", "b.csv", "c.jsonl"))
    mooncake.write_text(MOONCAKE)
    azure.write_text(AZURE)
    wrong.write_text('{"time": 1}')
    assert read_trace(str(mooncake)) == [(0.0, 10, 1), (2.0, 30, 3)]
    assert [row[1:] for row in read_trace(str(azure))] == [(374, 44), (396, 109)]
    assert read_trace(str(azure))[1].due_s == pytest.approx(1.5)
    with pytest.raises(LoadTestError, match="no trace"):
        read_trace(str(wrong))
    replay = Settings(arrival="replay", trace=str(mooncake), num_prompts=2)
    assert arrival_times(replay, 2, np.random.default_rng(0)).tolist() == [0.0, 2.0]  # type: ignore[union-attr]
    bodies = prompts(replay, 2)
    assert [(len(b["prompt"]), b["max_tokens"]) for b in bodies] == [(10, 1), (30, 3)]
    with pytest.raises(LoadTestError, match="has 2 requests, 3 are asked for"):
        arrival_times(replay, 3, np.random.default_rng(0))


def test_lengths() -> None:
    rng = np.random.default_rng(0)
    assert set(draw_lengths(7, "fixed", 0.5, 9, rng).tolist()) == {7}
    uniform = draw_lengths(100, "uniform", 0.5, 20_000, rng)
    assert (uniform.min(), uniform.max()) == (50, 150)
    assert uniform.mean() == pytest.approx(100, rel=0.02)
    lognormal = draw_lengths(100, "lognormal", 0.8, 50_000, rng)
    assert lognormal.mean() == pytest.approx(100, rel=0.03)
    assert np.median(lognormal) == pytest.approx(100 * np.exp(-(0.8**2) / 2), rel=0.03)
    assert draw_lengths(1, "lognormal", 3.0, 1000, rng).min() == 1


# ---- Workloads -----------------------------------------------------------------------------------


def made(settings: Settings, num: int, stream: int = 0) -> list[Conversation]:
    return make_conversations(settings, num, stream)


def prompts(settings: Settings, num: int, stream: int = 0) -> list[dict[str, Any]]:
    return [orjson.loads(turn.body) for turns in made(settings, num, stream) for turn in turns]


def test_prompts_share_prefixes_equally_and_follow_from_the_seed() -> None:
    shape: dict[str, Any] = {"input_len": 5, "prefix_len": 7, "num_prefixes": 4}
    ids = [body["prompt"] for body in prompts(Settings(**shape), 20)]
    assert {len(prompt) for prompt in ids} == {12}
    heads = [tuple(prompt[:7]) for prompt in ids]
    assert sorted(heads.count(head) for head in set(heads)) == [5, 5, 5, 5]
    assert len({tuple(prompt[7:]) for prompt in ids}) == 20
    assert made(Settings(**shape), 20) == made(Settings(**shape), 20)
    assert made(Settings(**shape), 20) != made(Settings(**shape, seed=1), 20)
    warm = {tuple(body["prompt"][:7]) for body in prompts(Settings(**shape), 20, stream=1)}
    assert not set(heads) & warm


def test_prompt_ids_stay_in_range() -> None:
    bodies = prompts(Settings(token_range=(10, 1000), vocab_size=13), 50)
    assert {i for body in bodies for i in body["prompt"]} == {10, 11, 12}
    with pytest.raises(LoadTestError, match="--vocab-size"):
        prompts(Settings(token_range=(10, 1000), vocab_size=10), 1)


def test_text_prompts_are_words() -> None:
    body = prompts(Settings(text=True, input_len=9), 1)[0]
    assert len(body["prompt"].split()) == 9
    body = prompts(Settings(endpoint="chat", input_len=9), 1)[0]
    assert len(body["messages"][0]["content"].split()) == 9


def test_conversations_have_turns_and_one_prefix() -> None:
    settings = Settings(num_turns=3, input_len=4, prefix_len=6)
    conversations = made(settings, 7)
    assert [len(turns) for turns in conversations] == [3, 3, 1]
    assert [turn.number for turns in conversations for turn in turns] == list(range(7))
    words = [len(b["messages"][0]["content"].split()) for b in prompts(settings, 7)]
    assert words == [10, 4, 4, 10, 4, 4, 10]


def test_schema_and_tools_are_sent_as_openai_clients_do() -> None:
    turn = made(Settings(dataset="schema"), 1)[0][0]
    body = orjson.loads(turn.body)
    schema = body["response_format"]["json_schema"]
    assert body["response_format"]["type"] == "json_schema" and schema["strict"] is True
    assert tuple(schema["schema"]["required"]) == turn.required
    assert "ignore_eos" not in body and turn.num_expected is None
    body = prompts(Settings(dataset="tools"), 1)[0]
    assert body["tool_choice"] == "auto"
    assert {tool["type"] for tool in body["tools"]} == {"function"}


def test_shares_of_cancelled_and_slow_requests() -> None:
    turns = [turns[0] for turns in made(Settings(cancel_share=0.3, slow_share=0.1), 4000)]
    cancelled = [turn.cancel_after for turn in turns if turn.cancel_after is not None]
    assert len(cancelled) == pytest.approx(1200, rel=0.1)
    assert (min(cancelled), max(cancelled)) == (1, 127)
    assert sum(turn.slow for turn in turns) == pytest.approx(400, rel=0.2)
    for conversation in made(Settings(num_turns=3, cancel_share=1.0), 9):
        assert [turn.cancel_after is None for turn in conversation] == [True, True, False]


def test_sharegpt_files(tmp_path: Path) -> None:
    def entry(*values: str) -> dict[str, Any]:
        names = ("human", "gpt") * len(values)
        said = [{"from": n, "value": v} for n, v in zip(names, values, strict=False)]
        return {"conversations": said}

    file = tmp_path / "chats.json"
    first, alone = entry("Why?", "x" * 40, "And?", "y" * 80), entry("Unanswered")
    file.write_bytes(orjson.dumps([first, alone, {"conversations": None}]))
    settings = Settings(dataset="sharegpt", dataset_path=str(file), num_turns=2)
    bodies = prompts(settings, 3)
    asked = [(b["messages"][0]["content"], b["max_tokens"]) for b in bodies]
    assert asked == [("Why?", 10), ("And?", 20), ("Why?", 10)]
    file.write_bytes(orjson.dumps([alone]))
    with pytest.raises(LoadTestError, match="no question with an answer"):
        prompts(settings, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"arrival": "closed"},
        {"arrival": "constant"},
        {"arrival": "ramp", "request_rate": 1.0},
        {"arrival": "replay"},
        {"trace": "x"},
        {"dataset": "sharegpt"},
        {"check_outputs": 1, "temperature": 1.0},
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, Any]) -> None:
    with pytest.raises(LoadTestError):
        Settings(**settings)


def test_objectives() -> None:
    assert slo_list("ttft:200,tpot:20.5") == {"ttft": 200, "tpot": 20.5}


# ---- Processes -----------------------------------------------------------------------------------


def test_processes_get_equal_shares() -> None:
    settings = Settings(processes=3, max_concurrency=8)
    conversations = made(settings, 10)
    shares = deal(settings, None, [], conversations, None)
    assert [share.width for share in shares] == [3, 3, 2]
    dealt = [turn.number for share in shares for turns in share.conversations for turn in turns]
    assert sorted(dealt) == list(range(10))
    assert len(deal(Settings(processes=9, max_concurrency=2), None, [], conversations, None)) == 2


def test_a_stalled_client_is_seen() -> None:
    async def stall() -> list[float]:
        lags_s: list[float] = []
        watcher = asyncio.create_task(watch_lag(lags_s))
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
        watcher.cancel()
        return lags_s

    lags_s = asyncio.run(stall())
    assert max(lags_s) > 0.09
    # Each tick that the stall swallowed counts, not the one late wake-up alone.
    assert sum(lag_s > 0.01 for lag_s in lags_s) > 0.08 / LAG_TICK_S

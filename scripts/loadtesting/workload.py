"""Conversations of requests: drawn from the seed or a trace, encoded before the run, offline.

`stream` separates draws of one seed: 0 is the load, 1 the warm-up, so the warm-up's prompts and
prefixes are never those of the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from loadtesting.arrival import read_trace
from loadtesting.record import Conversation, LoadTestError, Request, reason
from loadtesting.settings import Settings
from loadtesting.shapes import NUM_SHAPES, random_schema, schema_fields, tool_fields

# Each is one token after a space in the usual BPE vocabularies.
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
LONGEST = 16  # times the mean: where the log-normal tail of lengths is cut
CHARS_PER_TOKEN = 4  # of ShareGPT answers, whose tokens nobody here can count


class Turn(NamedTuple):
    prompt: str | list[int]
    output_len: int


def make_conversations(settings: Settings, num: int, stream: int) -> list[Conversation]:
    """num requests in conversations of up to num_turns; the last may be shorter."""
    rng = np.random.default_rng([settings.seed, stream])
    if settings.dataset == "sharegpt":
        scripts: Iterator[list[Turn]] = sharegpt_turns(settings, rng)
    else:
        scripts = random_turns(settings, num, rng)
    schemas = [random_schema(rng) for _ in range(NUM_SHAPES)]
    conversations: list[Conversation] = []
    index = 0
    while index < num:
        turns = next(scripts)[: num - index]
        requests = [
            make_request(settings, turn, index + i, i + 1 == len(turns), schemas, rng)
            for i, turn in enumerate(turns)
        ]
        conversations.append(requests)
        index += len(requests)
    return conversations


def random_turns(settings: Settings, num: int, rng: np.random.Generator) -> Iterator[list[Turn]]:
    """Each prefix opens an equal share of the conversations, in random order."""
    low, high = (0, len(WORDS)) if settings.sends_text else settings.token_range
    if settings.vocab_size is not None and not settings.sends_text:
        high = min(high, settings.vocab_size)
    if low >= high:
        raise LoadTestError(f"no id in --token-range {low}:{high} (clipped to --vocab-size)")
    input_lens, output_lens = request_lengths(settings, num, rng)
    prefixes = rng.integers(low, high, (settings.num_prefixes, settings.prefix_len)).tolist()
    starts = range(0, num, settings.num_turns)
    owners = rng.permutation(len(starts)) % settings.num_prefixes
    for start, owner in zip(starts, owners.tolist(), strict=True):
        turns = []
        for i in range(start, min(num, start + settings.num_turns)):
            ids = rng.integers(low, high, input_lens[i]).tolist()
            ids = ids if i > start else prefixes[owner] + ids
            prompt = " ".join(WORDS[word] for word in ids) if settings.sends_text else ids
            turns.append(Turn(prompt, int(output_lens[i])))
        yield turns


def sharegpt_turns(settings: Settings, rng: np.random.Generator) -> Iterator[list[Turn]]:
    """Conversations in random order, again and again; an answer's length is that of the file's."""
    assert settings.dataset_path is not None
    conversations = read_sharegpt(settings.dataset_path)
    while True:
        for i in rng.permutation(len(conversations)).tolist():
            yield conversations[i][: settings.num_turns]


def read_sharegpt(path: str) -> list[list[Turn]]:
    """[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, ...]"""
    try:
        entries = orjson.loads(Path(path).read_bytes())
        found = [pair_turns(entry.get("conversations") or []) for entry in entries]
    except (ValueError, AttributeError, KeyError, OSError) as error:
        raise LoadTestError(f"{path} is no ShareGPT file: {reason(error)}") from error
    if not (kept := [turns for turns in found if turns]):
        raise LoadTestError(f"{path} has no question with an answer")
    return kept


def pair_turns(messages: list[dict[str, str]]) -> list[Turn]:
    """Each question followed by an answer, up to the first that is not."""
    turns = []
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        if question["from"] not in ("human", "user") or answer["from"] not in ("gpt", "assistant"):
            break
        if question["value"].strip():
            turns.append(Turn(question["value"], max(1, len(answer["value"]) // CHARS_PER_TOKEN)))
    return turns


def make_request(
    settings: Settings,
    turn: Turn,
    number: int,
    last: bool,
    schemas: list[dict[str, Any]],
    rng: np.random.Generator,
) -> Request:
    """Only a last turn is ever cancelled: what comes after it would have no history."""
    cancelled = rng.random() < settings.cancel_share and last
    slow = rng.random() < settings.slow_share
    shape = settings.dataset if settings.dataset in ("schema", "tools") else None
    schema = schemas[number % len(schemas)]
    fields = body_fields(settings, turn)
    if shape == "schema":
        fields |= schema_fields(schema)
    elif shape == "tools":
        fields |= tool_fields(schemas[:3])
    return Request(
        number=number,
        body=orjson.dumps(fields),
        num_expected=turn.output_len if settings.counts_tokens else None,
        cancel_after=int(rng.integers(1, max(2, turn.output_len))) if cancelled else None,
        slow=slow,
        shape=shape,
        required=tuple(schema["required"]) if shape == "schema" else (),
    )


def body_fields(settings: Settings, turn: Turn) -> dict[str, Any]:
    message = {"role": "user", "content": turn.prompt}
    asked = {"messages": [message]} if settings.chats else {"prompt": turn.prompt}
    sampling = {"max_tokens": turn.output_len, "temperature": settings.temperature}
    ignore_eos = {"ignore_eos": True} if settings.counts_tokens else {}  # not all servers know it
    options = {"include_usage": True}
    if settings.token_counts:
        options["continuous_usage_stats"] = True  # vLLM's name
    stream = {"stream": True, "stream_options": options}
    return {"model": settings.model} | asked | sampling | ignore_eos | stream


def with_history(body: bytes, history: list[dict[str, str]]) -> bytes:
    fields = orjson.loads(body)
    return orjson.dumps(fields | {"messages": [*history, *fields["messages"]]})


def first_requests(conversations: list[Conversation], num: int) -> list[Request]:
    return list(islice((turn for turns in conversations for turn in turns), num))


def draw_lengths(
    mean: int, dist: str, spread: float, num: int, rng: np.random.Generator
) -> np.ndarray:
    """[num] tokens. The log-normal's mean is `mean` too (its median is below), before the cut."""
    if dist == "fixed":
        return np.full(num, mean)
    if dist == "uniform":
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        return rng.integers(low, max(low, high), num, endpoint=True)
    lengths = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.clip(lengths.round(), 1, LONGEST * mean).astype(int)


def request_lengths(
    settings: Settings, num: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Own prompt tokens and output tokens of num requests, each [num]."""
    if settings.trace is not None:
        rows = read_trace(settings.trace)
        picked = [rows[i % len(rows)] for i in range(num)]
        inputs = np.array([max(1, row.input_len) for row in picked])
        return inputs, np.array([max(1, row.output_len) for row in picked])
    dist, spread = settings.length_dist, settings.length_spread
    return (
        draw_lengths(settings.input_len, dist, spread, num, rng),
        draw_lengths(settings.output_len, dist, spread, num, rng),
    )

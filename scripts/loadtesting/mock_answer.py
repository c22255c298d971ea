"""The mock server's settings, and the frames of its answers, ready to write.

Plain text is one frame, repeated. A schema gets an object that fits it, tools get one call; both
come in as many chunks as other answers of that length, so that they stream.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import orjson

from loadtesting.settings import above, flag

EXAMPLES: dict[str, Any] = {"string": "mock", "integer": 1, "number": 1.5, "boolean": True}


@dataclass(frozen=True)
class MockSettings:
    host: str = flag("127.0.0.1", "mock: to listen on")
    port: int = flag(8000, "mock: 0: any free one, it is printed", type=above(-1))
    mock_processes: int = flag(1, "mock: that serve", type=above(0))
    tokens_per_second: float = flag(math.inf, "mock: of each stream", type=above(0, float))
    max_running: int = flag(sys.maxsize, "mock: streams at once, others wait", type=above(0))
    tokens_per_chunk: int = flag(1, "mock: in each chunk", type=above(0))
    textless_tokens: int = flag(0, "mock: first tokens, sent as no chunk", type=above(-1))
    word: str = flag(" word", "mock: the text of a token")
    fail_every: int = flag(sys.maxsize, "mock: each so-many-th request fails", type=above(0))
    fail_with: str = flag("500", "mock: how", choices=("500", "event", "short", "cut"))
    refuse: str = flag("", "mock: answer 400 to requests with this field")
    stall_after: int = flag(sys.maxsize, "mock: the request that stops it once", type=above(0))
    stall_s: float = flag(1.0, "mock: for how long", type=above(0, float))


class Answer(NamedTuple):
    """head and tail go through aiohttp, frames (HTTP chunks already) past it."""

    head: bytes
    frames: Iterator[bytes]
    tail: bytes
    num_tokens: int


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(content: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "cmpl-0123456789abcdef", "object": "chunk", "created": 0, "model": "mock"}
    return sse({**head, "choices": [choice], **more})


def make_answer(settings: MockSettings, body: dict[str, Any], short: bool) -> Answer:
    chat = "messages" in body
    num_tokens = body["max_tokens"] - short
    options = body.get("stream_options") or {}
    num_prompt = count_prompt(body)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if contents := shaped_contents(body, num_tokens):
        frames = iter([http_chunk(chunk({"delta": content})) for content in contents])
        usage["completion_tokens"] = num_tokens = len(contents)
    else:
        counted = bool(options.get("continuous_usage_stats"))
        frames = text_frames(settings, num_tokens, chat, num_prompt if counted else None)
    last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    return Answer(
        head=chunk({"delta": {"role": "assistant", "content": ""}}) if chat else b": hello\n\n",
        frames=frames,
        tail=chunk(last, "length") + sse({"choices": [], "usage": usage}) + b"data: [DONE]\n\n",
        num_tokens=num_tokens,
    )


def count_prompt(body: dict[str, Any]) -> int:
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def text_frames(
    settings: MockSettings, num_tokens: int, chat: bool, num_prompt: int | None
) -> Iterator[bytes]:
    """num_prompt given: each chunk carries the usage so far. The last may bring fewer tokens."""

    def frame(num: int, total: int) -> bytes:
        text = settings.word * num
        usage = {"prompt_tokens": num_prompt, "completion_tokens": total}
        more: dict[str, Any] = {} if num_prompt is None else {"usage": usage}
        return http_chunk(chunk({"delta": {"content": text}} if chat else {"text": text}, **more))

    hidden, size = settings.textless_tokens, settings.tokens_per_chunk
    totals = [*range(hidden + size, num_tokens, size), num_tokens]
    if num_prompt is not None:
        befores = [hidden, *totals]
        return iter([frame(t - b, t) for b, t in zip(befores, totals, strict=False)])
    whole = frame(size, 0)
    last = frame(num_tokens - (totals[-2] if len(totals) > 1 else hidden), 0)
    frames = (whole if i + 1 < len(totals) else last for i in range(len(totals)))
    return frames if last != whole else repeat(whole, len(totals))


def shaped_contents(body: dict[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """Deltas of a JSON answer or of a tool call; empty if plain text is asked for."""
    if "response_format" in body:
        text = example_of(body["response_format"]["json_schema"]["schema"])
        return [{"content": part} for part in pieces(text, num_tokens)]
    if "tools" in body:
        function = body["tools"][0]["function"]
        opening = {"index": 0, "id": "call_0", "type": "function"}
        first = {**opening, "function": {"name": function["name"], "arguments": ""}}
        parts = pieces(example_of(function["parameters"]), num_tokens)
        later = [{"index": 0, "function": {"arguments": part}} for part in parts]
        return [{"tool_calls": [call]} for call in (first, *later)]
    return []


def example_of(schema: dict[str, Any]) -> str:
    kinds = {name: EXAMPLES[kind["type"]] for name, kind in schema["properties"].items()}
    return orjson.dumps(kinds).decode()


def pieces(text: str, num: int) -> list[str]:
    size = max(1, -(-len(text) // num))
    return [text[i : i + size] for i in range(0, len(text), size)]

#!/usr/bin/env python3
"""Load test of any OpenAI-compatible server over HTTP with streaming. One file, no asyncllm in it.

A request's clock starts twice: when it was meant to go out and when it went. Both latencies are
shown, so a client or a queue that falls behind its schedule shows (coordinated omission). Token
counts come from the server's usage, not from counting chunks; a wrong count is a failed request.
While the load runs, a read is stamped and kept, nothing more: splitting and parsing wait until the
end (about 300 bytes a chunk until then). The client measures its own lag and disowns a late run.

    loadtest.py --workload tput                     # against http://127.0.0.1:8000
    loadtest.py --request-rate 8 --input-len 1024 --output-len 128 --num-prompts 320
    loadtest.py --serve-mock --port 9000            # to see what the client itself can take
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson
from aiohttp import web

try:
    import uvloop
except ImportError:  # a lower ceiling, the same figures below it
    uvloop = None

now = time.perf_counter

MAX_LOOP_LAG_MS = 10.0  # p99 above it: the client was late, the figures are not the server's
LAG_TICK_S = 0.002
LIVE_LINE_S = 0.5
IDLE_CONNECTION_S = 2.0  # below uvicorn's 5, else a POST can meet a connection just closed
MAX_MESSAGE_CHARS = 200

# ---- Settings: what is asked for; each field is a flag -------------------------------------------


def above(low: int, number: type[int] | type[float] = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not (value := number(text)) > low:
            raise argparse.ArgumentTypeError(f"{value} is not above {low}")
        return value

    return parse


def id_range(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(":"))
    return low, high


def flag(default: Any, help: str, **how_to_parse: Any) -> Any:
    return field(default=default, metadata={"help": f"{help} ({default})", **how_to_parse})


# A flag given beside --workload wins over it.
WORKLOADS: dict[str, dict[str, Any]] = {
    "lat1": {"input_len": 128, "output_len": 256, "max_concurrency": 1, "num_prompts": 16},
    "lat8": {"input_len": 128, "output_len": 256, "max_concurrency": 8, "num_prompts": 64},
    "tput": {"input_len": 512, "output_len": 256, "max_concurrency": 256, "num_prompts": 768},
    "rate8": {"input_len": 1024, "output_len": 128, "request_rate": 8.0, "num_prompts": 320},
    "rate16": {"input_len": 1024, "output_len": 128, "request_rate": 16.0, "num_prompts": 640},
    "prefix": {"input_len": 128, "output_len": 64, "max_concurrency": 64, "num_prompts": 512}
    | {"prefix_len": 2048, "num_prefixes": 8},
    "long": {"input_len": 7000, "output_len": 64, "max_concurrency": 8, "num_prompts": 64},
}


@dataclass(frozen=True)
class Settings:
    base_url: str = flag("http://127.0.0.1:8000", "the server, without /v1")
    model: str | None = flag(None, "None: the first of /v1/models")
    endpoint: str = flag("completions", "chat sends text", choices=("completions", "chat"))
    workload: str | None = flag(None, "sets lengths and load; flags given win", choices=WORKLOADS)
    num_prompts: int = flag(100, "requests in all", type=above(0))
    input_len: int = flag(128, "a prompt's own tokens, after its shared prefix", type=above(0))
    output_len: int = flag(128, "max_tokens", type=above(0))
    max_concurrency: int | None = flag(None, "without a rate: a closed loop", type=above(0))
    request_rate: float = flag(math.inf, "per second; inf: all at once", type=above(0, float))
    burstiness: float = flag(1.0, "gamma shape; 1: Poisson, less: bursts", type=above(0, float))
    num_warmups: int = flag(8, "requests before, with other prompts", type=above(-1))
    seed: int = flag(0, "of prompts and arrivals", type=above(-1))
    ignore_eos: bool = flag(True, "and check the token count", action=BooleanOptionalAction)
    temperature: float = flag(0.0, "of sampling", type=above(-1, float))
    prefix_len: int = flag(0, "tokens of a shared prefix", type=above(-1))
    num_prefixes: int = flag(1, "shared prefixes", type=above(0))
    token_range: tuple[int, int] = flag((1000, 30000), "LO:HI, to draw ids from", type=id_range)
    vocab_size: int | None = flag(None, "clips token-range", type=above(0))
    text: bool = flag(False, "send words instead of token ids", action=BooleanOptionalAction)
    timeout_s: float = flag(600.0, "of one request in all", type=above(0, float))

    @property
    def closed_loop(self) -> bool:
        return math.isinf(self.request_rate) and self.max_concurrency is not None

    @property
    def sends_text(self) -> bool:
        return self.text or self.endpoint == "chat"


# ---- Requests: made before the run, from the seed ------------------------------------------------

# Each is one token after a space in the usual BPE vocabularies.
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")


def make_bodies(settings: Settings, num: int, stream: int) -> list[bytes]:
    """Random prompts, encoded; each prefix gets an equal share of them, in random order."""
    low, high = (0, len(WORDS)) if settings.sends_text else settings.token_range
    high = min(high, settings.vocab_size or high)
    if low >= high:
        raise LoadTestError(f"no id in --token-range {low}:{high} (clipped to --vocab-size)")
    rng = np.random.default_rng([settings.seed, stream])
    prefixes = rng.integers(low, high, (settings.num_prefixes, settings.prefix_len))
    own_parts = rng.integers(low, high, (num, settings.input_len))
    owners = rng.permutation(num) % settings.num_prefixes
    prompts = np.concatenate([prefixes[owners], own_parts], axis=1)  # [num, prompt tokens]
    return [make_body(settings, prompt) for prompt in prompts.tolist()]


def make_body(settings: Settings, prompt: list[int]) -> bytes:
    content = " ".join(WORDS[i] for i in prompt) if settings.sends_text else prompt
    message = {"role": "user", "content": content}
    asked = {"messages": [message]} if settings.endpoint == "chat" else {"prompt": content}
    ignore_eos = {"ignore_eos": True} if settings.ignore_eos else {}  # not every server knows it
    sampling = {"max_tokens": settings.output_len, "temperature": settings.temperature}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps({"model": settings.model} | asked | sampling | ignore_eos | stream)


def arrival_times(rate: float, burstiness: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """Seconds after the start: gamma gaps, scaled so that num requests take num / rate exactly."""
    times_s = np.cumsum(rng.gamma(burstiness, size=num))
    return times_s * (num / rate / times_s[-1])


# ---- Client: sends, stamps, keeps ----------------------------------------------------------------


class Failure(NamedTuple):
    kind: str
    message: str


class Capture(NamedTuple):
    """One request as it happened, unparsed: pieces[i] was read at times_s[i]."""

    intended_s: float
    sent_s: float
    times_s: list[float]
    pieces: list[bytes]
    failure: Failure | None


class Client:
    """Sends requests over one session; its counters are for the live line."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings) -> None:
        self.session = session
        self.settings = settings
        path = "chat/completions" if settings.endpoint == "chat" else "completions"
        self.url = f"{settings.base_url}/v1/{path}"
        self.gate = asyncio.Semaphore(settings.max_concurrency or sys.maxsize)
        self.num_sent = self.num_done = self.num_failed = self.num_reads = 0

    async def send(self, body: bytes, intended_s: float) -> Capture:
        times_s: list[float] = []
        pieces: list[bytes] = []
        failure = None
        self.num_sent += 1
        sent_s = now()
        try:
            async with self.session.post(self.url, data=body) as response:
                if response.status == 200:
                    read = response.content.readany
                    while piece := await read():
                        times_s.append(now())
                        pieces.append(piece)
                        self.num_reads += 1
                else:
                    failure = Failure(f"http_{response.status}", await response.text())
        except TimeoutError:
            failure = Failure("timeout", f"not finished after {self.settings.timeout_s} s")
        except aiohttp.ClientError as error:
            failure = Failure(type(error).__name__, str(error))
        self.num_done += 1
        self.num_failed += failure is not None
        return Capture(intended_s, sent_s, times_s, pieces, failure)

    async def send_in_turn(self, body: bytes, intended_s: float | None = None) -> Capture:
        async with self.gate:
            return await self.send(body, now() if intended_s is None else intended_s)

    async def closed_loop(self, bodies: Sequence[bytes]) -> list[Capture]:
        """An answer lets the next request go, which is then its intended time."""
        return await asyncio.gather(*(self.send_in_turn(body) for body in bodies))

    async def open_loop(self, bodies: Sequence[bytes]) -> list[Capture]:
        """Arrivals do not wait for answers; what the gate holds back shows as late."""
        asked, rng = self.settings, np.random.default_rng([self.settings.seed, 2])
        due_s = now() + arrival_times(asked.request_rate, asked.burstiness, len(bodies), rng)
        tasks = []
        for body, intended_s in zip(bodies, due_s.tolist(), strict=True):
            while (wait_s := intended_s - now()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(wait_s)  # uvloop rounds to milliseconds and may wake early
            tasks.append(asyncio.create_task(self.send_in_turn(body, intended_s)))
        return await asyncio.gather(*tasks)


async def watch_lag(lags_s: list[float]) -> None:
    """How late this loop wakes, on a fixed grid: a stall counts for each tick it swallowed."""
    due_s = now() + LAG_TICK_S
    while True:
        await asyncio.sleep(max(0.0, due_s - now()))
        woken_s = now()
        while due_s <= woken_s:
            lags_s.append(woken_s - due_s)
            due_s += LAG_TICK_S


async def show_live_line(client: Client) -> None:
    """One line, overwritten; plain text, since rendering would cost the loop milliseconds."""
    while sys.stderr.isatty():
        await asyncio.sleep(LIVE_LINE_S)
        line = f"{client.num_done} done, {client.num_sent - client.num_done} in flight"
        line = f"{line}, {client.num_failed} failed, {client.num_reads:,} reads"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)


# ---- Digest: from bytes to records, after the run ------------------------------------------------


class Record(NamedTuple):
    """One request, understood. Its chunks start at the first content; it ends at the last chunk."""

    intended_s: float
    sent_s: float
    end_s: float
    chunk_times_s: Sequence[float]
    num_output_tokens: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_reads: int = 0
    textless: bool = False
    failure: Failure | None = None


def split_events(capture: Capture) -> Iterator[tuple[float, bytes]]:
    """The data of each SSE event and the time of the read that completed it; no comments."""
    rest = b""
    times_s = capture.times_s + capture.times_s[-1:]  # the last event may lack its blank line
    for time_s, piece in zip(times_s, [*capture.pieces, b"\n\n"], strict=False):
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for lines in (event.split(b"\n") for event in events):
            if data := b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")):
                yield time_s, data


def has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    keys = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(key) for key in keys)


def content_times(choices: list[tuple[float, dict[str, Any]]]) -> list[float]:
    """When chunks came, from the first one with content on; none if no chunk had any.

    A chat role, or a token whose bytes are not yet a character, is nothing that a reader sees, so
    it cannot start the answer. Later an empty chunk counts, unless it only brings finish_reason.
    """
    times_s: list[float] = []
    for time_s, choice in choices:
        if has_content(choice) or (times_s and not choice.get("finish_reason")):
            times_s.append(time_s)
    return times_s


def digest(capture: Capture, settings: Settings) -> Record:
    """Parse one stream and judge it."""
    choices: list[tuple[float, dict[str, Any]]] = []
    usage: dict[str, Any] = {}
    failure, finished = capture.failure, False
    for time_s, data in split_events(capture):
        if finished := data == b"[DONE]":
            break
        try:
            event = orjson.loads(data)
            choices.extend((time_s, choice) for choice in event.get("choices") or ())
            usage = event.get("usage") or usage
        except (ValueError, AttributeError):
            failure = failure or Failure("bad_event", repr(data))
            break
        if error := event.get("error"):
            failure = failure or Failure("error_event", str(error))

    # Random weights may repeat an invisible token: then every chunk is taken, and that is reported.
    visible_times_s = content_times(choices)
    times_s = visible_times_s or [time_s for time_s, _ in choices]
    num_tokens = usage.get("completion_tokens") or 0
    faults = {"stream_cut": not finished, "empty_stream": not choices, "no_usage": not num_tokens}
    faults["wrong_token_count"] = settings.ignore_eos and num_tokens != settings.output_len
    for kind in (kind for kind, found in faults.items() if found):
        counts = f"{num_tokens} of {settings.output_len} tokens, {len(times_s)} chunks"
        failure = failure or Failure(kind, f"{counts}, {'' if finished else 'no '}[DONE]")
    return Record(
        capture.intended_s,
        capture.sent_s,
        end_s=choices[-1][0] if choices else capture.sent_s,
        chunk_times_s=times_s,
        num_output_tokens=num_tokens,
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_reads=len(capture.pieces),
        textless=not visible_times_s,
        failure=failure,
    )


# ---- Figures -------------------------------------------------------------------------------------


def spread_ms(values_s: np.ndarray) -> dict[str, float] | None:
    if not len(values_s):
        return None
    p50, p90, p99 = (np.percentile(values_s, (50, 90, 99)) * 1e3).tolist()
    return {"mean": float(values_s.mean()) * 1e3, "median": p50, "p90": p90, "p99": p99}


def latencies_ms(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """TPOT = (E2E - TTFT) / (tokens - 1), so a request of one token has none."""
    columns = [(r.intended_s, r.sent_s, r.chunk_times_s[0], r.end_s) for r in records]
    intended_s, sent_s, first_s, end_s = np.array(columns).reshape(-1, 4).T
    gaps = np.array([r.num_output_tokens - 1 for r in records])
    itl_s = np.concatenate([np.empty(0), *(np.diff(r.chunk_times_s) for r in records)])
    return {
        "ttft_from_intended": spread_ms(first_s - intended_s),
        "ttft_from_sent": spread_ms(first_s - sent_s),
        "tpot": spread_ms((end_s - first_s)[gaps > 0] / gaps[gaps > 0]),
        "itl_per_chunk": spread_ms(itl_s),
        "e2e_from_intended": spread_ms(end_s - intended_s),
        "e2e_from_sent": spread_ms(end_s - sent_s),
        "sent_after_intended": spread_ms(sent_s - intended_s),
    }


def count_errors(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    errors: dict[str, dict[str, Any]] = {}
    for index, failure in enumerate(r.failure for r in records):
        if failure is not None:
            first = f"request {index}: {failure.message[:MAX_MESSAGE_CHARS]}"
            errors.setdefault(failure.kind, {"count": 0, "first": first})["count"] += 1
    return errors


def summarise(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """The figures of duration_s of load. A failed request is counted and in no other figure."""
    good = [r for r in records if r.failure is None]
    num_prompt_tokens = sum(r.num_prompt_tokens for r in good)
    num_output_tokens = sum(r.num_output_tokens for r in good)
    num_chunks = sum(len(r.chunk_times_s) for r in good)
    return {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "errors": count_errors(records),
        "duration_s": duration_s,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": num_output_tokens / duration_s,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / duration_s,
        "latency_ms": latencies_ms(good),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(r.num_cached_tokens for r in good),
        "num_output_tokens": num_output_tokens,
        "num_textless": sum(r.textless for r in good),
        "chunks_per_s": num_chunks / duration_s,
        "chunks_per_read": num_chunks / max(1, sum(r.num_reads for r in good)),
    }


# ---- The run -------------------------------------------------------------------------------------


class LoadTestError(Exception):
    """No run was possible, so there are no figures."""


def open_session(settings: Settings, api_key: str | None) -> aiohttp.ClientSession:
    """No limit but the total time. asyncio and uvloop set TCP_NODELAY themselves."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url, raise_for_status=True) as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        raise LoadTestError(f"no model from {url}, is the server up? {error!r}") from error


async def warm_up(client: Client) -> None:
    """Opens connections and wakes the server, with prompts and prefixes the run does not use."""
    asked = client.settings
    for capture in await client.closed_loop(make_bodies(asked, asked.num_warmups, stream=1)):
        if failure := digest(capture, asked).failure:
            raise LoadTestError(f"warm-up failed (no ids taken? --text): {': '.join(failure)}")


async def run_load(settings: Settings, api_key: str | None = None) -> dict[str, Any]:
    """Warm up, load, digest. Returns the report, of which JSON makes an infinite rate null."""
    async with open_session(settings, api_key) as session:
        model = settings.model or await first_model(session, settings.base_url)
        settings = replace(settings, model=model)
        bodies = make_bodies(settings, settings.num_prompts, stream=0)
        await warm_up(Client(session, settings))

        client = Client(session, settings)
        lags_s = [0.0]
        watchers = [asyncio.create_task(w) for w in (watch_lag(lags_s), show_live_line(client))]
        gc.collect()
        gc.freeze()  # else a full collection walks everything above in the middle of the run
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        start_s, cpu_s = now(), time.process_time()
        load = client.closed_loop if settings.closed_loop else client.open_loop
        captures = await load(bodies)
        duration_s, cpu_s = now() - start_s, time.process_time() - cpu_s
        for watcher in watchers:
            watcher.cancel()

    lag_p99_ms = float(np.percentile(lags_s, 99)) * 1e3
    return {
        "valid": lag_p99_ms <= MAX_LOOP_LAG_MS,
        "conditions": asdict(settings) | {"load": load.__name__, "started_at": started_at},
        **summarise([digest(capture, settings) for capture in captures], duration_s),
        "client_lag_p99_ms": lag_p99_ms,
        "client_lag_max_ms": max(lags_s) * 1e3,
        "client_cpu_share": cpu_s / duration_s,
    }


def print_report(report: dict[str, Any]) -> None:
    """For people, on stderr, under the names that the JSON has."""
    lines = ["\n" + ", ".join(f"{name} {value}" for name, value in report["conditions"].items())]
    for name, value in report.items():
        if isinstance(value, int | float):
            lines.append(f"{name:24}{value:12,.8g}")
    lines.append(f"\n{'latency, ms':24}{'mean':>12}{'median':>12}{'p90':>12}{'p99':>12}")
    for name, spread in report["latency_ms"].items():
        lines.append(f"{name:24}" + "".join(f"{value:12,.2f}" for value in (spread or {}).values()))
    for kind, error in report["errors"].items():
        lines.append(f"FAILED {error['count']} times: {kind}, {error['first']}")
    if not report["valid"]:
        lines.append(f"INVALID: the client's loop lag p99 is over {MAX_LOOP_LAG_MS} ms")
    print("\n".join(lines), file=sys.stderr)


# ---- Mock server: what the client can take, and what it makes of bad answers ---------------------

ON_PURPOSE = {"error": {"message": "the mock fails on purpose", "type": "mock"}}


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def mock_chunk(chat: bool, text: str, finish_reason: str | None = None) -> bytes:
    content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "cmpl-0123456789abcdef", "object": "chunk", "created": 0, "model": "mock"}
    return sse({**head, "choices": [choice]})


@dataclass
class MockServer:
    host: str = flag("127.0.0.1", "to listen on")
    port: int = flag(8000, "0: any free one, it is printed", type=above(-1))
    tokens_per_second: float = flag(math.inf, "mock: of each stream", type=above(0, float))
    fail_every: int = flag(sys.maxsize, "mock: each so-many-th request fails", type=above(0))
    fail_with: str = flag("500", "mock: how", choices=("500", "event", "short", "cut"))
    num_requests = 0

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.num_requests += 1
        failure = self.fail_with if self.num_requests % self.fail_every == 0 else None
        if failure == "500":
            return web.json_response(ON_PURPOSE, status=500)
        chat = "messages" in body
        num_tokens = body["max_tokens"] - (failure == "short")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        # aiohttp sends the headers with the first write; only after it may frames go past it.
        await response.write(mock_chunk(chat, "") if chat else b": hello\n\n")
        if failure == "event":
            await response.write(sse(ON_PURPOSE))
            return response
        await self.stream_tokens(request, mock_chunk(chat, " word"), num_tokens)
        if failure != "cut":
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
            last = mock_chunk(chat, "", "length") + sse({"choices": [], "usage": usage})
            await response.write(last + b"data: [DONE]\n\n")
        return response

    async def stream_tokens(self, request: web.Request, chunk: bytes, num_tokens: int) -> None:
        """Straight to the transport. All streams step on one grid, in bursts as an engine's do."""
        frame = b"%x\r\n%b\r\n" % (len(chunk), chunk)  # HTTP's chunked coding
        step_s = 1 / self.tokens_per_second
        due_s = now() // step_s * step_s if step_s else now()
        for _ in range(num_tokens):
            due_s += step_s
            await asyncio.sleep(max(0.0, due_s - now()))
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            request.transport.write(frame)

    async def serve(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.host, self.port, backlog=4096).start()
        print("mock server on http://{}:{}".format(*runner.addresses[0]), flush=True)
        await asyncio.Event().wait()


# ---- Command line --------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """A flag that is not given is not in the result: the workload or the default fills it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--api-key", help="sent as bearer token, never printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the JSON line too")
    parser.add_argument("--serve-mock", action="store_true", help="be the mock server instead")
    for f in (*fields(Settings), *fields(MockServer)):
        parser.add_argument(f"--{f.name.replace('_', '-')}", **f.metadata)
    return parser


def pick(given: dict[str, Any], kind: type) -> dict[str, Any]:
    return {f.name: given[f.name] for f in fields(kind) if f.name in given}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all requests succeeded, 1 some failed, 2 no run was possible."""
    given = vars(make_parser().parse_args(argv))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        if given.get("serve_mock"):
            runner.run(MockServer(**pick(given, MockServer)).serve())
        defaults = WORKLOADS.get(given.get("workload", ""), {})
        settings = Settings(**(defaults | pick(given, Settings)))
        try:
            report = runner.run(run_load(settings, given.get("api_key")))
        except LoadTestError as error:
            print(error, file=sys.stderr)
            return 2
    print_report(report)
    line = orjson.dumps(report).decode()
    print(line)
    if "json" in given:
        given["json"].write_text(line + "\n")
    return 1 if report["num_failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""One run: find the model, make the requests, load, read /metrics around it, sum up.

The parent process is synchronous but for a few requests of its own before and after the load.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
import numpy as np
import orjson

from loadtesting import output_check, server_metrics
from loadtesting.arrival import arrival_times
from loadtesting.client import open_session
from loadtesting.measure import Span, summarise
from loadtesting.record import Conversation, LoadTestError, Record, RefusedError, reason
from loadtesting.settings import Settings
from loadtesting.worker import Load, deal, run_shares
from loadtesting.workload import first_requests, make_conversations

Watch = Callable[[Sequence[Sequence[int]]], None]


@dataclass(frozen=True)
class Run:
    """One run's figures, and the records behind them for plots (times from the run's start)."""

    report: dict[str, Any]
    records: list[Record]
    span: Span

    @property
    def name(self) -> str:
        return str(self.report["conditions"]["base_url"])


def run_once(settings: Settings, api_key: str | None, watch: Watch) -> Run:
    """Warm up, load, digest. JSON makes an infinite rate of the report null."""
    model = settings.model or asyncio.run(ask(settings, api_key, first_model))
    return run_load(replace(settings, model=model), api_key, watch)


def run_load(settings: Settings, api_key: str | None, watch: Watch) -> Run:
    conversations = make_conversations(settings, settings.num_prompts, stream=0)
    warmups = make_conversations(settings, settings.num_warmups, stream=1)
    rng = np.random.default_rng([settings.seed, 2])
    times_s = arrival_times(settings, len(conversations), rng)
    due_s = None if times_s is None else times_s.tolist()

    before = asyncio.run(ask(settings, api_key, server_metrics.scrape))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        load = run_shares(deal(settings, api_key, warmups, conversations, due_s), watch)
    except RefusedError:
        found = asyncio.run(ask(settings, api_key, vocabulary))
        if found is None:
            raise
        print(f"the server's vocabulary seems to be {found}: --vocab-size", file=sys.stderr)
        return run_load(replace(settings, vocab_size=found), api_key, watch)
    after = asyncio.run(ask(settings, api_key, server_metrics.scrape))

    report = make_report(settings, load, started_at)
    if before is not None and after is not None:
        report["server_metrics"] = server_metrics.difference(before, after)
    if settings.check_outputs:
        report["output_check"] = check_outputs(settings, api_key, conversations, load.records)
    return Run(report, load.records, Span(load.start_s, load.end_s))


def make_report(settings: Settings, load: Load, started_at: str) -> dict[str, Any]:
    span = Span(load.start_s, load.end_s)
    figures = summarise(load.records, span, settings.slo)
    lag_p99_ms = load.lag_p99_s * 1e3
    late = figures["latency_ms"]["sent_after_intended"]
    if late and not settings.closed_loop and settings.max_concurrency is None:
        lag_p99_ms = max(lag_p99_ms, late["p99"])  # nothing held it back but the client
    loop = "closed_loop" if settings.closed_loop else "open_loop"
    return {
        "valid": lag_p99_ms <= settings.max_client_lag_ms,
        "conditions": asdict(settings) | {"load": loop, "started_at": started_at},
        **figures,
        "client_lag_p99_ms": lag_p99_ms,
        "client_lag_max_ms": load.lag_max_s * 1e3,
        "client_cpu_share": load.cpu_s / (span.end_s - span.start_s),
        "client_cpu_us_per_chunk": load.cpu_s
        * 1e6
        / max(1.0, figures["chunks_per_s"] * figures["duration_s"]),
    }


async def ask(settings: Settings, api_key: str | None, question: Any) -> Any:
    async with open_session(settings, api_key) as session:
        return await question(session, settings)


async def first_model(session: aiohttp.ClientSession, settings: Settings) -> str:
    url = f"{settings.base_url}/v1/models"
    try:
        async with session.get(url, raise_for_status=True) as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        what = reason(error) if isinstance(error, aiohttp.ClientError) else "no list of models"
        raise LoadTestError(f"no model from {url}, is the server up? {what}") from error


async def vocabulary(session: aiohttp.ClientSession, settings: Settings) -> int | None:
    """How many token ids the server takes, by trial. None: their number is not what is refused."""
    if settings.sends_text or settings.vocab_size is not None:
        return None
    url = f"{settings.base_url}/v1/{settings.path}"

    async def takes(token_id: int) -> bool:
        body = {"model": settings.model, "prompt": [token_id] * 2, "max_tokens": 1}
        async with session.post(url, data=orjson.dumps(body)) as response:
            return response.status == 200

    taken, refused = 0, settings.token_range[1] - 1
    if await takes(refused) or not await takes(taken):
        return None
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if await takes(middle) else (taken, middle)
    return refused


def check_outputs(
    settings: Settings,
    api_key: str | None,
    conversations: list[Conversation],
    records: list[Record],
) -> dict[str, Any]:
    """After the load, so that the reference's prompts were in no cache before it."""
    requests = first_requests(conversations, settings.check_outputs)
    reference = replace(settings, base_url=settings.reference_url or settings.base_url)
    texts = asyncio.run(output_check.reference_texts(reference, api_key, requests))
    return output_check.compare(texts, records)

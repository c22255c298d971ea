"""The work of `asyncllm run-batch`: lines in, requests to the app, lines out.

The app is the server's own, over a socket that only this process knows, so a line means what the
same request means to a server. Answers are written in the order of the lines, and no more lines are
read ahead than a few for each sequence that runs at once: a file may be larger than memory.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec
import orjson
from aiohttp import web
from tqdm import tqdm

from asyncllm.config import EngineArgs
from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.text.render_limit import install_signal
from asyncllm.server.app import build_app
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.field_errors import field_error
from asyncllm.server.http.listener import Listener
from asyncllm.server.lora import load_modules
from asyncllm.server.routes import served_routes
from asyncllm.server.serve import logs

MAX_LINE_BYTES = 64 * 1024 * 1024
REQUESTS_PER_SLOT = 2  # asked at a time, for each sequence that runs at once
LINES_AHEAD = 16  # of the first that is not answered, in units of the requests asked at a time

Answers = asyncio.Queue[asyncio.Task[dict[str, Any]] | None]  # in order; None: no more


class BatchLine(msgspec.Struct):
    """OpenAI's line of a batch's input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


async def answer_file(
    engine_args: EngineArgs, server_args: ServerArgs, lines: BinaryIO, out: BinaryIO
) -> int:
    """0 once every line has its answer, which may be an error: the output file tells. 1 where a
    line asks for nothing (no JSON, no `custom_id`): the file is not what was meant.

    Raises `OSError`, `ValueError`, `ModelLoadError`.
    """
    urls = frozenset(
        route.path
        for route in served_routes(server_args)
        if route.method == "POST" and route.request is not None
    )
    # A batch may wait as long as it takes: nobody else is kept from asking.
    patient = replace(
        engine_args,
        max_queued_requests=sys.maxsize,
        max_queued_tokens=sys.maxsize,
        max_queue_seconds=math.inf,
    )
    install_signal()
    engine = AsyncLLMEngine.from_engine_args(patient)
    engine.show_progress = sys.stderr.isatty()
    async with serving(engine, server_args) as session:
        batch = Batch(session, urls, engine.config.max_num_seqs * REQUESTS_PER_SLOT)
        with logs(engine, server_args):
            await batch.run(lines, out)
    print(f"{batch.num_answered} answered, {batch.num_failed} failed", file=sys.stderr)
    if batch.num_malformed:
        print(f"{batch.num_malformed} of them are no requests of a batch", file=sys.stderr)
    return int(batch.num_malformed > 0)


@asynccontextmanager
async def serving(engine: AsyncLLMEngine, args: ServerArgs) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the app in this process."""
    with tempfile.TemporaryDirectory(prefix="asyncllm-") as folder:  # for this user alone
        socket, key = str(Path(folder) / "socket"), secrets.token_urlsafe()
        args = replace(
            args, uds=socket, api_key=[key], disable_page=True, max_connections=sys.maxsize
        )
        runner = web.AppRunner(build_app(engine, args), handler_cancellation=True, access_log=None)
        await runner.setup()
        listener = Listener.bind(args)
        try:
            await engine.start()
            await load_modules(engine, args)
            await listener.start(runner)
            async with aiohttp.ClientSession(
                "http://localhost",
                connector=aiohttp.UnixConnector(socket, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Authorization": f"Bearer {key}"},
            ) as session:
                yield session
        finally:
            listener.close()
            await runner.cleanup()
            await engine.aclose()


class Batch:
    """At most `num_at_once` requests are asked at a time."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: frozenset[str], num_at_once: int
    ) -> None:
        self.num_answered = self.num_failed = self.num_malformed = 0
        self._session = session
        self._urls = urls
        self._room = asyncio.Semaphore(num_at_once)
        self._ahead = asyncio.Semaphore(num_at_once * LINES_AHEAD)

    async def run(self, lines: BinaryIO, out: BinaryIO) -> None:
        """Answer every line. Raises `OSError`, and `ValueError` for a line that is too long."""
        total = sum(1 for _ in _numbered(lines))
        lines.seek(0)
        with tqdm(total=total, desc="requests", file=sys.stderr) as bar:
            try:
                await self._answer_all(lines, out, bar)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None  # a TaskGroup's first error

    async def _answer_all(self, lines: BinaryIO, out: BinaryIO, bar: Any) -> None:
        answers: Answers = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(answers, out, bar))
            for number, line in _numbered(lines):
                await self._ahead.acquire()
                answers.put_nowait(tasks.create_task(self._answer(number, line)))
            answers.put_nowait(None)

    async def _write(self, answers: Answers, out: BinaryIO, bar: Any) -> None:
        while (task := await answers.get()) is not None:
            answer = await task
            self._ahead.release()
            if answer["error"] is None:
                self.num_answered += 1
            else:
                self.num_failed += 1
            out.write(orjson.dumps(answer) + b"\n")
            out.flush()
            bar.update()

    async def _answer(self, number: int, line: bytes) -> dict[str, Any]:
        """The output line. Failures over HTTP have a response and an error, others an error."""
        asked = _parse(number, line)
        if isinstance(asked, dict):
            self.num_malformed += 1
            return asked
        if asked.method.upper() != "POST":
            return _refusal(asked.custom_id, number, f"method must be POST, not {asked.method!r}")
        if asked.url not in self._urls:
            known = ", ".join(sorted(self._urls))
            return _refusal(asked.custom_id, number, f"url must be one of {known}")
        if asked.body.get("stream"):
            return _refusal(asked.custom_id, number, "stream is not possible in a batch")
        try:
            async with self._room, self._session.post(asked.url, json=asked.body) as response:
                body = _body(await response.read())
        except aiohttp.ClientError as error:
            return _refusal(asked.custom_id, number, f"no answer: {error}", "no_answer")
        failed = response.status != 200
        return _line(
            asked.custom_id,
            {"status_code": response.status, "request_id": _id("req"), "body": body},
            _error(body) if failed else None,
        )


def _body(answer: bytes) -> Any:
    """JSON, or the text that some routes answer with."""
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer.decode(errors="replace")


def _error(body: Any) -> Any:
    return body.get("error", body) if isinstance(body, dict) else body


def _numbered(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with something in them, counted from 1. Raises `ValueError` where one is too long."""
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        if not line:
            return
        if line.strip():
            yield number, line


def _parse(number: int, line: bytes) -> BatchLine | dict[str, Any]:
    """The request, or the output line that refuses it."""
    try:
        return msgspec.json.decode(line, type=BatchLine)
    except (ValueError, RecursionError) as error:
        try:
            custom_id = orjson.loads(line)["custom_id"]
        except (ValueError, LookupError, TypeError):
            custom_id = None
        is_typed = isinstance(error, msgspec.ValidationError)
        said = field_error(str(error), BatchLine).message if is_typed else str(error)
        return _refusal(custom_id, number, said)


def _refusal(
    custom_id: Any, number: int, message: str, code: str = "invalid_line"
) -> dict[str, Any]:
    error = {
        "message": f"line {number}: {message}",
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    return _line(custom_id, None, error)


def _line(custom_id: Any, response: dict[str, Any] | None, error: Any) -> dict[str, Any]:
    return {"id": _id("batch_req"), "custom_id": custom_id, "response": response, "error": error}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

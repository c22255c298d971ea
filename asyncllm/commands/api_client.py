"""An OpenAI-compatible server, as far as a terminal needs it: its models, and streamed answers.

Imports aiohttp: import it when there is something to ask.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
import orjson

from asyncllm.server.args import API_KEY_VARIABLES

CONNECT_SECONDS = 10.0
MAX_EVENT_BYTES = 16 * 1024 * 1024  # of one event of a stream
MAX_ERROR_CHARS = 2000
KEY_VARIABLES = " or ".join(f"${name}" for name in (*API_KEY_VARIABLES, "OPENAI_API_KEY"))
DONE = b"[DONE]"


class AnswerError(Exception):
    """The server answered with an error, or could not be reached."""


class ApiClient:
    """An async context manager. url: with its /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The names of /models, at least one. Raises `AnswerError`."""
        try:
            async with self._session.get(f"{self._url}/models") as response:
                if response.status == 404:
                    raise AnswerError(f"there is no {response.url}: must its URL end in /v1?")
                await _check(response)
                entries = orjson.loads(await response.read())["data"]
                return [str(entries[0]["id"]), *(str(entry["id"]) for entry in entries[1:])]
        except aiohttp.ClientError as error:
            raise self._unreached(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerError(f"{self._url}/models: no list of models") from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer until [DONE]. Raises `AnswerError`, for an error event too."""
        try:
            async with self._session.post(
                self._url + path, json={**body, "stream": True}
            ) as response:
                await _check(response)
                async for data in read_events(response.content.iter_any()):
                    if data == DONE:
                        return
                    yield _parse(data)
        except aiohttp.ClientError as error:
            raise self._unreached(error) from error
        raise AnswerError("the stream ended before the answer did")

    def _unreached(self, error: aiohttp.ClientError) -> AnswerError:
        if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
            return AnswerError(f"{self._url!r} is no URL such as http://127.0.0.1:8000/v1")
        if isinstance(error, aiohttp.ClientConnectorError):
            code = error.os_error.errno  # else Python's words of it, with a tuple
            said = os.strerror(code) if code and code > 0 else error.strerror or error.os_error
            return AnswerError(f"no server at {self._url}: {said}")
        return AnswerError(f"{self._url}: {error}")


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, however the stream is cut; comments are left out."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise AnswerError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:  # this API's data are one line of JSON each
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except ValueError as error:
        raise AnswerError(f"an event that is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise AnswerError(f"an event that is no object: {data[:80]!r}")
    if event.get("error"):
        raise AnswerError(_message(event, "the server reported an error"))
    return event


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raw = await response.content.read(MAX_EVENT_BYTES)
        try:
            body = orjson.loads(raw)
        except ValueError:
            body = None
        said = _message(body, f"HTTP status {response.status}")
        if response.status == 401:
            said = f"{said.rstrip('.')}: give the server's with --api-key, or in {KEY_VARIABLES}"
        raise AnswerError(said)


def _message(body: Any, otherwise: str) -> str:
    """The words of an error body in OpenAI's shape."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:MAX_ERROR_CHARS] if isinstance(message, str) else otherwise

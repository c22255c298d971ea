"""Flags, question loop and printing that `asyncllm chat` and `asyncllm complete` share.

Ctrl-C ends an answer, and the client's leaving ends it in the server; Ctrl-D, or the end of a
piped input, ends the program. Colours only on a terminal, and there a model's control characters
are left out: its words could otherwise do to the terminal whatever escape sequences can.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from asyncllm.server.args import API_KEY_VARIABLES, key_from_environment

if TYPE_CHECKING:
    from asyncllm.commands.api_client import ApiClient

DEFAULT_URL = "http://127.0.0.1:8000/v1"
EXIT_CODE_INTERRUPTED = 130
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


class Session:
    """It answers typed lines by a model of a server. Each method raises `AnswerError`."""

    hint = ""  # what to say before the first prompt

    def __init__(self, options: argparse.Namespace) -> None:
        self.model: str | None = options.model_name
        self._options = options

    async def greeting(self) -> str:
        self.model = self.model or (await self.models())[0]
        return f"{self.model} at {self._options.url}. {self.hint}"

    async def ask(self, line: str) -> None:
        raise NotImplementedError

    async def command(self, line: str) -> bool:
        """Run the line if it is a command, else return False. Raises `EOFError` to end."""
        return False

    async def models(self) -> list[str]:
        async with self._client() as client:
            return await client.models()

    async def show(
        self, path: str, body: dict[str, Any], write: Callable[[dict[str, Any], Screen], object]
    ) -> None:
        """`write` each choice of the answer's events as it comes."""
        screen, watch = Screen(sys.stdout), Stopwatch()
        if self._options.stats:
            body = body | {"stream_options": {"include_usage": True}}
        async with self._client() as client:
            self.model = self.model or (await client.models())[0]
            try:
                async for event in client.stream(path, {"model": self.model, **body}):
                    watch.event(event)
                    for choice in event.get("choices") or ():
                        write(choice, screen)
            finally:
                screen.end()
        if self._options.stats:
            print(watch.words(), file=sys.stderr)

    def _client(self) -> ApiClient:
        from asyncllm.commands.api_client import ApiClient  # imports aiohttp

        return ApiClient(self._options.url, api_key(self._options))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the API (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", metavar="NAME", help="default: the server's first model")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"default: ${', $'.join(API_KEY_VARIABLES)}, or else $OPENAI_API_KEY",
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this alone, then exit")
    parser.add_argument("--stats", action="store_true", help="tokens and speed after each answer")


def api_key(options: argparse.Namespace) -> str | None:
    given = options.api_key or key_from_environment()
    return given or os.environ.get("OPENAI_API_KEY") or None


class Screen:
    """Writes an answer as it comes: reasoning and calls dim, the text plain."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_colours = self._is_terminal and not os.environ.get("NO_COLOR")
        self._is_dim = False
        self._at_line_start = True

    def write(self, text: str, dim: bool = False) -> None:
        if not text:
            return
        if dim != self._is_dim:
            self.end_line()
            self._is_dim = dim
            self._colour(DIM if dim else PLAIN)
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        self._out.write(text)
        self._at_line_start = text.endswith("\n") if text else self._at_line_start
        self._out.flush()

    def end_line(self) -> None:
        if not self._at_line_start:
            self._out.write("\n")
            self._at_line_start = True

    def end(self) -> None:
        """Ends the line and colour of an answer, complete or not."""
        self.end_line()
        if self._is_dim:
            self._colour(PLAIN)
            self._is_dim = False
        self._out.flush()

    def _colour(self, code: str) -> None:
        if self._has_colours:
            self._out.write(code)


class Stopwatch:
    """Tokens and times of one answer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._usage: dict[str, Any] = {}

    def event(self, event: dict[str, Any]) -> None:
        if self._first is None and event.get("choices"):
            self._first = time.perf_counter()
        self._usage = event.get("usage") or self._usage

    def words(self) -> str:
        now = time.perf_counter()
        first = self._first or now
        num_tokens = self._usage.get("completion_tokens") or 0
        rate = (
            f", {(num_tokens - 1) / (now - first):.1f} tokens/s after it" if num_tokens > 1 else ""
        )
        return (
            f"[{self._usage.get('prompt_tokens', 0)} + {num_tokens} tokens, first after "
            f"{first - self._start:.2f} s{rate}]"
        )


def ask_all(session: Session, quick: str | None) -> int:
    """Ask `quick`, or whatever is typed or piped in until it ends; the exit code."""
    if quick is not None:
        return _say(session.ask(quick))
    if not sys.stdin.isatty():
        return _ask_piped(session)
    if code := _say(_greet(session)):
        return code  # before a prompt that nobody would answer
    for line in _typed():
        try:
            code |= _say(_take(session, line)) == 1  # Ctrl-C ended an answer: no error
        except EOFError:
            break
    return code


def _ask_piped(session: Session) -> int:
    code = 0
    for line in sys.stdin:
        if line.strip():
            code = max(code, _say(session.ask(line.rstrip("\n"))))
            if code == EXIT_CODE_INTERRUPTED:
                break
    return code


def _say(work: Coroutine[Any, Any, None]) -> int:
    """The exit code of a single one; an error is one line."""
    from asyncllm.commands.api_client import AnswerError

    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return EXIT_CODE_INTERRUPTED
    except AnswerError as error:
        print(f"asyncllm: error: {error}", file=sys.stderr)
        return 1
    return 0


async def _greet(session: Session) -> None:
    print(await session.greeting())


async def _take(session: Session, line: str) -> None:
    if not await session.command(line):
        await session.ask(line)


def _typed() -> Iterator[str]:
    with suppress(ImportError):  # line editing and history for input(), where there is one
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line

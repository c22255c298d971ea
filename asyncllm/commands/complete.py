"""`asyncllm complete`: let a running server continue texts, each by itself."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asyncllm.commands import terminal
from asyncllm.commands.terminal import Screen, Stopwatch

HELP = "let a running server continue texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: server's)"
    )


def run(options: argparse.Namespace) -> int:
    return terminal.ask_all(Continuation(options), options.quick)


class Continuation:
    """Each line is a text, also one that begins with a slash."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._model: str | None = options.model_name

    async def greeting(self) -> str:
        from asyncllm.commands.api_client import ApiClient

        async with ApiClient(self._options.url, terminal.api_key(self._options)) as client:
            self._model = self._model or (await client.models())[0]
        return (
            f"{self._model} at {self._options.url}. Each line is a text to continue. Ctrl-C ends "
            "an answer, Ctrl-D the program."
        )

    async def command(self, line: str) -> bool:
        return False

    async def ask(self, line: str) -> None:
        from asyncllm.commands.api_client import ApiClient

        body: dict[str, Any] = {"prompt": line}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        if self._options.stats:
            body["stream_options"] = {"include_usage": True}
        screen, watch = Screen(sys.stdout), Stopwatch()
        async with ApiClient(self._options.url, terminal.api_key(self._options)) as client:
            self._model = self._model or (await client.models())[0]
            try:
                async for event in client.stream("/completions", {"model": self._model, **body}):
                    watch.event(event)
                    for choice in event.get("choices") or ():
                        screen.write(choice.get("text") or "")
            finally:
                screen.end()
        if self._options.stats:
            print(watch.words(), file=sys.stderr)

"""`asyncllm complete`: let a running server continue texts, each by itself."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asyncllm.commands import terminal
from asyncllm.commands.terminal import Screen, Stopwatch

HELP = "let a running server continue texts"
GREETING = "Each line is a text to continue. Ctrl-C ends an answer, Ctrl-D the program."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: server's)"
    )


def run(options: argparse.Namespace) -> int:
    async def ask(prompt: str) -> None:
        await _complete(prompt, options)

    return terminal.ask_all(ask, options.quick, GREETING)


async def _complete(prompt: str, options: argparse.Namespace) -> None:
    """Raises `AnswerError`."""
    from asyncllm.commands.api_client import ApiClient

    body: dict[str, Any] = {"prompt": prompt}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.stats:
        body["stream_options"] = {"include_usage": True}
    screen, watch = Screen(sys.stdout), Stopwatch()
    async with ApiClient(options.url, terminal.api_key(options)) as client:
        model = options.model_name or await client.first_model()
        try:
            async for event in client.stream("/completions", {"model": model, **body}):
                watch.event(event)
                for choice in event.get("choices") or ():
                    screen.write(choice.get("text") or "")
        finally:
            screen.end()
    if options.stats:
        print(watch.words(), file=sys.stderr)

"""`asyncllm complete`: let a running server continue texts, each by itself."""

from __future__ import annotations

import argparse
from typing import Any

from asyncllm.commands import terminal
from asyncllm.commands.terminal import Screen

HELP = "let a running server continue texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: server's)"
    )


def run(options: argparse.Namespace) -> int:
    return terminal.ask_all(Continuation(options), options.quick)


class Continuation(terminal.Session):
    """Each line is a text, also one that begins with a slash."""

    hint = "Each line is a text to continue. Ctrl-C ends an answer, Ctrl-D the program."

    async def ask(self, line: str) -> None:
        body: dict[str, Any] = {"prompt": line}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        await self.show("/completions", body, _write)


def _write(choice: dict[str, Any], screen: Screen) -> None:
    screen.write(choice.get("text") or "")

"""`asyncllm chat`: talk to a running server, this one or any other that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asyncllm.commands import terminal
from asyncllm.commands.terminal import Screen, Stopwatch

HELP = "talk to a running server"
GREETING = "Ctrl-C ends an answer, Ctrl-D the conversation."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the conversation begins with")


def run(options: argparse.Namespace) -> int:
    conversation = Conversation(options)
    return terminal.ask_all(conversation.ask, options.quick, GREETING)


class Conversation:
    """`messages` so far. A question that got no answer at all is forgotten."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.messages: list[dict[str, str]] = []
        if options.system_prompt is not None:
            self.messages.append({"role": "system", "content": options.system_prompt})
        self._options = options
        self._model: str | None = options.model_name

    async def ask(self, question: str) -> None:
        """Raises `AnswerError`. What was said until an interruption is remembered."""
        from asyncllm.commands.api_client import ApiClient

        asked = [*self.messages, {"role": "user", "content": question}]
        body: dict[str, Any] = {"messages": asked}
        if self._options.stats:
            body["stream_options"] = {"include_usage": True}
        screen, watch = Screen(sys.stdout), Stopwatch()
        said: list[str] = []
        async with ApiClient(self._options.url, terminal.api_key(self._options)) as client:
            self._model = self._model or await client.first_model()
            try:
                events = client.stream("/chat/completions", {"model": self._model, **body})
                async for event in events:
                    watch.event(event)
                    choices = event.get("choices") or ()
                    said += [_show(choice.get("delta") or {}, screen) for choice in choices]
            finally:
                screen.end()
                if any(said):
                    self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if self._options.stats:
            print(watch.words(), file=sys.stderr)


def _show(delta: dict[str, Any], screen: Screen) -> str:
    """Print a delta; its content."""
    screen.write(delta.get("reasoning") or delta.get("reasoning_content") or "", dim=True)
    content: str = delta.get("content") or ""
    screen.write(content)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name"):
            screen.end_line()
            screen.write(f"[calls {function['name']}] ", dim=True)
        screen.write(function.get("arguments") or "", dim=True)
    return content

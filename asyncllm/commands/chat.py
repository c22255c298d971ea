"""`asyncllm chat`: talk to a running server, this one or any other that speaks OpenAI's API."""

from __future__ import annotations

import argparse
from typing import Any

from asyncllm.commands import terminal
from asyncllm.commands.terminal import Screen

HELP = "talk to a running server"
COMMANDS = {
    "/help": "this list",
    "/new": "forget the conversation",
    "/undo": "forget the last question and its answer",
    "/retry": "ask the last question again",
    "/system": "TEXT: begin anew, with this system prompt",
    "/model": "[NAME]: the server's models, or talk to another one",
    "/stats": "tokens and speed after each answer, or no longer",
    "/quit": "end, as Ctrl-D does",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the conversation begins with")


def run(options: argparse.Namespace) -> int:
    return terminal.ask_all(Conversation(options), options.quick)


class Conversation(terminal.Session):
    """`messages` so far. A question that got no answer at all is forgotten."""

    hint = "/help lists commands, Ctrl-C ends an answer, Ctrl-D the conversation."

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.messages: list[dict[str, str]] = []
        self._last = ""  # question
        self._begin()

    async def ask(self, question: str) -> None:
        """An interrupted answer is remembered as far as it came."""
        self._last = question
        asked = [*self.messages, {"role": "user", "content": question}]
        said: list[str] = []

        def write(choice: dict[str, Any], screen: Screen) -> None:
            said.append(_write(choice, screen))

        try:
            await self.show("/chat/completions", {"messages": asked}, write)
        finally:
            if any(said):
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    async def command(self, line: str) -> bool:
        """A slash and letters, and what follows them; a path, with more slashes, is a question."""
        name, _, rest = line.partition(" ")
        if not (name.startswith("/") and name[1:].isalpha()):
            return False
        rest = rest.strip()
        if name == "/quit":
            raise EOFError
        if name == "/new":
            self._begin()
        elif name == "/undo":
            self._undo()
        elif name == "/retry":
            await self._retry()
        elif name == "/system":
            self._options.system_prompt = rest or None
            self._begin()
        elif name == "/model":
            await self._choose(rest)
        elif name == "/stats":
            self._options.stats = not self._options.stats
        else:
            if name not in COMMANDS:
                print(f"There is no {name}.")
            print("\n".join(f"{command:8} {what}" for command, what in COMMANDS.items()))
        return True

    def _begin(self) -> None:
        prompt = self._options.system_prompt
        self.messages = [] if prompt is None else [{"role": "system", "content": prompt}]

    def _undo(self) -> None:
        while self.messages and self.messages[-1]["role"] != "system":
            if self.messages.pop()["role"] == "user":
                return

    async def _retry(self) -> None:
        if self.messages[-2:-1] == [{"role": "user", "content": self._last}]:
            self._undo()
        if self._last:
            await self.ask(self._last)

    async def _choose(self, name: str) -> None:
        models = await self.models()
        if name in models:
            self.model = name
        elif name:
            print(f"The server has no {name}.")
        print("\n".join(f"{'*' if each == self.model else ' '} {each}" for each in models))


def _write(choice: dict[str, Any], screen: Screen) -> str:
    """Print a choice's delta; its content."""
    delta = choice.get("delta") or {}
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

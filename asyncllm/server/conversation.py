"""A conversation put together from items or blocks, as the messages of a chat request.

Chat templates want one message per turn: what the assistant thought, said and called in one turn is
one message here, and all that the system says before the first turn is one system message.
"""

from __future__ import annotations

from typing import Any

Content = str | list[dict[str, Any]]


class Conversation:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, content: Content) -> None:
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            first = self.messages[0]
            first["content"] = _as_parts(first["content"]) + _as_parts(content)
        else:
            self.messages.append({"role": "system", "content": content})

    def user(self, content: Content) -> None:
        self.messages.append({"role": "user", "content": content})

    def tool_result(self, call_id: str, content: Content) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def thought(self, text: str) -> None:
        turn = self._assistant_turn()
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{before}\n{text}" if before else text

    def said(self, content: Content) -> None:
        turn = self._assistant_turn()
        before = turn["content"]
        turn["content"] = _as_parts(before) + _as_parts(content) if before else content

    def called(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"name": name, "arguments": arguments}
        self._assistant_turn().setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": call}
        )

    def _assistant_turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _as_parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content

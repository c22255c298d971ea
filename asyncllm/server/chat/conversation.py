"""A conversation joined from items or blocks, as the messages of a chat request.

Chat templates expect one message per turn: the reasoning, text and calls of an assistant's turn are
one message here, and all system content before the first turn is one system message. A turn
may be a hundred thousand blocks, so it only ever grows in place.
"""

from __future__ import annotations

from typing import Any

Content = str | list[dict[str, Any]]


class Conversation:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # of the last message

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._join_thoughts()
        return self._messages

    def add_system(self, content: Content) -> None:
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            _add_content(self._messages[0], content)
        else:
            self._begin({"role": "system", "content": content})

    def add_user(self, content: Content) -> None:
        self._begin({"role": "user", "content": content})

    def add_tool_result(self, call_id: str, content: Content) -> None:
        self._begin({"role": "tool", "tool_call_id": call_id, "content": content})

    def add_reasoning(self, text: str) -> None:
        self._assistant_turn()
        if text:
            self._thoughts.append(text)

    def add_text(self, content: Content) -> None:
        _add_content(self._assistant_turn(), content)

    def add_tool_call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"name": name, "arguments": arguments}
        self._assistant_turn().setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": call}
        )

    def _assistant_turn(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._begin({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _begin(self, message: dict[str, Any]) -> None:
        self._join_thoughts()
        self._thoughts = []
        self._messages.append(message)

    def _join_thoughts(self) -> None:
        if self._thoughts:
            self._messages[-1]["reasoning_content"] = "\n".join(self._thoughts)


def _add_content(message: dict[str, Any], content: Content) -> None:
    before = message["content"]
    if not before:
        message["content"] = content
    elif isinstance(before, list):
        before += _as_parts(content)
    else:
        message["content"] = _as_parts(before) + _as_parts(content)


def _as_parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content

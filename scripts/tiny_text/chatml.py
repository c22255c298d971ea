"""ChatML: what a conversation looks like as text, in Python.

The chat template in tiny_tokenizer says the same in Jinja, several hundred times slower.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

THINK_PROMPT = "Think before you answer."

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to help the user. "
    "Their signatures are within <tools></tools>:\n<tools>"
)

TOOLS_AFTER = (
    "\n</tools>\n\nFor each call return a JSON object with the name and the arguments within "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function name>, "arguments": <arguments>}\n'
    "</tool_call>"
)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with an assistant message.

    messages: OpenAI form; `reasoning_content` holds the thought of an assistant message.
    thinking: the chat template's `enable_thinking`; None leaves it undefined.
    answer: the exact text that the model shall produce for the last message, end token left out.
    last_only: train on the last message alone, because a template drops earlier thoughts.
    keys: what was asked; at most the last one is held out.
    """

    kind: str
    messages: list[Message]
    answer: str
    keys: list[str]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool | None = None
    last_only: bool = False


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the Hermes format, as the chat template writes it."""
    call = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def thought_text(thought: str) -> str:
    """A thought as it stands before the answer."""
    return f"<think>\n{thought}\n</think>\n\n"


def message_text(message: Message) -> str:
    """The assistant's text and calls, without its thought."""
    calls = message.get("tool_calls") or []
    texts = [message["content"]] if message["content"] else []
    texts += [call_text(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    return "\n".join(texts)


def segments(shown: Example) -> list[tuple[str, bool]]:
    """The conversation as (text, trained on?) pieces; joined, the chat template's rendering.

    Pieces end where the pre-tokenizer splits anyway, so that they may be encoded one by one.
    """
    grouped = itertools.groupby(_pieces(shown), key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), trained) for trained, group in grouped]


def _pieces(shown: Example) -> Iterator[tuple[str, bool]]:
    messages = list(shown.messages)
    system = [messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
    if shown.tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in shown.tools)
        system.append(TOOLS_BEFORE + listed + TOOLS_AFTER)
    if shown.thinking:
        system.append(THINK_PROMPT)
    if system:
        joined = "\n\n".join(system)
        yield f"<|im_start|>system\n{joined}<|im_end|>\n", False
    last_query = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        last = i == len(messages) - 1
        if message["role"] == "user":
            yield f"<|im_start|>user\n{message['content']}<|im_end|>\n", False
        elif message["role"] == "tool":
            first = messages[i - 1]["role"] != "tool"
            final = last or messages[i + 1]["role"] != "tool"
            yield (
                (
                    ("<|im_start|>tool" if first else "")
                    + f"\n<tool_response>\n{message['content']}\n</tool_response>"
                    + ("<|im_end|>\n" if final else "")
                ),
                False,
            )
        else:
            empty = "<think>\n\n</think>\n\n" if last and shown.thinking is False else ""
            yield f"<|im_start|>assistant\n{empty}", False
            thought = message.get("reasoning_content") if i > last_query else None
            text = (thought_text(thought) if thought else "") + message_text(message)
            yield f"{text}<|im_end|>", last or not shown.last_only
            yield "\n", False

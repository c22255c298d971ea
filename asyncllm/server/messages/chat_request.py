"""Anthropic's request as the equivalent chat request.

The text, thinking and calls of a turn become one message; each tool result becomes one of its own.
A conversation that ends with an assistant's text is to be continued (a prefill).
"""

from __future__ import annotations

import re
from typing import Any

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.refusals import refuse, sent_fields
from asyncllm.server.messages.message import THREAD_UNSUPPORTED
from asyncllm.server.messages.protocol import (
    REFUSED,
    REFUSED_IN_PROMPT,
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolUseChoice,
)
from asyncllm.server.protocol import ChatRequest, JsonSchema, JsonSchemaFormat

# chat request's field -> Anthropic's, for errors
FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "prompt": "messages",
}


def prompt_request(request: CountTokensRequest) -> ChatRequest:
    """The fields that decide the prompt. Raises `ApiError`."""
    refuse(sent_fields(request), REFUSED_IN_PROMPT)
    messages = conversation(request)
    chat = ChatRequest(model=request.model, messages=messages)
    if is_prefill(messages):
        chat.add_generation_prompt, chat.continue_final_message = False, True
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        _choose_tool(chat, request.tool_choice)
    config = request.output_config
    if config is not None and config.effort is not None:
        chat.reasoning_effort = config.effort
    output_format = (config and config.format) or request.output_format
    if output_format is not None:
        chat.response_format = JsonSchemaFormat(JsonSchema("output", schema=output_format.schema))
    chat.chat_template_kwargs = _template_kwargs(request)
    return chat


def chat_request(request: MessagesRequest) -> ChatRequest:
    """Raises `ApiError`."""
    refuse(sent_fields(request), REFUSED)
    if request.thread:
        raise bad_request("no conversation is held here", "thread", THREAD_UNSUPPORTED)
    chat = prompt_request(request)
    chat.max_completion_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.stream = request.stream
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.seed = request.seed
    chat.priority = request.priority
    chat.cache_salt = request.cache_salt
    if request.thinking is not None:
        chat.thinking_token_budget = request.thinking.budget_tokens
    return chat


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any] | None:
    """Switch thinking by Qwen's name of the template's variable, and by DeepSeek's."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None and request.thinking.type != "adaptive":
        is_on = request.thinking.type == "enabled"
        kwargs = {"enable_thinking": is_on, "thinking": is_on} | kwargs
    return kwargs or None


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"tools[{index}]"
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad_request(f"{where}: tools of type {str(kind)[:100]!r} are not supported", "tools")
    callers = tool.get("allowed_callers")
    if callers is not None and (not isinstance(callers, list) or "direct" not in callers):
        raise bad_request(f"{where}: allowed_callers other than 'direct' is not supported", "tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise bad_request(f"{where}: input_schema must be an object", "tools")
    if examples := tool.get("input_examples"):
        schema = {**schema, "examples": examples}  # where the model reads them
    function = {"name": tool.get("name"), "parameters": schema}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _choose_tool(chat: ChatRequest, choice: ToolUseChoice) -> None:
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice of type 'tool' needs a name", "tool_choice")
        chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
    else:
        chat.tool_choice = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


# Claude Code's first system block holds a number that changes with each request and is for the
# accounts of Anthropic: in front of a prompt it would keep the prefix cache from ever being used.
_BILLING = re.compile(r"x-anthropic-billing-header:")


def conversation(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Raises `ApiError` naming the message."""
    result = Conversation()
    if request.system:
        system = request.system
        parts = [{"type": "text", "text": system}] if isinstance(system, str) else system
        if texts := [part for part in parts if not _BILLING.match(_text(part, "system"))]:
            result.add_system(texts)
    for index, message in enumerate(request.messages):
        _add(result, message, f"messages[{index}]")
    return result.messages


def is_prefill(messages: list[dict[str, Any]]) -> bool:
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _add(result: Conversation, message: InputMessage, where: str) -> None:
    content = message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message.role == "assistant":
        for block in blocks:
            _add_to_turn(result, block, where)
    elif message.role == "system":
        result.add_system([{"type": "text", "text": _text(block, where)} for block in blocks])
    else:
        _add_user(result, blocks, where)


def _add_to_turn(result: Conversation, block: Block, where: str) -> None:
    match block.get("type"):
        case "text":
            result.add_text([{"type": "text", "text": _text(block, where)}])
        case "thinking":
            result.add_reasoning(_string(block, "thinking", where))
        case "redacted_thinking":
            pass  # none of ours: only its author can read it
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_request(
                    f"{where}: a tool_use block's input must be an object", "messages"
                )
            name = _string(block, "name", where)
            result.add_tool_call(_string(block, "id", where), name, arguments)
        case other:
            raise _unknown(other, where)


def _add_user(result: Conversation, blocks: list[Block], where: str) -> None:
    texts: list[Block] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                result.add_user(texts)
                texts = []
            result.add_tool_result(_string(block, "tool_use_id", where), _tool_result(block, where))
        else:
            texts.append({"type": "text", "text": _text(block, where)})
    if texts:
        result.add_user(texts)


def _tool_result(block: Block, where: str) -> list[Block]:
    content = block.get("content") or ""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(
            f"{where}: a tool_result's content must be a string or a list", "messages"
        )
    texts = [{"type": "text", "text": _text(part, where)} for part in content]
    # Templates know no failed call: the model must be able to read that it was one.
    return [{"type": "text", "text": "Error:"}, *texts] if block.get("is_error") else texts


def _text(block: object, where: str) -> str:
    if not isinstance(block, dict):
        raise bad_request(f"{where}: blocks must be objects", where.partition("[")[0])
    if block.get("type") != "text":
        raise _unknown(block.get("type"), where)
    return _string(block, "text", where)


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        message = f"{where}: a {block.get('type')} block's {key} must be a string"
        raise bad_request(message, where.partition("[")[0])
    return value


def _unknown(kind: object, where: str) -> Exception:
    message = f"{where}: blocks of type {str(kind)[:100]!r} are not supported here"
    if kind in ("image", "document"):
        message = f"{where}: this model takes text only, not blocks of type {kind!r}"
    return bad_request(message, where.partition("[")[0])

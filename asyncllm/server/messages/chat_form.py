"""Anthropic's request as the chat request that asks for the same."""

from __future__ import annotations

from typing import Any

from asyncllm.server.client_fields import refuse, sent
from asyncllm.server.errors import bad_request
from asyncllm.server.messages.blocks import conversation, is_prefill
from asyncllm.server.messages.errors import THREAD_UNSUPPORTED
from asyncllm.server.messages.protocol import (
    REFUSED,
    REFUSED_IN_PROMPT,
    CountTokensRequest,
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
    """What decides the prompt. Raises `ApiError`."""
    refuse(sent(request), REFUSED_IN_PROMPT)
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
    refuse(sent(request), REFUSED)
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
    """How templates are told to think or not: by Qwen's name, and by DeepSeek's."""
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

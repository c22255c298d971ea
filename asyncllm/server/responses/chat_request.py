"""A /v1/responses request as the equivalent chat request.

With `truncation: auto` the oldest turns of a conversation that is too long are left out. A turn
begins with a user message. The first system message and the last turn stay: if that alone is too
long, the engine refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.serving import num_tokens, render_prompt
from asyncllm.server.http.bodies import OffLoop
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.refusals import refuse, sent_fields
from asyncllm.server.protocol import (
    ChatRequest,
    GenerationRequest,
    JsonSchema,
    JsonSchemaFormat,
)
from asyncllm.server.responses.items import Item, add_items
from asyncllm.server.responses.protocol import (
    REFUSED,
    REFUSED_IN_PROMPT,
    ResponsesRequest,
    SchemaFormat,
    TextConfig,
)
from asyncllm.server.service import Service

LOGPROBS = "message.output_text.logprobs"
# What else may be included: of tools that are refused, or (encrypted reasoning) sent in the clear.
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 16, 64, 512

# chat request's field -> this API's, for errors
FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "verbosity": "text",
    "logprobs": "top_logprobs",
}


def prompt_request(request: ResponsesRequest, items: Iterable[Item]) -> ChatRequest:
    """The fields that decide the prompt, after `items`. Raises `ApiError`."""
    refuse(sent_fields(request), REFUSED_IN_PROMPT)
    conversation = Conversation()
    if request.instructions:
        conversation.add_system(request.instructions)
    add_items(conversation, items)
    chat = ChatRequest(model=request.model, messages=conversation.messages)
    chat.chat_template_kwargs = request.chat_template_kwargs
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    chat.tool_choice = _tool_choice(request.tool_choice)
    chat.parallel_tool_calls = request.parallel_tool_calls
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None:
        _ask_for_text(chat, request.text)
    return chat


def chat_request(request: ResponsesRequest, items: Iterable[Item]) -> ChatRequest:
    """Raises `ApiError`."""
    refuse(sent_fields(request), REFUSED)
    _check_metadata(request.metadata or {})
    chat = prompt_request(request, items)
    for name in GenerationRequest.__struct_fields__:
        if getattr(chat, name) is None:
            setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    if _wants_logprobs(request):
        chat.logprobs = True
        chat.top_logprobs = request.top_logprobs
    return chat


def _wants_logprobs(request: ResponsesRequest) -> bool:
    for name in request.include or ():
        if name not in INCLUDABLE:
            raise bad_request(f"include must not name {name[:100]!r}", "include")
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def _ask_for_text(chat: ChatRequest, text: TextConfig) -> None:
    chat.verbosity = text.verbosity
    wanted = text.format
    if isinstance(wanted, SchemaFormat):
        schema = JsonSchema(wanted.name, wanted.description, wanted.schema, wanted.strict)
        chat.response_format = JsonSchemaFormat(schema)
    else:
        chat.response_format = wanted


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """A function in the chat API's shape. The other tools are for the server to run."""
    kind = tool.get("type")
    if kind != "function":
        raise bad_request(
            f"tools[{index}]: tools of type {str(kind)[:100]!r} are not supported", "tools"
        )
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise bad_request("tool_choice must be none, auto or required", "tool_choice")
        return choice
    kind = choice.get("type")
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise bad_request("allowed_tools needs a list of tools", "tool_choice")
        allowed = {"mode": choice.get("mode"), "tools": [_named(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise bad_request(f"tool_choice of type {str(kind)[:100]!r} is not supported", "tool_choice")


def _named(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request("tool_choice can name functions only", "tool_choice")
    return {"type": "function", "function": {"name": tool.get("name")}}


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad_request(f"{len(metadata)} pairs, at most {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise bad_request(
                f"metadata has keys of at most {MAX_METADATA_KEY_CHARS} characters "
                f"and values of at most {MAX_METADATA_VALUE_CHARS}",
                "metadata",
            )


async def drop_oldest_turns(request: ChatRequest, service: Service, off_loop: OffLoop) -> None:
    """Make room for the output. At most log2(turns) + 1 prompts are rendered."""
    room = service.engine.max_model_len - (request.max_completion_tokens or 1)
    messages = request.messages
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    system = messages[:1] if messages[0]["role"] == "system" else []

    async def fits(num_dropped: int) -> bool:
        request.messages = _without(messages, starts, system, num_dropped)
        prompt = await off_loop.read(partial(render_prompt, request, service))
        return await num_tokens(prompt, service) <= room

    if not starts or await fits(0):
        return
    low, high = 1, max(len(starts) - 1, 0)  # the fewest turns to drop are between them
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    request.messages = _without(messages, starts, system, high)


def _without(
    messages: list[dict[str, Any]],
    starts: list[int],
    system: list[dict[str, Any]],
    num_dropped: int,
) -> list[dict[str, Any]]:
    return system + messages[starts[num_dropped] :] if num_dropped else messages

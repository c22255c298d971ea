"""Which tools a chat shows the model, and which may be called: `tools` and its older spelling.

The deprecated `functions` are tools whose calls are told as `function_call`. What definitions and
choices may hold is asyncllm.formats' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.formats.tools import ToolChoice, parse_tool_choice, parse_tools
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest


@dataclass(slots=True, frozen=True)
class ToolUse:
    """`shown` stand in the prompt, as they were sent; those of `choice` may be called.

    `parallel`: one answer may make several calls. `param`: the request's field that brought them.
    """

    shown: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    param: str = "tools"


def tool_use(request: ChatRequest, hide_unused: bool = False) -> ToolUse:
    """`hide_unused`: no tools in the prompt of a chat that may call none.

    Raises `InvalidRequestError`, `ApiError` 400.
    """
    if request.functions or request.function_call not in (None, "none"):
        return _of_functions(request)
    raw = tuple(request.tools or ())
    choice = parse_tool_choice(request.tool_choice, parse_tools(list(raw)))
    if not choice.tools and hide_unused:
        return ToolUse()
    if isinstance(request.tool_choice, dict) and not is_named(request):
        # Of allowed tools the others are not in the prompt either: the model would try them.
        names = {tool.name for tool in choice.tools}
        raw = tuple(tool for tool in raw if tool["function"]["name"] in names)
    parallel = request.parallel_tool_calls is not False and not is_named(request)
    return ToolUse(raw, choice, parallel)


def is_named(request: ChatRequest) -> bool:
    """Whether one tool must be called, which the request names."""
    choice = request.function_call if request.functions else request.tool_choice
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def _of_functions(request: ChatRequest) -> ToolUse:
    if request.tools or request.tool_choice is not None:
        raise bad_request("functions and tools exclude each other", "functions")
    if not request.functions:
        raise bad_request("function_call needs functions", "function_call")
    raw = tuple({"type": "function", "function": f} for f in request.functions)
    choice = request.function_call
    try:
        tools = parse_tools(list(raw))
        named = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        return ToolUse(raw, parse_tool_choice(named, tools), parallel=False, param="functions")
    except InvalidRequestError as error:
        is_choice = str(error.param).startswith("tool_choice")
        error.param = "function_call" if is_choice else "functions"
        raise

"""Which tools a chat may call, and how freely: `tools`, `tool_choice` and their older spellings.

A named tool is the choice among one, a list of allowed tools the choice among those, the deprecated
`functions` are tools whose calls are told as `function_call`. What a definition may hold is
asyncllm.formats' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest, ToolChoice

Tool = dict[str, Any]


@dataclass(slots=True, frozen=True)
class ToolUse:
    """`shown` stand in the prompt, `callable` may be called; `choice` is "none" if there are none.

    named      one tool was asked for by name; OpenAI then reports its call as "stop"
    parallel   one answer may make several calls
    legacy     asked for as `functions`
    """

    shown: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    named: bool = False
    parallel: bool = True
    legacy: bool = False


def tool_use(request: ChatRequest, hide_unused: bool = False) -> ToolUse:
    """`hide_unused`: no tools in the prompt of a chat that may call none. Raises `ApiError` 400."""
    if request.functions or request.function_call not in (None, "none"):
        return _of_functions(request)
    tools, choice = tuple(request.tools or ()), request.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolUse(() if hide_unused else tools)
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, str):
        return ToolUse(tools, tools, choice, parallel=parallel)
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice, parallel)
    name = _named(choice)
    return ToolUse(tools, (_find(tools, name),), "required", named=True, parallel=False)


def _allowed(tools: tuple[Tool, ...], choice: dict[str, Any], parallel: bool) -> ToolUse:
    """{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}."""
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    names = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(names, list) or not names:
        raise bad_request(
            "allowed_tools needs a mode, 'auto' or 'required', and a list of tools", "tool_choice"
        )
    wanted = {_named(item) for item in names}
    for name in wanted:
        _find(tools, name)
    # Those that may not be called are not in the prompt either: the model would try.
    kept = tuple(tool for tool in tools if _name_of(tool) in wanted)
    return ToolUse(kept, kept, mode, parallel=parallel)


def _of_functions(request: ChatRequest) -> ToolUse:
    if request.tools or request.tool_choice is not None:
        raise bad_request("functions and tools exclude each other", "functions")
    tools = tuple({"type": "function", "function": f} for f in request.functions or ())
    choice = request.function_call
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolUse(tools)
    if not tools:
        raise bad_request("function_call needs functions", "function_call")
    if choice == "auto":
        return ToolUse(tools, tools, "auto", parallel=False, legacy=True)
    name = choice.get("name") if isinstance(choice, dict) else None
    tool = _find(tools, name, "function_call")
    return ToolUse(tools, (tool,), "required", named=True, parallel=False, legacy=True)


def _named(choice: Any) -> str:
    """{"type": "function", "function": {"name": ...}}."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise bad_request(
            'a tool is named as {"type": "function", "function": {"name": ...}}', "tool_choice"
        )
    return name


def _find(tools: tuple[Tool, ...], name: str | None, param: str = "tool_choice") -> Tool:
    for tool in tools:
        if name is not None and _name_of(tool) == name:
            return tool
    raise bad_request(f"{param} names {name!r:.100}, which is none of the tools", param)


def _name_of(tool: Tool) -> str | None:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None

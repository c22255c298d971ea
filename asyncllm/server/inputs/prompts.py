"""From a request's `prompt`, or its `messages` and `tools`, to the engine's prompt.

The tokenizer checks what a message may hold, the input processor what a prompt may hold,
asyncllm.formats what tool definitions and choices may hold. The deprecated `functions` are tools
whose calls are reported as `function_call`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, cast

from asyncllm.engine.text.prompt import PromptInput, TextPrompt
from asyncllm.errors import InvalidRequestError
from asyncllm.formats.tools import ToolChoice, parse_tool_choice, parse_tools
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import bad_request
from asyncllm.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from asyncllm.server.service import Service

ZERO_WIDTH_SPACE = "\u200b"
MAX_PROMPTS = 1024  # in one completions call


def chat_prompt(request: ChatRequest, tools: ToolUse, service: Service) -> TextPrompt:
    """A template writes its own special tokens: none are added by default."""
    return {
        "prompt": render_chat(request, service, list(tools.shown)),
        "add_special_tokens": bool(request.add_special_tokens),
    }


def may_reason(request: ChatRequest, service: Service) -> bool:
    """Whether the output may begin with reasoning that the prompt has not opened."""
    requested = bool(_template_kwargs(request, service.args).get("enable_thinking"))
    return requested or service.reasons_by_default


def render_chat(
    request: ChatRequest | TokenizeRequest, service: Service, tools: list[dict[str, Any]]
) -> str:
    """The chat template's text. Raises `InvalidRequestError`."""
    continue_final = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    messages: Any = request.messages or []
    if service.args.escape_special_tokens and (texts := service.special_texts) is not None:
        messages, tools = escaped(messages, texts), escaped(tools, texts)
    return service.engine.tokenizer.render_chat(
        messages,
        tools=tools or None,
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        template_kwargs=_template_kwargs(request, service.args),
        chat_template=request.chat_template or None,
    )


def escaped(value: Any, special: re.Pattern[str]) -> Any:
    """A copy of a JSON value whose texts spell no special token: a zero-width space parts it."""
    if isinstance(value, str):
        return special.sub(lambda found: f"{found[0][0]}{ZERO_WIDTH_SPACE}{found[0][1:]}", value)
    if isinstance(value, list):
        return [escaped(item, special) for item in value]
    if isinstance(value, dict):
        return {key: escaped(item, special) for key, item in value.items()}
    return value


def completion_prompts(request: CompletionRequest) -> list[PromptInput]:
    """One engine prompt for each prompt of the call. Raises `ApiError`."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [_text_prompt(request, prompt)]
    if not prompt:
        raise bad_request("prompt must not be empty", "prompt")
    kinds = set(map(type, prompt))  # msgspec made them: each is exactly one of three
    if len(kinds) > 1:
        raise bad_request("prompt must not mix strings, token ids and lists", "prompt")
    if kinds == {int}:
        ids: Any = prompt
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{len(prompt)} prompts, at most {MAX_PROMPTS} in one call", "prompt")
    if kinds == {str}:
        return [_text_prompt(request, text) for text in cast(list[str], prompt)]
    return list(cast(list[list[int]], prompt))


def _text_prompt(request: CompletionRequest, text: str) -> PromptInput:
    return {"prompt": text, "add_special_tokens": request.add_special_tokens is not False}


def _template_kwargs(request: ChatRequest | TokenizeRequest, args: ServerArgs) -> dict[str, Any]:
    """The server's defaults, under the request's fields, under its chat_template_kwargs."""
    kwargs = dict(args.default_chat_template_kwargs or {})
    if request.documents:
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        # What templates without efforts have instead.
        kwargs["enable_thinking"] = request.reasoning_effort != "none"
    return kwargs | (request.chat_template_kwargs or {})


@dataclass(slots=True, frozen=True)
class ToolUse:
    """`shown` are in the prompt, as the client sent them; those of `choice` may be called.

    `parallel`: one message may make several calls. `param`: the request's field that holds them.
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
    """Return whether the request names the one tool that must be called."""
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

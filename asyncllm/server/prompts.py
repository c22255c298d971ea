"""From a request's `prompt` or `messages` to what the engine takes.

What a message may hold is the tokenizer's business, what a prompt may hold the input processor's.
"""

from __future__ import annotations

from typing import Any, cast

from asyncllm.engine.text.prompt import PromptInput, TextPrompt
from asyncllm.server.args import ServerArgs
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from asyncllm.server.service import Service
from asyncllm.server.tool_use import ToolUse

MAX_PROMPTS = 1024  # in one completions call


def chat_prompt(request: ChatRequest, tools: ToolUse, service: Service) -> TextPrompt:
    """A template writes its own special tokens: none are added unless asked for."""
    return {
        "prompt": render_chat(request, service, list(tools.shown)),
        "add_special_tokens": bool(request.add_special_tokens),
    }


def may_reason(request: ChatRequest, service: Service) -> bool:
    """Whether the answer may begin with reasoning that the prompt has not opened."""
    asked = bool(_template_kwargs(request, service.args).get("enable_thinking"))
    return asked or service.reasons_unasked


def render_chat(
    request: ChatRequest | TokenizeRequest, service: Service, tools: list[dict[str, Any]]
) -> str:
    """The chat template's text. Raises `InvalidRequestError`."""
    continue_final = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    return service.engine.tokenizer.render_chat(
        request.messages or [],
        tools=tools or None,
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        template_kwargs=_template_kwargs(request, service.args),
        chat_template=request.chat_template or None,
    )


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
    """The server's, under what the request's own fields say, under its chat_template_kwargs."""
    kwargs = dict(args.default_chat_template_kwargs or {})
    if request.documents:
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        # What templates without efforts have instead.
        kwargs["enable_thinking"] = request.reasoning_effort != "none"
    return kwargs | (request.chat_template_kwargs or {})

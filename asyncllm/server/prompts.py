"""From a request's `prompt` or `messages` to what the engine takes.

What a message may hold is the tokenizer's business, what a prompt may hold the input processor's.
"""

from __future__ import annotations

from typing import Any

from asyncllm.engine.prompt import PromptInput
from asyncllm.engine.tokenizer import Tokenizer
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest

MAX_PROMPTS = 1024  # in one completions call


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer) -> PromptInput:
    """A template writes its own special tokens: none are added unless asked for."""
    return {
        "prompt": render_chat(request, tokenizer),
        "add_special_tokens": bool(request.add_special_tokens),
    }


def render_chat(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer) -> str:
    """The chat template's text. Raises `InvalidRequestError`."""
    continue_final = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    return tokenizer.render_chat(
        request.messages or [],
        tools=request.tools or None,
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        template_kwargs=_template_kwargs(request),
    )


def completion_prompts(request: CompletionRequest) -> list[PromptInput]:
    """One engine prompt for each prompt of the call. Raises `ApiError`."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [_text_prompt(request, prompt)]
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [_text_prompt(request, item) for item in prompt if isinstance(item, str)]
    lists = [_ids_prompt(item) for item in prompt if isinstance(item, list)]
    if not prompt:
        raise bad_request("prompt must not be empty", "prompt")
    if len(prompt) not in (len(ids), len(texts), len(lists)):
        raise bad_request("prompt must not mix strings, token ids and lists", "prompt")
    if ids:
        return [_ids_prompt(ids)]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{len(prompt)} prompts, at most {MAX_PROMPTS} in one call", "prompt")
    return texts or lists


def _ids_prompt(token_ids: list[int]) -> PromptInput:
    return {"prompt_token_ids": token_ids}


def _text_prompt(request: CompletionRequest, text: str) -> PromptInput:
    return {"prompt": text, "add_special_tokens": request.add_special_tokens is not False}


def _template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.documents:
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    return kwargs

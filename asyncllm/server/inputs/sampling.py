"""From a request's fields to `SamplingParams`: names, defaults that the route sets, logprobs.

The ranges are `SamplingParams`'s business; an error it raises comes back under the name that the
client used (`max_completion_tokens`, `top_logprobs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from asyncllm.engine.input_processor import InputProcessor
from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import RequestOutputKind, SamplingParams
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.output_format import NO_FORM, ChatOutput, content_structure
from asyncllm.server.inputs.refusals import renamed
from asyncllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TextFormat,
)
from asyncllm.structured_outputs import PARAM as STRUCTURE_PARAM

COMPLETION_MAX_TOKENS = 16  # OpenAI's default

# Fields of requests that are `SamplingParams`'s under the same name, and mean the same.
_SAME_NAME = (
    frozenset(GenerationRequest.__struct_fields__)
    & {field.name for field in dataclasses.fields(SamplingParams)}
) - {"max_tokens", "structured_outputs", "logits_processors"}


def chat_params(
    request: ChatRequest,
    given: Mapping[str, Any],
    processor: InputProcessor,
    output: ChatOutput,
) -> SamplingParams:
    """given: the request's `sent_fields`. Raises `InvalidRequestError`, `ApiError`."""
    _check_streaming(request)
    overrides = _overrides(given)
    overrides["structured_outputs"] = output.structured_outputs
    if output.keeps_special_tokens:
        overrides["skip_special_tokens"] = False
    # None: as many tokens as the context has room for.
    overrides["max_tokens"] = (
        request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens
    )
    if request.logprobs:
        overrides["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    elif request.logprob_token_ids is not None:
        raise bad_request("logprob_token_ids needs logprobs=true", "logprob_token_ids")
    if request.echo and request.logprobs and request.prompt_logprobs is None:
        overrides["prompt_logprobs"] = request.top_logprobs or 0
    return processor.default_params(overrides)


def completion_params(
    request: CompletionRequest,
    given: Mapping[str, Any],
    processor: InputProcessor,
    json_form: Mapping[str, bool] = NO_FORM,
) -> SamplingParams:
    """given: the request's `sent_fields`. Raises `InvalidRequestError`, `ApiError`."""
    _check_streaming(request)
    overrides = _overrides(given)
    overrides["max_tokens"] = _completion_max_tokens(request)
    overrides["structured_outputs"] = content_structure(request, json_form)
    if request.logprobs is not None:
        overrides["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            overrides["prompt_logprobs"] = request.logprobs
    elif request.logprob_token_ids is not None:
        raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
    if request.logprob_token_ids is not None and prompt_only(request):
        raise bad_request(
            "logprob_token_ids is about output tokens, and max_tokens=0 asks for none",
            "logprob_token_ids",
        )
    return processor.default_params(overrides)


def wants_outputs(request: GenerationRequest) -> bool:
    """Whether every delta needs its token ids: to return them, or to report running usage."""
    options = request.stream_options
    runs = options and options.include_usage and options.continuous_usage_stats
    return bool(request.return_token_ids or runs)


def prompt_only(request: CompletionRequest) -> bool:
    """`echo` with `max_tokens=0` scores the prompt; the engine's one token is dropped."""
    return bool(request.echo) and request.max_tokens == 0


def with_client_name(error: InvalidRequestError, request: GenerationRequest) -> InvalidRequestError:
    """An error of the engine's validators, with the client's name of the field."""
    return renamed(error, client_name(request, error.param))


def client_name(request: GenerationRequest, param: str | None) -> str | None:
    """The request's own field for the engine's `param`."""
    if param is not None and param.startswith(STRUCTURE_PARAM):
        if request.structured_outputs is not None:
            return param
        if request.response_format not in (None, TextFormat()):
            return "response_format"
        return "functions" if isinstance(request, ChatRequest) and request.functions else "tools"
    if isinstance(request, ChatRequest):
        if param == "max_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(param or "", param)
    return "prompt" if param == "prompt_token_ids" else param


def _completion_max_tokens(request: CompletionRequest) -> int:
    if prompt_only(request):
        return 1
    return COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    overrides = {name: value for name, value in given.items() if name in _SAME_NAME}
    overrides["output_kind"] = RequestOutputKind.DELTA
    return overrides


def _check_streaming(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not available with stream=true", "prompt_logprobs")
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise bad_request("best_of above n is not available with stream=true", "best_of")

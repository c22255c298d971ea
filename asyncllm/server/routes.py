"""Every route of the server, in the order in which its documentation lists them.

One list: app.py serves it, openapi.json describes it, and it marks the routes that need no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CONTENT_TYPE_LATEST

from asyncllm.server.args import ServerArgs
from asyncllm.server.chat.batch import BatchChatRequest, chat_completions_batch
from asyncllm.server.chat.serving import chat_completions
from asyncllm.server.completions import completions
from asyncllm.server.inference import GenerateRequest, generate
from asyncllm.server.info import (
    health,
    list_models,
    metrics,
    show_load,
    show_model,
    show_version,
)
from asyncllm.server.invocations import invocations
from asyncllm.server.lora import (
    LoadLoRARequest,
    UnloadLoRARequest,
    load_lora_adapter,
    unload_lora_adapter,
)
from asyncllm.server.messages import openapi as anthropic
from asyncllm.server.messages.protocol import CountTokensRequest, MessagesRequest
from asyncllm.server.messages.serving import count_tokens, messages
from asyncllm.server.openapi import response_types as answers
from asyncllm.server.openapi.document import GENERATES, READS, TAKES_A_BODY, Route, show_document
from asyncllm.server.page import dashboard_events, docs_page, page_file
from asyncllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from asyncllm.server.responses import openapi as responses
from asyncllm.server.responses.protocol import ResponsesRequest
from asyncllm.server.responses.serving import (
    DEFAULT_LISTED,
    MAX_LISTED,
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    show_response,
)
from asyncllm.server.tokenize import detokenize, tokenize, tokenizer_info

_HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def _has_page(args: ServerArgs) -> bool:
    return not args.disable_page


def _updates_loras(args: ServerArgs) -> bool:
    return args.allow_runtime_lora_updating


ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/v1/chat/completions", chat_completions, "Chat", "Answer a conversation",
        request=ChatRequest, example={"messages": _HELLO, "max_tokens": 32},
        answer=answers.ChatCompletion, event=answers.ChatCompletionChunk, errors=GENERATES,
    ),
    Route(
        "POST", "/v1/chat/completions/batch", chat_completions_batch, "Chat",
        "Answer many conversations at once", request=BatchChatRequest,
        example={"messages": [_HELLO, _HELLO], "max_tokens": 32},
        answer=answers.ChatCompletion, errors=GENERATES,
    ),
    Route(
        "POST", "/v1/completions", completions, "Completions", "Continue a text",
        request=CompletionRequest, example={"prompt": "Once upon a time", "max_tokens": 16},
        answer=answers.Completion, event=answers.CompletionChunk, errors=GENERATES,
    ),
    Route(
        "POST", "/invocations", invocations, "Completions",
        "A chat or a completion, by its fields: SageMaker's name", answer=dict, errors=GENERATES,
    ),
    Route(
        "POST", "/v1/responses", create_response, "Responses", "Answer text or a conversation",
        request=ResponsesRequest, example={"input": "What is the capital of France?"},
        answer=responses.ResponseBody, event=responses.ResponseEvent, errors=GENERATES,
    ),
    Route(
        "POST", "/v1/responses/input_tokens", count_input_tokens, "Responses",
        "How long its prompt is", request=ResponsesRequest, example={"input": "Hello"},
        answer=responses.InputTokenCount, errors=(404, *TAKES_A_BODY, *READS),
    ),
    Route(
        "GET", "/v1/responses/{response_id}", show_response, "Responses", "One that is kept",
        query={
            "stream": {"type": "boolean", "description": "the events of one in the background"},
            "starting_after": {"type": "integer", "description": "only events of higher numbers"},
        },
        answer=responses.ResponseBody, errors=(400, 404, *READS),
    ),
    Route(
        "DELETE", "/v1/responses/{response_id}", delete_response, "Responses", "Forget it",
        answer=responses.ResponseDeleted, errors=(404, *READS),
    ),
    Route(
        "GET", "/v1/responses/{response_id}/input_items", list_input_items, "Responses",
        "What went into it",
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "the id of an item"},
            "limit": {
                "type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED,
            },
        },
        answer=responses.InputItemList, errors=(400, 404, *READS),
    ),
    Route(
        "POST", "/v1/responses/{response_id}/cancel", cancel_response, "Responses",
        "End one that runs in the background",
        answer=responses.ResponseBody, errors=(400, 404, *READS),
    ),
    Route(
        "POST", "/v1/messages", messages, "Messages", "Answer a conversation, by Anthropic's API",
        request=MessagesRequest, example={"messages": _HELLO, "max_tokens": 32},
        answer=anthropic.MessageBody, event=anthropic.MessageEvent, errors=GENERATES,
        error=anthropic.AnthropicError,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", count_tokens, "Messages", "How long its prompt is",
        request=CountTokensRequest, example={"messages": _HELLO},
        answer=anthropic.InputTokens, errors=(404, *TAKES_A_BODY, *READS),
        error=anthropic.AnthropicError,
    ),
    Route(
        "POST", "/inference/v1/generate", generate, "Tokens", "Token ids in, token ids out",
        request=GenerateRequest,
        example={"token_ids": [72, 101], "sampling_params": {"max_tokens": 8, "temperature": 0}},
        answer=answers.GenerateAnswer, event=answers.GenerateChunk, errors=GENERATES,
    ),
    Route(
        "POST", "/tokenize", tokenize, "Tokens", "Text or messages to token ids",
        request=TokenizeRequest, example={"prompt": "Hello, world"},
        answer=answers.Tokens, errors=(404, *TAKES_A_BODY, *READS),
    ),
    Route(
        "POST", "/detokenize", detokenize, "Tokens", "Token ids to text",
        request=DetokenizeRequest, example={"tokens": [72, 101]},
        answer=answers.Text, errors=(404, *TAKES_A_BODY, *READS),
    ),
    Route(
        "GET", "/tokenizer_info", tokenizer_info, "Tokens", "tokenizer_config.json, as it is used",
        answer=answers.TokenizerInfo,
        is_served=lambda args: args.enable_tokenizer_info_endpoint,
    ),
    Route(
        "GET", "/v1/models", list_models, "Models", "The names that this server answers to",
        answer=answers.ModelList,
    ),
    Route(
        "GET", "/v1/models/{model:.+}", show_model, "Models",  # a name may hold slashes
        "One of them", answer=answers.ModelCard, errors=(404, *READS),
    ),
    Route(
        "POST", "/v1/load_lora_adapter", load_lora_adapter, "Models", "Load an adapter",
        request=LoadLoRARequest, example={"lora_name": "sql", "lora_path": "/adapters/sql"},
        media_type="text/plain", errors=(403, 404, *TAKES_A_BODY, *READS), is_served=_updates_loras,
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", unload_lora_adapter, "Models", "Forget an adapter",
        request=UnloadLoRARequest, example={"lora_name": "sql"},
        media_type="text/plain", errors=(404, *TAKES_A_BODY, *READS), is_served=_updates_loras,
    ),
    Route(
        "GET", "/health", health, "Server", "200 while requests are served, else 503 and why",
        media_type=None, is_public=True,
    ),
    Route(
        "GET", "/ping", health, "Server", "The same, under SageMaker's name",
        media_type=None, is_public=True,
    ),
    Route(
        "POST", "/ping", health, "Server", "The same again",
        media_type=None, is_public=True,
    ),
    Route("GET", "/load", show_load, "Server", "Calls in progress", answer=answers.Load),
    Route("GET", "/version", show_version, "Server", "Of asyncllm", answer=answers.Version),
    Route(
        "GET", "/metrics", metrics, "Server", "Prometheus series: docs/metrics.md",
        media_type=CONTENT_TYPE_LATEST,
    ),
    Route(
        "GET", "/openapi.json", show_document, "Server", "This description, as OpenAPI 3.1",
        answer=dict, is_public=True,
    ),
    Route(
        "GET", "/docs", docs_page, "Pages", "This description, to read and to try",
        media_type="text/html", is_public=True, is_served=_has_page,
    ),
    Route(
        "GET", "/", page_file, "Pages", "A chat and a dashboard",
        media_type="text/html", is_public=True, is_served=_has_page,
    ),
    Route(
        "GET", "/web/{name}", page_file, "Pages", "A file of a page",
        media_type="*/*", errors=(404, *READS), is_public=True, is_served=_has_page,
    ),
    Route(
        "GET", "/dashboard/events", dashboard_events, "Pages", "What the dashboard shows",
        media_type="text/event-stream", errors=(429, *READS), is_served=_has_page,
    ),
)  # fmt: skip


def served_routes(args: ServerArgs) -> Iterator[Route]:
    for route in ROUTES:
        if route.is_served(args):
            is_open = route.path == "/metrics" and args.public_metrics
            yield replace(route, is_public=True) if is_open else route

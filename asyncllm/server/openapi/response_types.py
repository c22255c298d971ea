"""The bodies that the routes answer with, as types: what openapi.json says of them.

Answers are rendered by hand, for speed; tests hold what is sent to these types, nothing more and
nothing missing. A field that may be left out has UNSET for a default.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]


class ErrorDetail(Struct):
    """The error; `param` names the request's field that is to blame, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """Tokens of the whole call: each prompt is counted once, every choice's answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """`logprob` is natural and of the raw distribution, before temperature and filters."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob] | None
    refusal: None


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# For each prompt token its candidates by id, its own first; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CalledFunction(Struct):
    """`arguments` is meant to be the text of a JSON object: the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct):
    """`content` is null where the model only called tools. `function_call`: asked as functions."""

    role: str
    content: str | None
    refusal: None
    annotations: list[dict[str, Any]]
    reasoning: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET  # in a batch


class Answer(Struct):
    """The fields that answers and their chunks share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"]
    prompt_text: str | None
    prompt_logprobs: PromptLogprobs
    kv_transfer_params: None
    prompt_token_ids: list[int] | UnsetType | None = UNSET  # in a batch each choice has its own


class FunctionDelta(Struct):
    """The name comes first; the arguments are pieces of one text."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """`index` counts the answer's calls; id, type and name come with a call's first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer):
    """One event. The last of a choice has its finish_reason; the one with usage has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    """Parallel lists; `text_offset` counts characters of the returned text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class Completion(Answer):
    """Choice i of prompt p has the index p * n + i."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None
    kv_transfer_params: None


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET


class Generated(Struct):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int]


class GenerateAnswer(Struct):
    request_id: str
    model: str
    created: int
    choices: list[Generated]
    usage: Usage
    prompt_logprobs: PromptLogprobs
    kv_transfer_params: None


class GeneratedChunk(Struct):
    """The tokens of one step."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int]


class GenerateChunk(Struct):
    request_id: str
    choices: list[GeneratedChunk]
    usage: Usage | UnsetType = UNSET


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct):
    prompt: str


class TokenizerInfo(Struct):
    """tokenizer_config.json as it was loaded; the other keys are the tokenizer's own."""

    tokenizer_class: str
    chat_template: Any | UnsetType = UNSET


class ModelCard(Struct):
    """OpenAI's fields and vLLM's, and Anthropic's from `type` on."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class Load(Struct):
    server_load: int


class Version(Struct):
    version: str

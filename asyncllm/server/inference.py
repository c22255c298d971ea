"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's protocol.

For clients that tokenise themselves (training loops, routers). `sampling_params` are those of the
Python API under the same names and with the same defaults; `generation_config.json` does not change
them. Nothing is detokenised unless stop strings need it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import orjson
from aiohttp import web

from asyncllm.errors import InvalidRequestError
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.sampling_params import RequestOutputKind, SamplingParams
from asyncllm.server.http.bodies import prepare, read_body, render_response
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import Call, Usage, new_id
from asyncllm.server.inputs.refusals import rename_params
from asyncllm.server.outputs.chunks import ChunkOptions
from asyncllm.server.outputs.consumers import CollectedOutput
from asyncllm.server.outputs.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from asyncllm.server.protocol import StreamOptions, StructuredOutputs, TokenId
from asyncllm.server.service import (
    SERVICE,
    Service,
)
from asyncllm.structured_outputs import StructuredOutputsParams

# Fields that this route sets itself, or of the Python API alone.
NOT_OVER_HTTP = frozenset({"output_kind", "extra_args"})
# Fields that have another type in JSON, or, as a Python callable, none.
_JSON_TYPES: dict[str, Any] = {
    "structured_outputs": StructuredOutputs,
    "logits_processors": Any,
    "logit_bias": dict[str, Any],  # as a chat's
}

if TYPE_CHECKING:
    SamplingFields = msgspec.Struct
else:  # one list of fields, that of SamplingParams: each as it is there, or null
    SamplingFields = msgspec.defstruct(
        "SamplingParams",
        [
            (name, _JSON_TYPES.get(name, hint) | None, None)
            for name, hint in get_type_hints(SamplingParams).items()
            if name not in NOT_OVER_HTTP
        ],
    )


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[TokenId]
    sampling_params: SamplingFields
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Accepted and ignored: what a renderer knew of the prompt.
    assistant_tokens_mask: Any = None
    token_offsets: Any = None

    # Refused where they would change the output.
    features: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


NAMES = TokenNames(None)  # tokens in logprobs are ids too
LEAST_TOP = 1  # entries of top_logprobs, with logprobs=0 too, as in vLLM
_REFUSED = ("features", "kv_transfer_params", "ec_transfer_params")


async def generate(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, GenerateRequest)
    if service.args.enable_force_include_usage:
        service.force_usage(request)
    try:
        with rename_params({"prompt": "token_ids"}):
            call = await prepare(http, partial(_call, request, service))
            if request.stream:
                sse = SSEStream(http, service.frames)
                make_consumer = partial(TokenStream, sse, call, request)
                return await service.stream(sse, call, make_consumer)
            answer = CollectedOutput(call)
            await service.collect(call, lambda: answer)
    except InvalidRequestError as error:
        error.param = _client_name(error.param)
        raise
    body = partial(_body, call, request, answer)
    return await render_response(http, body, call.has_logprobs)


def _call(request: GenerateRequest, service: Service) -> Call:
    adapter = service.check_model(request.model)
    for name in _REFUSED:
        if getattr(request, name):
            raise bad_request(f"{name} is not supported", name)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    params = service.engine.input_processor.with_counts(_params(request.sampling_params))
    if request.stream and params.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs: not with stream=true", "prompt_logprobs")
    return Call(
        id=new_id("generate"),
        model=adapter.lora_name if adapter else service.model_names[0],
        adapter=adapter,
        prompts=[request.token_ids],
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        wants_outputs=True,
        shows_cached=service.args.enable_prompt_tokens_details,
        client_name=_client_name,
    )


def _params(fields: SamplingFields) -> SamplingParams:
    """Raises `InvalidRequestError`. Without max_tokens: what the context has room for."""
    given = {k: v for k, v in msgspec.structs.asdict(fields).items() if v is not None}
    if given.pop("logits_processors", None):
        raise InvalidRequestError("logits_processors: of the Python API only", "logits_processors")
    if (structured := given.pop("structured_outputs", None)) is not None:
        kept = {k: v for k, v in msgspec.structs.asdict(structured).items() if v is not None}
        given["structured_outputs"] = StructuredOutputsParams(**kept)
    given.setdefault("max_tokens", None)
    given.setdefault("detokenize", bool(given.get("stop")))
    return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)


_PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}


def _client_name(param: str | None) -> str | None:
    if param is not None and param.partition(".")[0] in _PARAM_NAMES:
        return f"sampling_params.{param}"
    return "token_ids" if param in ("prompt", "prompt_token_ids") else param


def _body(call: Call, request: GenerateRequest, answer: CollectedOutput) -> dict[str, Any]:
    wants_logprobs = call.params.num_logprobs is not None
    return {
        "request_id": request.request_id or call.id,
        "model": call.model,
        "created": call.created,
        "choices": [
            {
                "index": choice.index,
                "logprobs": (
                    chat_logprobs(choice.logprobs, call.params, NAMES, LEAST_TOP)
                    if wants_logprobs
                    else None
                ),
                "finish_reason": choice.finish_reason,
                "token_ids": choice.token_ids,
            }
            for choice in answer.choices
        ],
        "usage": answer.usage.as_dict(),
        "prompt_logprobs": prompt_logprobs(answer.prompts[0].logprobs, NAMES),
        "kv_transfer_params": None,
    }


class TokenStream:
    """A `Consumer`: an event for each step of each choice that brought tokens or the end."""

    def __init__(self, sse: SSEStream, call: Call, request: GenerateRequest) -> None:
        self._sse = sse
        self._request_id = request.request_id or call.id
        self._params = call.params
        self._usage = Usage(call.shows_cached)
        self._num_tokens = [0] * call.params.n
        self._options = ChunkOptions(sse, request.stream_options)

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self._usage.count(prompt_index, output)
        frames = [
            self._frame(completion)
            for completion in output.outputs
            if completion.token_ids or completion.finish_reason is not None
        ]
        self._sse.push(b"".join(frames))

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        raise AssertionError("this call wants outputs")

    def finish(self) -> None:
        self._options.finish(partial(self._event, []), self._usage)

    def fail(self, error: ApiError) -> None:
        self._options.fail(error)

    def _frame(self, completion: CompletionOutput) -> bytes:
        self._num_tokens[completion.index] += len(completion.token_ids)
        logprobs = None
        if self._params.num_logprobs is not None and completion.logprobs:
            logprobs = chat_logprobs(completion.logprobs, self._params, NAMES, LEAST_TOP)
        choice = {
            "index": completion.index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }
        usage = None
        if self._options.running_usage:
            usage = self._usage.of_choice(0, self._num_tokens[completion.index])
        return self._event([choice], usage)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        event: dict[str, Any] = {"request_id": self._request_id, "choices": choices}
        if usage is not None:
            event["usage"] = usage
        return b"data: " + orjson.dumps(event) + b"\n\n"

"""POST /v1/completions: prompts and sampling parameters, the body, the stream's chunks.

Most clients send the same parameters again. To check a request's fields and to make parameters of
them takes a few dozen functions, each of them cold for a lone request; `ParamsCache` finds what
they gave before in one look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from aiohttp import web

from asyncllm.engine.logprobs import check_output_logprobs
from asyncllm.errors import InvalidRequestError
from asyncllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.server.http.bodies import prepare, read_body, render_response, sliced_json
from asyncllm.server.http.errors import bad_request
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import SYSTEM_FINGERPRINT, Call, new_id
from asyncllm.server.inputs.prompts import completion_prompts
from asyncllm.server.inputs.refusals import refuse_unsupported, sent_fields
from asyncllm.server.inputs.sampling import (
    client_name,
    completion_params,
    wants_outputs,
    with_client_name,
)
from asyncllm.server.outputs.chunks import ChoiceFrames, ChunkStream, TextPlace
from asyncllm.server.outputs.consumers import CollectedChoice, CollectedOutput
from asyncllm.server.outputs.logprobs import LegacyLogprobs, prompt_logprobs
from asyncllm.server.protocol import CompletionRequest
from asyncllm.server.service import (
    SERVICE,
    Service,
)

# Fields that are no sampling parameters, and may be long or differ in each request.
_NOT_PARAMS = frozenset((
    "prompt", "model", "cache_salt", "priority",
    "user", "metadata", "request_id", "session_id", "service_tier", "stream_interval",
    "return_token_offsets", "media_io_kwargs", "return_mm_kwargs", "routed_experts_prompt_start",
))  # fmt: skip
_params_key = attrgetter(
    *(name for name in CompletionRequest.__struct_fields__ if name not in _NOT_PARAMS)
)
MAX_CHOICES = 1024  # of one call: prompts times n, or best_of; of one prompt MAX_N are fewer
MAX_STREAMED_ECHO_ENTRIES = 2**14  # log-probabilities of a prompt, in the first events of a stream


async def completions(
    http: web.Request, request: CompletionRequest | None = None
) -> web.StreamResponse:
    """`request`: the body, where it has been read."""
    service = http.app[SERVICE]
    service.check_open()
    if request is None:
        request = await read_body(http, CompletionRequest)
    if service.args.enable_force_include_usage:
        service.force_usage(request)
    try:
        call = await prepare(http, partial(_call, request, service, http.app[PARAMS_CACHE]))
        if request.stream:
            sse = SSEStream(http, service.frames)
            make_consumer = partial(_stream_consumer, sse, call, request, service)
            return await service.stream(sse, call, make_consumer)
        answer = CollectedOutput(call)
        await service.collect(call, lambda: answer)
        view = CompletionView(request, call, service)
        return await render_response(http, partial(view.body, answer), call.has_logprobs)
    except InvalidRequestError as error:
        raise with_client_name(error, request) from error


def _stream_consumer(
    sse: SSEStream, call: Call, request: CompletionRequest, service: Service
) -> ChunkStream:
    view = CompletionView(request, call, service)
    return ChunkStream(sse, call, view, request.stream_options)


def _call(request: CompletionRequest, service: Service, cache: ParamsCache) -> Call:
    adapter = service.check_model(request.model)
    params = cache.get(_params_key(request), partial(_params, request, service))
    call = Call(
        id=new_id("cmpl"),
        model=adapter.lora_name if adapter else service.model_names[0],
        adapter=adapter,
        prompts=completion_prompts(request),
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        return_token_ids=bool(request.return_token_ids),
        wants_outputs=wants_outputs(request),
        prompt_only=request.max_tokens == 0,  # which only echo may ask for
        shows_cached=service.args.enable_prompt_tokens_details,
        client_name=partial(client_name, request),
    )
    if len(call.prompts) > 1:  # one alone is held to MAX_N, and by the engine
        _check_together(call)
    return call


def _check_together(call: Call) -> None:
    """Limit all prompts of a call together."""
    prompts, params = len(call.prompts), call.params
    if call.num_sequences > MAX_CHOICES:
        name = "n" if params.best_of is None else "best_of"
        what = f"{prompts} prompts with {name}={params.num_sequences}"
        raise bad_request(f"{what}, at most {MAX_CHOICES} choices", name)
    assert params.max_tokens is not None, "completions have a default"
    check_output_logprobs(params, params.max_tokens, prompts)


def _params(request: CompletionRequest, service: Service) -> SamplingParams:
    _ = service.engine.tokenizer  # raises where there is none: an answer is text
    given = sent_fields(request)
    refuse_unsupported(request, given, service.args)
    form = service.args.json_form()
    return completion_params(request, given, service.engine.input_processor, form)


class CompletionView:
    """text_completion as one body, and as a `ChunkShape`."""

    place = TextPlace("text_completion", b'"text":', b"")

    def __init__(self, request: CompletionRequest, call: Call, service: Service) -> None:
        self._call = call
        self._tokenizer = service.engine.tokenizer
        self._echo = bool(request.echo)
        self._cuts_prompt = request.truncate_prompt_tokens is not None
        self._prompt_only = call.prompt_only
        self._names = service.token_names(request)
        self._wants_logprobs = call.params.logprobs is not None
        self._reports_prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs = [LegacyLogprobs(self._names) for _ in range(call.num_choices)]

    # The stream

    def opening(
        self, frames: ChoiceFrames, output: RequestOutput, usage: dict[str, Any] | None
    ) -> bytes:
        if not self._echo:
            return b""
        ids = output.prompt_token_ids
        more: dict[str, Any] = {}
        if self._call.return_token_ids:
            more = {"prompt_token_ids": ids, "token_ids": []}
        self._check_num_echoed(len(ids))
        logprobs = self._prompt_logprobs(frames.index, ids, output.prompt_logprobs)
        text = self._prompt_text(output.prompt, ids)
        return frames.full(text, logprobs, usage=usage, **more)

    def _check_num_echoed(self, num_prompt: int) -> None:
        """All choices begin in one step, on the loop. Raises `ApiError` 400."""
        params = self._call.params
        if params.logprobs is None:
            return
        num_entries = num_prompt * (1 + params.logprobs) * params.n
        if num_entries > MAX_STREAMED_ECHO_ENTRIES:
            what = f"echo with logprobs is {num_entries} entries before the first token"
            limit = f"with stream=true at most {MAX_STREAMED_ECHO_ENTRIES}"
            raise bad_request(f"{what}, {limit}", "echo")

    def text(self, completion: CompletionOutput) -> str:
        return "" if self._prompt_only else completion.text

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        if not self._wants_logprobs or self._prompt_only or not completion.logprobs:
            return None
        return self._logprobs[choice_index].output(completion.logprobs)

    def token_ids(self, completion: CompletionOutput) -> list[int]:
        return self._answered(completion.token_ids)

    # The body

    def body(self, answer: CollectedOutput) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "object": self.place.object_name,
            "created": self._call.created,
            "model": self._call.model,
            "choices": [self._choice(answer, choice) for choice in answer.choices],
            "usage": answer.usage.as_dict(),
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "kv_transfer_params": None,
        }

    def _choice(self, answer: CollectedOutput, choice: CollectedChoice) -> dict[str, Any]:
        prompt = answer.prompt_of(choice)
        text = "" if self._prompt_only else choice.text
        if self._echo:
            text = self._prompt_text(prompt.text, prompt.token_ids) + text
        returns_ids = self._call.return_token_ids
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._choice_logprobs(answer, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": (
                prompt_logprobs(prompt.logprobs, self._names)
                if self._reports_prompt_logprobs
                else None
            ),
            "prompt_token_ids": prompt.token_ids if returns_ids else None,
            "token_ids": self._answered(choice.token_ids) if returns_ids else None,
        }

    def _answered(self, token_ids: list[int]) -> list[int]:
        return [] if self._prompt_only else token_ids

    def _choice_logprobs(self, answer: CollectedOutput, choice: CollectedChoice) -> Any:
        if not self._wants_logprobs:
            return None
        prompt = answer.prompt_of(choice)
        parts = []
        if self._echo:
            parts.append(self._prompt_logprobs(choice.index, prompt.token_ids, prompt.logprobs))
        if not self._prompt_only:
            parts.append(self._logprobs[choice.index].output(choice.logprobs))
        return {name: sliced_json(x for part in parts for x in part[name]) for name in parts[0]}

    def _prompt_logprobs(
        self, choice_index: int, token_ids: list[int], positions: PromptLogprobs | None
    ) -> Any:
        if not self._wants_logprobs:
            return None
        return self._logprobs[choice_index].prompt(token_ids, positions)

    def _prompt_text(self, text: str | None, token_ids: list[int]) -> str:
        if text is not None and not self._cuts_prompt:
            return text
        kept = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text if text is not None and kept.endswith(text) else kept


MAX_CACHED_PARAMS = 64


class ParamsCache:
    """Sampling parameters by the request fields that they were made of.

    Keeps only what was accepted, of the last MAX_CACHED_PARAMS combinations, so nothing is large:
    each text among the fields has its limit. Large requests are prepared in a thread.
    """

    def __init__(self) -> None:
        self._params: dict[tuple[object, ...], SamplingParams] = {}  # the oldest first
        self._forgetting = threading.Lock()

    def get(self, fields: tuple[object, ...], make: Callable[[], SamplingParams]) -> SamplingParams:
        """Return what `make` returns, or returned for equal `fields`. Raises what it raises.

        Nobody may change them: they are shared.
        """
        try:
            known = self._params.get(fields)
        except TypeError:  # a list or a dict among them has no hash
            return make()
        if known is not None:
            return known
        params = make()
        with self._forgetting:
            if len(self._params) >= MAX_CACHED_PARAMS:
                self._params.pop(next(iter(self._params)))
            self._params[fields] = params
        return params


PARAMS_CACHE = web.AppKey("params_cache", ParamsCache)

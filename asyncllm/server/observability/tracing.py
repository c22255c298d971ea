"""OpenTelemetry: one span per engine request, made whole when the request ends.

The caller's W3C `traceparent` becomes the current context while its handler runs; a span's parent
is what was current when its call began. Attributes follow the semantic conventions for generative
AI; the latencies, which these do not have, carry vLLM's names. No span holds a prompt or an output.
Spans are exported by the SDK's own thread; its OTEL_* variables hold (protocol, headers, sampler).
This module needs the extra `otel`, and is imported only where --otlp-traces-endpoint is set.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler
from opentelemetry import context, trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asyncllm.engine.stats import FinishedRequestStats, IterationStats, SchedulerStats
from asyncllm.sampling_params import SamplingParams
from asyncllm.server.inputs.call import Call

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
NANOSECONDS = 1_000_000_000
RECORD_SECONDS = 10.0  # at most from a client's last token to the record of its request
_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}  # by the call id's prefix
_PROPAGATOR = TraceContextTextMapPropagator()


class _Opened(NamedTuple):
    parent: context.Context
    id: str
    model: str
    params: SamplingParams


class Tracing:
    """A `StatLogger`. After `begin` of a call its requests become spans as they end."""

    def __init__(self, exporter: SpanExporter) -> None:
        own = Resource({"service.name": "asyncllm", "service.version": version("asyncllm")})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("asyncllm")
        # By request id. Without their calls' prompts: those of refused ones stay for a while.
        self._open: dict[str, _Opened] = {}

    def begin(self, call: Call) -> None:
        opened = _Opened(context.get_current(), call.id, call.model, call.params)
        self._open.update(dict.fromkeys(call.request_ids, opened))

    def end(self, call: Call) -> None:
        """Its requests are over. Their records come soon; refused ones have none: they are
        forgotten."""
        forget = partial(self._forget, call.request_ids)
        asyncio.get_running_loop().call_later(RECORD_SECONDS, forget)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        for request in iteration.finished:
            if (opened := self._open.pop(request.request_id, None)) is not None:
                self._span(request, opened)

    def _span(self, request: FinishedRequestStats, call: _Opened) -> None:
        end = time.time_ns()
        operation = _OPERATIONS.get(call.id.partition("-")[0], "generate_content")
        span = self._tracer.start_span(
            f"{operation} {call.model}",
            context=call.parent,
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "asyncllm",
                "gen_ai.request.model": call.model,
                "gen_ai.response.model": call.model,
                "gen_ai.response.id": call.id,
                **_of_params(call.params),
                **_of_request(request),
            },
            start_time=end - int(request.e2e_time * NANOSECONDS),
        )
        if request.finish_reason == "error":
            span.set_attribute("error.type", "engine_error")
            span.set_status(trace.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Block until the exporter has everything, or gives up."""
        self._provider.shutdown()


def _of_params(params: SamplingParams) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
    }
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    for name in ("frequency_penalty", "presence_penalty", "seed"):
        if value := getattr(params, name):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _of_request(request: FinishedRequestStats) -> dict[str, Any]:
    inference_time = None
    if request.prefill_time is not None and request.decode_time is not None:
        inference_time = request.prefill_time + request.decode_time
    attributes = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.response.finish_reasons": [request.finish_reason],
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.response.time_to_first_chunk": request.time_to_first_token,
        "gen_ai.latency.time_to_first_token": request.time_to_first_token,
        "gen_ai.latency.e2e": request.e2e_time,
        "gen_ai.latency.time_in_queue": request.queue_time,
        "gen_ai.latency.time_in_model_prefill": request.prefill_time,
        "gen_ai.latency.time_in_model_decode": request.decode_time,
        "gen_ai.latency.time_in_model_inference": inference_time,
    }
    return {name: value for name, value in attributes.items() if value is not None}


@web.middleware
async def trace_context_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The caller's trace is current while its handler runs."""
    token = context.attach(_PROPAGATOR.extract(request.headers))
    try:
        return await handler(request)
    finally:
        context.detach(token)


def make_exporter(endpoint: str) -> SpanExporter:
    """By gRPC, as vLLM does, unless the SDK's variable says http/protobuf. Raises `ValueError`."""
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise ValueError(f"{PROTOCOL_VARIABLE} must be grpc or http/protobuf, got {protocol!r}")

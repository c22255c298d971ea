"""OpenTelemetry spans, read from an exporter in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from asyncllm.server import args as server_args
from asyncllm.server.args import ServerArgs
from asyncllm.server.observability import tracing
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, run, serving, until

ENDPOINT = "http://127.0.0.1:4317"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: memory)
    return memory


def finished(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    """The spans of a server that has ended: its end exports everything."""
    return exporter.get_finished_spans()


def test_span_of_a_chat(exporter: InMemorySpanExporter) -> None:
    async def test() -> None:
        async with serving(otlp_traces_endpoint=ENDPOINT) as server:
            body = {"messages": HELLO, "max_tokens": 5, "n": 2, "temperature": 0.25, "seed": 7}
            _, answer = await server.post(CHAT, body, traceparent=TRACEPARENT)
            answers.append(answer)

    answers: list[dict[str, object]] = []
    run(test())
    (span,) = finished(exporter)
    assert span.name == "chat fake" and span.kind is SpanKind.SERVER
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.start_time is not None and span.end_time is not None
    attributes = dict(span.attributes or {})
    e2e = attributes.pop("gen_ai.latency.e2e")
    assert isinstance(e2e, float)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(e2e, abs=1e-6)
    call_id = answers[0]["id"]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "asyncllm",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": call_id,
        "gen_ai.request.id": f"{call_id}-0",
        "gen_ai.request.temperature": 0.25,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 22,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.time_to_first_chunk": 0.004,
        "gen_ai.latency.time_to_first_token": 0.004,
        "gen_ai.latency.time_in_queue": 0.001,
        "gen_ai.latency.time_in_model_prefill": 0.003,
        "gen_ai.latency.time_in_model_decode": 0.05,
        "gen_ai.latency.time_in_model_inference": pytest.approx(0.053),
    }
    assert span.resource.attributes["service.name"] == "asyncllm"


def test_one_span_per_request_whatever_ends_it(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "RECORD_SECONDS", 0.1)

    async def test() -> None:
        async with serving(otlp_traces_endpoint=ENDPOINT) as server:
            await server.events(COMPLETIONS, {"prompt": ["a", "b"]})
            await server.post(COMPLETIONS, {"prompt": "<fail>"})
            await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 99999})  # refused
            server.engine.go.clear()
            async with aiohttp.ClientSession() as client:
                call = client.post(server.url + COMPLETIONS, json={"prompt": "left"})
                task = asyncio.ensure_future(call)
                await until(lambda: server.engine.live)
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: server.engine.aborted)
            observer = server.service.tracing
            await until(lambda: not observer._open)

    run(test())
    two, twin, failed, aborted = finished(exporter)
    assert {span.name for span in (two, twin, failed, aborted)} == {"text_completion fake"}
    assert two.parent is None and two.context is not None and twin.context is not None
    assert two.context.trace_id != twin.context.trace_id  # nobody said that they belong together
    reasons = [(s.attributes or {})["gen_ai.response.finish_reasons"] for s in (two, aborted)]
    assert reasons == [("length",), ("abort",)]
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "engine_error"


def test_an_unsampled_caller_gets_no_span(exporter: InMemorySpanExporter) -> None:
    async def test() -> None:
        async with serving(otlp_traces_endpoint=ENDPOINT) as server:
            unsampled = TRACEPARENT.removesuffix("01") + "00"
            await server.post(CHAT, {"messages": HELLO}, traceparent=unsampled)
            await server.post(CHAT, {"messages": HELLO}, traceparent="nonsense")

    run(test())
    (span,) = finished(exporter)
    assert span.parent is None


def test_service_name_from_the_environment(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")

    async def test() -> None:
        async with serving(otlp_traces_endpoint=ENDPOINT) as server:
            await server.post(CHAT, {"messages": HELLO})

    run(test())
    (span,) = finished(exporter)
    assert span.resource.attributes["service.name"] == "my-service"


def test_a_collector_gets_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """By OTLP over HTTP, the whole way."""
    received: list[ExportTraceServiceRequest] = []

    async def collect(http: web.Request) -> web.Response:
        assert http.headers["Content-Type"] == "application/x-protobuf"
        received.append(ExportTraceServiceRequest.FromString(await http.read()))
        return web.Response()

    async def test() -> None:
        monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "http/protobuf")
        app = web.Application()
        app.add_routes([web.post("/v1/traces", collect)])
        async with TestServer(app) as collector:
            endpoint = str(collector.make_url("/v1/traces"))
            async with serving(otlp_traces_endpoint=endpoint) as server:
                await server.post(CHAT, {"messages": HELLO}, traceparent=TRACEPARENT)

    run(test())
    (request,) = received
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert span.name == "chat fake" and span.trace_id.hex() == TRACE_ID
    assert "Hello" not in str(request)


@pytest.mark.parametrize(("protocol", "module"), [("grpc", "grpc"), ("http/protobuf", "http")])
def test_exporter_by_protocol(protocol: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, protocol)
    exporter = tracing.make_exporter(ENDPOINT)
    assert f".proto.{module}." in type(exporter).__module__
    exporter.shutdown()


def test_unknown_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "http/json")
    with pytest.raises(ValueError, match="http/protobuf, got 'http/json'"):
        tracing.make_exporter(ENDPOINT)


def test_without_the_extra_the_flag_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ServerArgs(otlp_traces_endpoint=ENDPOINT).check()
    monkeypatch.setattr(server_args, "TRACING_MODULES", ("no_such_package.trace",))
    ServerArgs().check()
    with pytest.raises(ValueError, match=r"install 'asyncllm\[otel\]'"):
        ServerArgs(otlp_traces_endpoint=ENDPOINT).check()

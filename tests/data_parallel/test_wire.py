"""All that crosses the socket comes out as it went in, and nothing else is let through."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from asyncllm.engine.arrival import Arrival, Submission
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.data_parallel.connection import Connection
from asyncllm.engine.data_parallel.process import EngineServer
from asyncllm.engine.data_parallel.remote_requests import RemoteRequests
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import IterationStats, SchedulerStats, StepRecord
from asyncllm.engine.text.prompt import ParsedPrompt
from asyncllm.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    RequestFailedError,
    UnsupportedModelError,
)
from asyncllm.frames import LENGTH, MAX_FRAME_BYTES, Frames, frame
from asyncllm.sampling_params import RequestOutputKind, SamplingParams
from asyncllm.step_plan import StepKind
from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams
from tests.waiting import run, until

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0, max_tokens=None, stop=["a", "b"], logit_bias={3: -1.5, 70: 2}),
    SamplingParams(
        n=2, use_beam_search=True, best_of=3, length_penalty=0.5, early_stopping="never"
    ),
    SamplingParams(output_kind=RequestOutputKind.DELTA, extra_args={"a": [1, None]}, seed=7),
    SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": 3}),  # type: ignore[arg-type]
    SamplingParams(
        structured_outputs=StructuredOutputsParams(
            json={"type": "object"}, after=ReasoningMarkers("</think>", begin="<think>")
        )
    ),
    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["x", "y"])),
]


async def connected(
    received: Any = lambda message: None, lost: Any = lambda why: None
) -> tuple[Connection, socket.socket]:
    """The engine's end, and the bare other one."""
    ours, theirs = socket.socketpair()
    connection = Connection(wire.ToEngine, received, lost)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: connection, sock=ours)
    theirs.setblocking(False)
    return connection, theirs


@pytest.mark.parametrize("params", PARAMS)
def test_sampling_params_come_out_as_they_went_in(params: SamplingParams) -> None:
    sent = wire.Submit("r", ParsedPrompt(token_ids=[1, 2]), wire.params_to_wire(params), 0, None,
                       None, True)  # fmt: skip
    (came,) = msgspec.msgpack.decode(msgspec.msgpack.encode([sent]), type=list[wire.ToEngine])
    assert came.prompt == sent.prompt
    assert wire.params_from_wire(came.params) == params


def test_functions_are_refused_by_name() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    with pytest.raises(InvalidRequestError, match="data_parallel_backend uni") as refused:
        wire.params_to_wire(params)
    assert refused.value.param == "logits_processors"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("extra_args", {"x": object()}),
        ("extra_args", {"x": 1 << 70}),
        ("temperature", np.float64(0.5)),
        ("stop", ["\ud800"]),
    ],
)
def test_values_that_have_no_encoding_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} cannot be sent") as refused:
        wire.params_to_wire(SamplingParams(**{name: value}))
    assert refused.value.param == name


def test_what_cannot_be_encoded_is_its_senders_alone() -> None:
    """All that others send in the same turn of the loop arrives."""

    async def main() -> None:
        connection, other = await connected()
        connection.send(wire.Abort("a", "disconnect"))
        with pytest.raises(UnicodeEncodeError):
            connection.send(wire.Abort("\ud800", "disconnect"))
        connection.send(wire.Abort("b", "disconnect"))
        await asyncio.sleep(0)
        (body,) = Frames().feed(other.recv(1 << 10))
        came = msgspec.msgpack.decode(body, type=list[wire.ToEngine])
        assert [each.request_id for each in came] == ["a", "b"]
        connection.close()
        other.close()

    run(main())


def test_a_request_that_cannot_be_encoded_is_refused() -> None:
    def send(message: wire.Message) -> None:
        msgspec.msgpack.encode(message)

    async def main() -> None:
        requests = RemoteRequests(0, cast(Recorder, None), send)
        given = Submission(Arrival("\ud800", {}), [1], None, lambda _: None, None, 0, None, None)
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            await requests.submit(given, SamplingParams())
        requests.check_idle()

    run(main())


def test_an_engine_hears_nothing_before_it_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    """Not even in the same piece as its start; and it goes on."""

    async def main() -> None:
        server = EngineServer()
        early: list[wire.Message] = [
            wire.ResetPrefixCache(),
            wire.RemoveAdapter("a"),
            wire.PinAdapter("a"),
            wire.Abort("r", "disconnect"),
        ]
        start = wire.Start({"no such": 1}, 0, logging.WARNING)
        server.connection.data_received(frame(msgspec.msgpack.encode([start, *early])))
        assert caplog.text.count("came before the engine was ready") == len(early)
        assert not server.ended.done()
        await server.ended  # by its start, which fails
        assert "TypeError" in caplog.text and "Traceback" in caplog.text
        await server.close()

    run(main())


def test_errors_keep_their_kind_or_the_one_above() -> None:
    def crossed(error: Exception) -> Exception:
        return wire.Error.of(error).error

    long = crossed(ContextLengthError("too long", "messages"))
    assert isinstance(long, ContextLengthError)
    assert (str(long), long.param, long.code) == ("too long", "messages", "context_length_exceeded")
    assert type(crossed(UnsupportedModelError("no"))) is ModelLoadError
    other = crossed(ZeroDivisionError("by zero"))
    assert type(other) is RequestFailedError and str(other) == "ZeroDivisionError: by zero"


def test_records_of_steps() -> None:
    step = StepRecord(3, StepKind.MIXED, 2, 9, 8, 1.5, 0.25, None, 0.0)
    iteration = IterationStats(5, 0, 1, [0.5], [0.1, 0.2], [], step)
    sent = wire.Record.of(SchedulerStats(num_running=2), iteration)
    body = msgspec.msgpack.encode([sent])
    (came,) = msgspec.msgpack.decode(body, type=list[wire.FromEngine])
    assert came.iteration == iteration and came.iteration.step.kind is StepKind.MIXED
    assert came.stats == SchedulerStats(num_running=2)


def test_messages_in_any_pieces() -> None:
    async def main() -> None:
        received: list[Any] = []
        connection, other = await connected(received.append)
        sent = [wire.Abort(f"r{i}", "disconnect") for i in range(50)]
        body = b"".join(frame(msgspec.msgpack.encode([message])) for message in sent)
        rng = random.Random(0)
        while body:
            size = rng.randint(1, 40)
            piece, body = body[:size], body[size:]
            other.send(piece)
            await asyncio.sleep(0)
        await until(lambda: len(received) == 50)
        assert received == sent
        connection.close()
        other.close()

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        LENGTH.pack(MAX_FRAME_BYTES + 1),
        LENGTH.pack(4) + b"\xff\xff\xff\xff",
        LENGTH.pack(6) + msgspec.msgpack.encode([["No"]]).ljust(6, b"\0"),
        LENGTH.pack(9) + msgspec.msgpack.encode([["Abort"]]).ljust(9, b"\0"),
    ],
)
def test_what_is_no_message_ends_the_connection(sent: bytes) -> None:
    async def main() -> None:
        received: list[Any] = []
        reasons: list[str] = []
        _, other = await connected(received.append, reasons.append)
        other.send(sent)
        await until(lambda: reasons)
        assert "no message" in reasons[0] and not received
        other.close()

    run(main())

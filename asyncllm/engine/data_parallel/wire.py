"""Messages between the server's process and an engine's, as frames of msgpack.

Each message is a record with a tag; what is not of these types is refused while it is decoded, so
nothing that arrives is ever code. A request's prompt is sent once and never back. Times are
`time.monotonic()`, which all processes of a host share.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, fields
from typing import Any

import msgspec

from asyncllm.engine.stats import (
    AbortCause,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
    StepRecord,
)
from asyncllm.engine.text.prompt import ParsedPrompt
from asyncllm.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    LoRALoadError,
    ModelLoadError,
    QueueFullError,
    RequestFailedError,
)
from asyncllm.lora import LoRARequest
from asyncllm.mesh_config import RankStats
from asyncllm.outputs import CompletionOutput, Logprob, RequestMetrics
from asyncllm.sampling_params import RequestOutputKind, SamplingParams
from asyncllm.step_plan import StepKind
from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams

logger = logging.getLogger("asyncllm")

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ContextLengthError, EngineDeadError, InvalidRequestError, LoRALoadError, ModelLoadError,
        OSError, QueueFullError, RequestFailedError, ValueError,
    )
}  # fmt: skip
UNENCODED = (TypeError, ValueError, OverflowError, RecursionError)  # raised for what is no message


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One of those below."""


class Error(msgspec.Struct, array_like=True, frozen=True, gc=False):
    kind: str
    text: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Error:
        """Choose a kind that the other side knows, its own or a base; else name it in the text."""
        above = [base.__name__ for base in type(error).__mro__]
        kind, text = next((name for name in above if name in ERRORS), ""), str(error)
        if not kind:
            logger.error("an unexpected error: the server gets its text alone", exc_info=error)
            kind, text = "RequestFailedError", f"{type(error).__name__}: {text}"
        return cls(kind, text, getattr(error, "param", None), getattr(error, "code", None))

    @property
    def error(self) -> Exception:
        found = ERRORS.get(self.kind, RequestFailedError)(self.text)
        if isinstance(found, InvalidRequestError):
            found.param, found.code = self.param, self.code
        return found


# --- to the engine -------------------------------------------------------------------------------


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An engine's among those that share experts. port: of the store of their ranks."""

    number: int
    num_engines: int
    port: int


class Start(Message):
    """`args`: fields of `EngineArgs`. place: None where the engine shares nothing."""

    args: dict[str, Any]
    rank: int
    log_level: int
    place: Place | None = None


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    name: str
    int_id: int
    path: str
    base: str | None

    @classmethod
    def of(cls, request: LoRARequest) -> Adapter:
        path = str(request.lora_path)
        return cls(request.lora_name, request.lora_int_id, path, request.base_model_name)

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.name, self.int_id, self.path, self.base)


class Submit(Message):
    request_id: str
    prompt: ParsedPrompt
    params: dict[str, Any]
    priority: int
    cache_salt: str | None
    adapter: Adapter | None
    takes_text: bool  # whether its client has a `text_sink`


class Abort(Message):
    request_id: str
    cause: AbortCause


class AddAdapter(Message):
    """Answered by `Done` of that number."""

    number: int
    adapter: Adapter
    reload: bool


class RemoveAdapter(Message):
    name: str


class PinAdapter(Message):
    name: str


class ResetPrefixCache(Message):
    pass


class Close(Message):
    pass


# --- from the engine -----------------------------------------------------------------------------


class Ready(Message):
    startup: dict[str, Any]
    max_model_len: int
    stats: SchedulerStats


class Failed(Message):
    """It could not start, or it is dead."""

    error: Error


class Accepted(Message):
    """`error`: why not."""

    request_id: str
    error: Error | None = None


class Output(Message):
    """A `RequestOutput` but for its prompt."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int
    num_unreturned_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    error: Error | None


class Text(Message):
    """Text for `text_sink`."""

    request_id: str
    text: str
    num_tokens: int


class Record(Message):
    """A step's record for a `StatLogger`; `values`: `IterationStats` but for the next two."""

    stats: SchedulerStats
    values: dict[str, Any]
    step: dict[str, Any] | None
    finished: list[FinishedRequestStats]

    @classmethod
    def of(cls, stats: SchedulerStats, iteration: IterationStats) -> Record:
        values = {f.name: getattr(iteration, f.name) for f in fields(iteration)}
        step, finished = values.pop("step"), values.pop("finished")
        return cls(stats, values, None if step is None else asdict(step), finished)

    @property
    def iteration(self) -> IterationStats:
        given, step = self.step, None
        if given is not None:
            step = StepRecord(**{**given, "kind": StepKind(given["kind"])})
        return IterationStats(**self.values, step=step, finished=self.finished)


class Beat(Message):
    """Once a second, as long as the event loop turns."""

    health: str | None
    stats: SchedulerStats
    picture: str
    pages_per_cell: int
    running: list[str]  # adapters
    waiting: list[str]
    totals: dict[str, Any]
    ranks: list[RankStats]


class Done(Message):
    number: int
    error: Error | None = None


ToEngine = (
    Start | Submit | Abort | AddAdapter | RemoveAdapter | PinAdapter | ResetPrefixCache | Close
)
FromEngine = Ready | Failed | Accepted | Output | Text | Record | Beat | Done


# --- sampling parameters -------------------------------------------------------------------------


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Its fields that are no defaults, encoded. Raises `InvalidRequestError` for what is code, or
    of a class that has no encoding."""
    if params.logits_processors:
        raise InvalidRequestError(
            "logits_processors are functions of this process: they need data_parallel_backend uni",
            "logits_processors",
        )
    given: dict[str, Any] = {}
    for name, default in ((f.name, f.default) for f in fields(params)):
        if (value := getattr(params, name)) != default:
            try:
                given[name] = msgspec.Raw(msgspec.msgpack.encode(value))
            except UNENCODED as error:
                why = f"{name} cannot be sent to the engine's process: {error}"
                raise InvalidRequestError(why, name) from error
    return given


def params_from_wire(given: dict[str, Any]) -> SamplingParams:
    """Raises `InvalidRequestError`."""
    if "output_kind" in given:
        given["output_kind"] = RequestOutputKind(given["output_kind"])
    if (structured := given.get("structured_outputs")) is not None:
        names = {f.name for f in fields(StructuredOutputsParams) if f.init}
        values = {name: structured[name] for name in names}
        if values["after"] is not None:
            values["after"] = ReasoningMarkers(**values["after"])
        given["structured_outputs"] = StructuredOutputsParams(**values)
    return SamplingParams(**given)

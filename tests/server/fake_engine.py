"""An engine with the real one's face and no model: every answer is known in advance.

Tokens are bytes. Answer `index` to any prompt is `reply(index)`, one byte per step, so a two-byte
character takes a step with no text. Words in the prompt make trouble: `<fail>` ends the request
with an error after three tokens, `<dead end>` with its grammar's, `<raise>` hands the sink an
output that no server can render.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.output_state import TextSink
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.snapshot import Snapshot, take_snapshot
from asyncllm.engine.stats import (
    AbortCause,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
    StepRecord,
)
from asyncllm.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineNotStartedError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from asyncllm.lora import LoRARequest
from asyncllm.mesh_config import MeshConfig, RankStats
from asyncllm.outputs import CompletionOutput, Logprob, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.worker.work_counts import WorkCounts

DEAD_END = "structured_outputs.grammar"  # what the engine blames, whatever the client calls it
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 256
BOS = 1
Sink = Callable[[RequestOutput], None]


def reply(index: int) -> str:
    return f'Answer {index}: grün, and "quoted".'


class FakeTokenizer:
    """One token per byte of UTF-8; the special token in front is byte 1."""

    vocab_size = VOCAB_SIZE
    chat_template = ""
    special_tokens: dict[str, int] = {}  # noqa: RUF012
    response_template = None

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": "FakeTokenizer", "chat_template": "{{ messages }}"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i == BOS)]
        return bytes(kept).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        return f"Ġ{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        if not messages:
            raise InvalidRequestError("messages must be a list of at least one message", "messages")
        text = "".join(f"<{m.get('role')}>{m.get('content')}" for m in messages)
        text += f"{{{len(tools)} tools}}" if tools else ""
        text += "".join(f"[{k}={v}]" for k, v in (template_kwargs or {}).items())
        text += "" if chat_template is None else f"({chat_template})"
        return text + ("<assistant>" if add_generation_prompt else "")


class FakeInputProcessor:
    """Its `generation_config` says temperature 0.5."""

    def default_params(self, overrides: dict[str, Any]) -> SamplingParams:
        return self.with_counts(SamplingParams(**{"temperature": 0.5, **overrides}))

    def with_counts(self, params: SamplingParams) -> SamplingParams:
        return replace(params, logprobs=VOCAB_SIZE) if params.logprobs == -1 else params


@dataclass
class FakeRequest:
    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    sink: Sink
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    text_sink: TextSink | None = None
    num_steps: int = 0
    script: str | None = None
    arrival: float = field(default_factory=time.monotonic)

    def whole(self, index: int) -> bytes:
        return (reply(index) if self.script is None else self.script).encode()

    def answer(self, index: int) -> bytes:
        return self.whole(index)[: self.max_tokens]


class FakeEngine:
    def __init__(self) -> None:
        self.config = SimpleNamespace(
            mesh=MeshConfig(),
            enable_lora=False,
            data_parallel_rank=0,
            max_loras=8,
            model_name="some/repository",
            served_model_names=("fake", "fake-alias"),
            block_size=16,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.9,
            reasoning_parser="auto",
        )
        self.max_model_len = MAX_MODEL_LEN
        self.tokenizer = FakeTokenizer()
        self.input_processor = FakeInputProcessor()
        self.recorder = Recorder()
        self.work = WorkCounts()
        self.stat_loggers: list[Any] = []
        self.startup = {"model": "none", "seconds": {"load": 0.0}}
        self.live: dict[str, FakeRequest] = {}
        self.seen: list[FakeRequest] = []
        self.aborted: list[str] = []
        self.sink_errors: list[BaseException] = []
        self.unhealthy: str | None = None
        self._num_steps = 0
        self.max_queued = 1000
        self.go = asyncio.Event()  # steps run while it is set
        self.go.set()
        self.step_seconds = 0.0
        self.chunk_text: Callable[[str], str] = lambda text: text  # what tests inflate
        self.script: str | None = None  # what every answer says, instead of `reply`
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def health(self) -> str | None:
        return self.unhealthy

    def check_idle(self) -> None:
        assert not self.live

    def stats(self) -> SchedulerStats:
        num_pages = len(self.live)
        return SchedulerStats(num_running=num_pages, num_pages=100, num_used_pages=num_pages)

    def snapshot(self, last_steps: int = 256) -> Snapshot:
        return take_snapshot(self.replicas, last_steps)

    @property
    def replicas(self) -> tuple[FakeEngine, ...]:
        return (self,)

    def ranks(self) -> list[RankStats]:
        return [RankStats(0)]

    def picture(self, pages_per_cell: int) -> str:
        return BlockManager(100, 16).device.picture(pages_per_cell)

    def observe(self) -> None:
        pass

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        sink: Sink,
        *,
        text_sink: TextSink | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> FakeRequest:
        if self.unhealthy is not None:
            is_loading = self.unhealthy == "loading"
            raise (EngineNotStartedError if is_loading else EngineDeadError)(self.unhealthy)
        if len(self.live) >= self.max_queued:
            raise QueueFullError(f"{self.max_queued} requests are waiting")
        text, ids = self._tokenise(prompt)
        await asyncio.sleep(0)
        room = self.max_model_len - len(ids)
        max_tokens = params.max_tokens or room
        if room < max_tokens or room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but "
                f"{len(ids)} + {max_tokens} were asked for",
                "max_tokens" if params.max_tokens else "prompt",
            )
        if (params.logprobs or 0) > 20:
            raise InvalidRequestError("logprobs must be at most 20", "logprobs")
        is_plain = params.n == 1 and params.logprobs is None and params.prompt_logprobs is None
        request = FakeRequest(
            request_id, text, ids, params, sink, max_tokens, priority, cache_salt,
            text_sink=text_sink if is_plain and not params.stop else None, script=self.script,
        )  # fmt: skip
        self.live[request_id] = request
        self.seen.append(request)
        return request

    def lora_activity(self) -> tuple[list[str], list[str]]:
        return ["sql"], []

    async def list_loras(self) -> list[LoRARequest]:
        return []

    def find_lora(self, lora_name: str) -> LoRARequest | None:
        return None

    def abort(self, request_id: str, cause: AbortCause = "application") -> None:
        request = self.live.pop(request_id, None)
        if request is not None:
            self.aborted.append(request_id)
            self.recorder.aborts[cause] += 1
            self._tell(request, self._last_words(request))
            self._record(IterationStats(finished=[_finished_stats(request, "abort")]))

    def _tokenise(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, list):
            text, ids = None, prompt
            if any(i < 0 or i >= VOCAB_SIZE for i in ids):
                raise InvalidRequestError("token id out of the vocabulary", "prompt")
        else:
            text = prompt["prompt"]
            ids = self.tokenizer.encode(text, prompt.get("add_special_tokens", True))
        if not ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        return text, ids

    async def _run(self) -> None:
        while True:
            await self.go.wait()
            await asyncio.sleep(self.step_seconds)
            if self.live:
                self._step()

    def _step(self) -> None:
        iteration = IterationStats(step=self._step_record())
        for request in list(self.live.values()):
            output = self._advance(request)
            iteration.num_generation_tokens += sum(len(o.token_ids) for o in output.outputs)
            if request.num_steps == 1:
                iteration.num_prompt_tokens += len(request.token_ids)
                iteration.time_to_first_tokens.append(0.004)
            else:
                iteration.inter_token_latencies.append(0.002)
            if output.finished:
                self.live.pop(request.request_id, None)
                reason = output.outputs[0].finish_reason or "stop"
                iteration.finished.append(_finished_stats(request, reason))
            self._tell(request, output)
        asyncio.get_running_loop().call_soon(self._record, iteration)  # after who waits for tokens

    def _step_record(self) -> StepRecord:
        self._num_steps += 1
        rows = len(self.live)
        return StepRecord(
            step_id=self._num_steps, kind="decode", rows=rows, tokens=rows, prefill_tokens=0,
            start=time.monotonic() - 0.002, duration=0.002, launch_lead=0.001, starved=0.0,
        )  # fmt: skip

    def _tell(self, request: FakeRequest, output: RequestOutput) -> None:
        try:
            if request.text_sink is not None and request.num_steps > 1 and _only_text(output):
                request.text_sink(output.outputs[0].text, len(output.outputs[0].token_ids))
            else:
                request.sink(output)
        except BaseException as error:
            self.sink_errors.append(error)

    def _last_words(self, request: FakeRequest) -> RequestOutput:
        ends = [CompletionOutput(i, "", [], finish_reason="abort") for i in range(request.params.n)]
        return RequestOutput(
            request.request_id, request.prompt, request.token_ids, None, ends, True
        )

    def _record(self, iteration: IterationStats) -> None:
        for logger in (self.recorder, *self.stat_loggers):
            logger.record(self.stats(), iteration)

    def _advance(self, request: FakeRequest) -> RequestOutput:
        step, request.num_steps = request.num_steps, request.num_steps + 1
        outputs = [self._token(request, i, step) for i in range(request.params.n)]
        outputs = [output for output in outputs if output is not None]
        error: Exception | None = None
        prompt = bytes(request.token_ids)
        if b"<fail>" in prompt and step == 3:
            error = RequestFailedError("the model failed")
        if b"<dead end>" in prompt and step == 3:
            error = InvalidRequestError(f"{DEAD_END}: nothing may follow", DEAD_END)
        if error is not None:
            for output in outputs:
                output.finish_reason = "error"
        if b"<raise>" in prompt and step == 3:
            outputs[0].index = 99
        longest = max(len(request.answer(i)) for i in range(request.params.n))
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids,
            prompt_logprobs=_prompt_logprobs(request) if step == 0 else None,
            outputs=outputs,
            finished=error is not None or request.num_steps == longest,
            num_cached_tokens=len(request.token_ids) // 16 * 16,
            error=error,
        )

    def _token(self, request: FakeRequest, index: int, step: int) -> CompletionOutput | None:
        answer = request.answer(index)
        if step >= len(answer):
            return None
        before = answer[:step].decode("utf-8", "ignore")
        text = answer[: step + 1].decode("utf-8", "ignore").removeprefix(before)
        last = step + 1 == len(answer)
        whole = len(answer) == len(request.whole(index))
        output = CompletionOutput(index=index, text=self.chunk_text(text), token_ids=[answer[step]])
        if request.params.logprobs is not None:
            output.logprobs = [candidates(answer[step], request.params.logprobs)]
        if last:
            output.finish_reason = "stop" if whole else "length"
        return output


def candidates(token_id: int, num_top: int) -> dict[int, Logprob]:
    """The token first. An even token is the likeliest one, an odd one is out of the top few."""
    own_rank = 1 if token_id % 2 == 0 else num_top + 1
    found = {token_id: Logprob(-0.5 * own_rank, own_rank, bytes([token_id]).decode("latin-1"))}
    others = (i for i in range(65, 65 + 26) if i != token_id)
    for rank in range(1, num_top + 1):
        if rank != own_rank:
            other = next(others)
            found[other] = Logprob(-0.5 * rank, rank, chr(other))
    return found


def _prompt_logprobs(request: FakeRequest) -> list[dict[int, Logprob] | None] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return [None, *(candidates(i, num_top) for i in request.token_ids[1:])]


def _finished_stats(request: FakeRequest, reason: Any) -> FinishedRequestStats:
    return FinishedRequestStats(
        request_id=request.request_id,
        finish_reason=reason,
        num_prompt_tokens=len(request.token_ids),
        num_generation_tokens=request.num_steps * request.params.n,
        max_num_generation_tokens=request.num_steps,
        num_cached_tokens=0,
        max_tokens=request.max_tokens,
        n=request.params.n,
        e2e_time=time.monotonic() - request.arrival,
        queue_time=0.001,
        prefill_time=0.003,
        decode_time=0.05,
        time_to_first_token=0.004,
        time_per_output_token=0.002,
    )


def _only_text(output: RequestOutput) -> bool:
    completion = output.outputs[0]
    unusual = output.finished or output.error or completion.index or completion.finish_reason
    return not unusual

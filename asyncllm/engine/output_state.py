"""The output processor's state of a live request and of its sequences.

A request's state collects the tokens of a step and returns them as one delta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from asyncllm.engine.logprobs import LazyPromptLogprobs, TokenText, logprob_dict, no_text
from asyncllm.engine.stats import FinishedRequestStats
from asyncllm.engine.text.sequence_text import SequenceText, sequence_text
from asyncllm.engine.text.stop_checker import NO_STOP_STRINGS, StopStrings
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.outputs import (
    CompletionOutput,
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    SampleLogprobs,
)
from asyncllm.sampling_params import RepetitionDetectionParams
from asyncllm.types import Request, Sequence, TokenLogprobs, TokenUpdate

Sink = Callable[[RequestOutput], None]
TextSink = Callable[[str, int], None]  # text, number of tokens
REPETITION_STOP_REASON = "repetition_detected"  # as in vLLM
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class RequestState:
    """deltas: this step's completions, until they are sent."""

    request: Request
    sink: Sink
    text_sink: TextSink | None  # None: all deltas go to `sink`
    text_of: TokenText
    num_live: int  # unfinished sequences
    prompt_logprobs: list[TokenLogprobs] | None  # None: not requested, or sent already
    deltas: list[CompletionOutput] = field(default_factory=list)
    num_generated: int = 0  # tokens of finished sequences
    num_first_generated: int = 0  # tokens of sequence 0
    first_reason: FinishReason = "abort"  # finish reason of sequence 0
    error: Exception | None = None

    def take_output(self, now: float) -> RequestOutput:
        """This step's tokens as one delta."""
        request = self.request
        deltas, self.deltas = self.deltas, []
        finished = self.num_live == 0
        if finished:
            request.metrics.finished_time = now
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            self._take_prompt_logprobs(),
            deltas,
            finished,
            request.metrics,
            request.sequences[0].num_cached_tokens,
            self.error,
        )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        """All prompt logprobs, with the first token: they are complete by then."""
        known, request = self.prompt_logprobs, self.request
        if known is None or request.metrics.first_token_time is None:
            return None
        self.prompt_logprobs, num_top = None, request.sampling_params.prompt_logprobs or 0
        return LazyPromptLogprobs(request.prompt_token_ids, known, num_top, self.text_of)

    def stats(self) -> FinishedRequestStats:
        """The statistics of a finished request."""
        request, metrics = self.request, self.request.metrics
        arrival, first = metrics.arrival_time, metrics.first_token_time
        assert metrics.finished_time is not None, "the last output sets it"
        decode_time, time_per_token = _difference(metrics.last_token_time, first), None
        if decode_time is not None and self.num_first_generated > 1:
            time_per_token = decode_time / (self.num_first_generated - 1)
        return FinishedRequestStats(
            request_id=request.request_id,
            finish_reason=self.first_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_generation_tokens=self.num_generated,
            max_num_generation_tokens=max(s.num_output_tokens for s in request.sequences),
            num_cached_tokens=request.sequences[0].num_cached_tokens,
            max_tokens=request.max_tokens,
            n=len(request.sequences),
            e2e_time=metrics.finished_time - arrival,
            queue_time=_difference(metrics.first_scheduled_time, arrival),
            prefill_time=_difference(first, metrics.first_scheduled_time),
            decode_time=decode_time,
            time_to_first_token=_difference(first, arrival),
            time_per_output_token=time_per_token,
        )


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


class RepetitionDetector:
    """Detects that a sequence ends with a repeated pattern: `push` each output token.

    For each pattern size p it counts the latest tokens that equal the one p places before. When the
    count reaches p * (min_count - 1), the sequence ends with `min_count` copies of a pattern. So a
    token costs one numpy pass over the sizes, whatever the length of the answer.
    Only a token after the first `min_tokens` can complete a repetition.
    """

    __slots__ = ("_first", "_latest", "_num_tokens_left", "_runs", "_size", "_wanted", "_window")

    def __init__(self, params: RepetitionDetectionParams, min_tokens: int = 0) -> None:
        assert params.max_pattern_size > 0, "detection is off"
        least = max(params.min_pattern_size, 1)
        sizes = np.arange(least, params.max_pattern_size + 1, dtype=np.int32)
        self._first = least - 1
        self._size = params.max_pattern_size
        self._wanted = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)  # per size: number of latest tokens that repeat
        # The latest tokens, newest first, from index `_latest` on; below it is free space.
        self._window = np.full(2 * self._size, NO_TOKEN, np.int64)
        self._latest = self._size
        self._num_tokens_left = min_tokens

    def push(self, token_id: int) -> bool:
        """Take a token. Whether it completes a repetition."""
        window, latest = self._window, self._latest
        before = window[latest + self._first : latest + self._size]
        self._runs = np.where(before == token_id, self._runs + 1, 0)
        if latest == 0:
            window[self._size :] = window[: self._size]
            latest = self._size
        self._latest = latest - 1
        window[latest - 1] = token_id
        self._num_tokens_left -= 1
        return self._num_tokens_left < 0 and bool((self._runs >= self._wanted).any())


@dataclass(slots=True, eq=False)
class SequenceState:
    """new_text, num_new_tokens: of this step, for the text sink."""

    seq: Sequence
    owner: RequestState
    text: SequenceText
    push_plain: Callable[[int], str] | None  # text.push_plain, kept here for speed
    num_logprobs: int | None
    cumulative_logprob: float | None
    num_tokens: int = 0
    last_token_time: float | None = None
    text_sink: TextSink | None = None  # set after the first output, if only text follows
    repetition: RepetitionDetector | None = None
    new_text: str = ""
    num_new_tokens: int = 0

    def add_token(self, text: str, update: TokenUpdate) -> CompletionOutput:
        """Add a token to this sequence's completion in the request's delta."""
        _, token_id, reported = update
        logprobs: SampleLogprobs = []
        if self.num_logprobs is not None:
            assert reported is not None, f"sequence {self.seq.seq_id}: no logprobs, but it asked"
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + reported.logprob
            is_ranked = not self.owner.request.sampling_params.logprob_token_ids
            logprobs.append(
                logprob_dict(token_id, reported, self.num_logprobs, self.owner.text_of, is_ranked)
            )
        delta = self.add_text(text)
        delta.token_ids.append(token_id)
        if delta.logprobs is not None:
            delta.cumulative_logprob = self.cumulative_logprob
            delta.logprobs += logprobs
        return delta

    def add_text(self, text: str) -> CompletionOutput:
        """Add text without a token, as is held back by stop strings."""
        index, deltas = self.seq.index, self.owner.deltas
        for delta in deltas:  # empty unless n > 1 or a step has several tokens
            if delta.index == index:
                delta.text += text
                return delta
        logprobs: SampleLogprobs | None = None if self.num_logprobs is None else []
        deltas.append(CompletionOutput(index, text, [], self.cumulative_logprob, logprobs))
        return deltas[-1]


def new_states(
    request: Request, sink: Sink, text_sink: TextSink | None, tokenizer: Tokenizer | None
) -> tuple[RequestState, list[SequenceState]]:
    """The initial states of a request and of its sequences."""
    params = request.sampling_params
    num_logprobs, wanted = params.num_logprobs, params.repetition_detection
    # Whether most of its steps produce text only.
    has_logprobs = num_logprobs is not None or params.prompt_logprobs is not None
    is_plain = params.n == 1 and not (has_logprobs or params.stop or wanted)
    owner = RequestState(
        request,
        sink,
        text_sink if is_plain else None,
        tokenizer.token_text if params.detokenize and tokenizer is not None else no_text,
        num_live=len(request.sequences),
        prompt_logprobs=None if params.prompt_logprobs is None else [],
    )
    stops = StopStrings(params.stop) if params.stop else NO_STOP_STRINGS
    states = []
    for seq in request.sequences:
        text = sequence_text(request, tokenizer, stops)
        state = SequenceState(
            seq,
            owner,
            text,
            text.push_plain,
            num_logprobs,
            cumulative_logprob=None if num_logprobs is None else 0.0,
            num_tokens=seq.num_output_tokens,  # 0, except for a beam
            repetition=None if wanted is None else RepetitionDetector(wanted, params.min_tokens),
        )
        states.append(state)
    return owner, states

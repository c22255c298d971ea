"""Turns sampled tokens into outputs: detokenization, stop strings, log-probabilities, deltas.

It keeps a state per live sequence. The tokens of a step become one delta `RequestOutput` per
request, which goes to the request's sink. Most steps only produce text of one sequence: for these a
request may have a text sink, which gets the bare text at half the cost. Sinks are called on the
event loop's thread and must not block. Errors stay within their request: if its detokenizer or stop
strings raise, the sequence ends with "error"; if its sink raises, the request ends. Sequences that
end by their text are returned, and the caller ends them in the scheduler.
"""

from __future__ import annotations

import logging
import math

from asyncllm.engine.output_state import (
    REPETITION_STOP_REASON,
    RequestState,
    SequenceState,
    Sink,
    TextSink,
    new_states,
)
from asyncllm.engine.stats import IterationStats
from asyncllm.engine.text.sequence_text import hides_last_token
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import RequestFailedError
from asyncllm.outputs import CompletionOutput, FinishReason
from asyncllm.types import Request, Sequence, SequenceStatus, TokenLogprobs, TokenUpdate

logger = logging.getLogger(__name__)

# A sequence that ended here, by a stop string or a repetition (the last part), or by its own error.
Stop = tuple[Sequence, FinishReason, str | None]


class OutputProcessor:
    """tokenizer: may be None if all requests have detokenize=False."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.requests: dict[str, RequestState] = {}  # without their last output, oldest first
        self._sequences: dict[int, SequenceState] = {}  # unfinished ones, by seq_id
        self._iteration = IterationStats()
        self._ended: list[Request] = []
        self._step_time = -math.inf  # when the last step's tokens came

    def add(self, request: Request, sink: Sink, text_sink: TextSink | None = None) -> None:
        """Expect tokens of `request`, whose outputs go to `sink`.

        text_sink: gets the text of the steps between the first and the last token, if the request
        has one sequence, no logprobs, no stop strings and no repetition detection.
        """
        assert request.request_id not in self.requests, f"request {request.request_id} twice"
        owner, states = new_states(request, sink, text_sink, self._tokenizer)
        for state in states:
            self._sequences[state.seq.seq_id] = state
        self.requests[request.request_id] = owner

    def process(
        self,
        updates: list[TokenUpdate],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
        now: float,
        *,
        were_complete: bool = False,
    ) -> list[Stop]:
        """Process a step's tokens and send outputs. now: monotonic seconds.

        were_complete: the tokens come from a finished beam search, so there are no latencies.
        Returns the sequences that ended here, for the scheduler; their last output is sent.
        """
        for seq_id, chunk in prompt_logprobs.items():
            state = self._sequences.get(seq_id)
            # Until the first token. Siblings that compute the prompt too are ignored.
            if (
                state is not None
                and state.seq.index == 0
                and state.owner.prompt_logprobs is not None
            ):
                state.owner.prompt_logprobs += chunk
        stops: list[Stop] = []
        latencies = self._iteration.inter_token_latencies
        num_known = len(latencies)
        with_text, touched = self._take_all(updates, now, stops)
        if were_complete:
            del latencies[num_known:]
        self._emit_all(with_text, touched, now, stops)
        self._iteration.num_generation_tokens += len(updates)
        return stops

    def end(self, request_id: str, now: float, error: Exception | None = None) -> Request | None:
        """End a request with its last output: as "error", or without `error` as "abort".

        None if it is not live.
        """
        owner = self.requests.get(request_id)
        if owner is None:
            return None
        owner.error = error or owner.error
        self._end(owner, "abort" if error is None else "error", now)
        return owner.request

    def forget_ended(self) -> None:
        """Break the reference cycle of finished requests and their sequences, which would need the
        garbage collector. Their last output is sent, and the scheduler has no use for them."""

        while self._ended:
            self._ended.pop().sequences.clear()

    def take_iteration_stats(self) -> IterationStats:
        """The statistics since the last call."""
        taken, self._iteration = self._iteration, IterationStats()
        return taken

    def check_empty(self) -> None:
        """Assert the invariants without live requests."""
        assert not self.requests, f"requests left: {list(self.requests)}"
        assert not self._sequences, f"sequences left: {list(self._sequences)}"

    # --- one token ---------------------------------------------------------------------------

    def _take_all(
        self, updates: list[TokenUpdate], now: float, stops: list[Stop]
    ) -> tuple[list[SequenceState], dict[RequestState, None]]:
        """Process all tokens. Returns the sequences with text for a text sink, and the requests
        that need an output."""
        sequences, latencies = self._sequences, self._iteration.inter_token_latencies
        with_text: list[SequenceState] = []
        touched: dict[RequestState, None] = {}  # an ordered set
        # Most rows had their last token in the last step, so their latencies are equal.
        last_step, num_since_last_step, self._step_time = self._step_time, 0, now
        for update in updates:
            seq, token_id, _ = update
            state = sequences.get(seq.seq_id)
            if state is None:  # it stopped at an earlier token of this step
                continue
            last_time, push_plain = state.last_token_time, state.push_plain
            state.last_token_time = now
            state.num_tokens += 1
            if last_time is last_step:
                num_since_last_step += 1
            elif last_time is not None:
                latencies.append(now - last_time)
            else:
                self._count_first_token(state.owner, now)
            if (
                state.text_sink is None
                or push_plain is None
                or seq.status is SequenceStatus.FINISHED
            ):
                self._take(state, update, stops)
                touched[state.owner] = None
                continue
            try:
                state.new_text += push_plain(token_id)
            except Exception as error:  # as in _take
                self._fail(state, error, stops)
                touched[state.owner] = None
                continue
            if not state.num_new_tokens:
                with_text.append(state)
            state.num_new_tokens += 1
        latencies += [now - last_step] * num_since_last_step
        return with_text, touched

    def _count_first_token(self, owner: RequestState, now: float) -> None:
        """Count a request's first token, of whichever sequence has it first."""
        metrics = owner.request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            if owner.request.parent is not None:  # a beam search's tokens are counted at its end
                self._iteration.num_generation_tokens -= 1
                return
            self._iteration.time_to_first_tokens.append(now - metrics.arrival_time)
            self._iteration.num_prompt_tokens += len(owner.request.prompt_token_ids)
            self._iteration.num_cached_tokens += owner.request.sequences[0].num_cached_tokens

    def _take(self, state: SequenceState, update: TokenUpdate, stops: list[Stop]) -> None:
        """Add a token to its request's delta, and finish the sequence if it ends."""
        seq, token_id, _ = update
        finished = seq.status is SequenceStatus.FINISHED
        is_last = finished and state.num_tokens == seq.num_output_tokens
        try:
            repeats = state.repetition is not None and state.repetition.push(token_id)
            if state.push_plain is not None and not is_last and not repeats:
                state.add_token(state.push_plain(token_id), update)
                return
            shown = None if is_last and hides_last_token(seq) else token_id
            text, stop_reason = state.text.push(shown, is_last or repeats)
            delta = state.add_token(text, update)
        except Exception as error:  # only this request is affected
            self._fail(state, error, stops)
            return
        if repeats and not is_last:
            stop_reason = stop_reason or REPETITION_STOP_REASON
        if stop_reason is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop_reason
            self._finish(state, delta)
            if not finished:
                stops.append((seq, "stop", stop_reason))
        elif is_last:
            assert seq.finish_reason is not None, f"sequence {seq.seq_id} ended for no reason"
            delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
            self._finish(state, delta)

    def _fail(self, state: SequenceState, error: Exception, stops: list[Stop]) -> None:
        state.owner.error = _failed(state.owner, "output", error)
        self._end_sequence(state, "", "error")
        if state.seq.status is not SequenceStatus.FINISHED:
            stops.append((state.seq, "error", None))

    # --- ends of sequences and requests -------------------------------------------------------

    def _finish(self, state: SequenceState, delta: CompletionOutput) -> None:
        """Forget a sequence. `delta`, its last one, has the finish reason."""
        owner, seq = state.owner, state.seq
        del self._sequences[seq.seq_id]
        owner.num_live -= 1
        owner.num_generated += state.num_tokens
        if state.text_sink is not None:
            owner.request.metrics.last_token_time = state.last_token_time
        if seq.index == 0:
            assert delta.finish_reason is not None
            owner.first_reason, owner.num_first_generated = delta.finish_reason, state.num_tokens

    def _end_sequence(self, state: SequenceState, text: str, reason: FinishReason) -> None:
        """End a sequence without a token."""
        delta = state.add_text(text)
        delta.finish_reason = reason
        self._finish(state, delta)

    def _end(self, owner: RequestState, reason: FinishReason, now: float) -> None:
        """End the unfinished sequences of a request."""
        for seq in owner.request.sequences:
            state = self._sequences.get(seq.seq_id)
            if state is not None:
                try:
                    held = state.text.close()
                except Exception:  # the sequence ends anyway
                    logger.exception("request %s: output failed", owner.request.request_id)
                    held = ""
                self._end_sequence(state, held, reason)
        try:
            self._emit(owner, now)
        except Exception:  # the caller may have more requests to end
            logger.exception("request %s: its sink failed", owner.request.request_id)

    def _emit_all(
        self,
        with_text: list[SequenceState],
        touched: dict[RequestState, None],
        now: float,
        stops: list[Stop],
    ) -> None:
        for state in with_text:
            text, num_tokens = state.new_text, state.num_new_tokens
            state.new_text, state.num_new_tokens = "", 0
            if state.text_sink is not None:
                try:
                    state.text_sink(text, num_tokens)
                except Exception as error:
                    touched.pop(state.owner, None)
                    self._lose(state.owner, error, now, stops)
        for owner in touched:
            try:
                self._emit(owner, now)
            except Exception as error:
                self._lose(owner, error, now, stops)

    def _lose(self, owner: RequestState, error: Exception, now: float, stops: list[Stop]) -> None:
        """End a request whose sink failed."""
        failed = _failed(owner, "its sink", error)
        if owner.request.request_id in self.requests:  # else this was its last output
            live = [seq for seq in owner.request.sequences if seq.seq_id in self._sequences]
            stops += [(seq, "error", None) for seq in live]
            owner.error = failed
            self._end(owner, "error", now)

    def _emit(self, owner: RequestState, now: float) -> None:
        if owner.deltas and owner.deltas[0].token_ids:
            owner.request.metrics.last_token_time = now
        output = owner.take_output(now)
        if output.finished:
            del self.requests[output.request_id]
            if owner.request.parent is None:
                self._iteration.finished.append(owner.stats())
            self._ended.append(owner.request)
        elif owner.text_sink is not None:  # after the first token only text is sent
            (seq,) = owner.request.sequences
            self._sequences[seq.seq_id].text_sink = owner.text_sink
        owner.sink(output)


def _failed(owner: RequestState, what: str, error: Exception) -> RequestFailedError:
    name = owner.request.request_id
    logger.error("request %s: %s failed", name, what, exc_info=error)
    return RequestFailedError(f"request {name}: output failed: {type(error).__name__}: {error}")

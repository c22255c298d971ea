"""The text of one sequence, token by token: detokenised, then searched for stop strings."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.engine.text.detokenizer import Detokenizer, NoDetokenizer
from asyncllm.engine.text.stop_checker import StopChecker, StopStrings
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.types import Request, Sequence


class SequenceText:
    """Call `push` for each token, the last one with `is_last`, or else `close` at the end.

    Without stop strings, `push` is the detokenizer's method itself, which saves a call per token, a
    tenth of its cost.
    """

    __slots__ = ("_detokenizer", "_stops", "push_plain")

    def __init__(self, detokenizer: Detokenizer, stops: StopChecker | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.push_plain: Callable[[int], str] | None = detokenizer.push if stops is None else None

    def push(self, token_id: int | None, is_last: bool) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that ended it, or None.

        token_id: None for a token without text that counts, such as EOS.
        """
        delta = "" if token_id is None else self._detokenizer.push(token_id)
        if is_last:
            delta += self._detokenizer.flush()
        if self._stops is None:
            return delta, None
        text, stop = self._stops.push(delta)
        if is_last and stop is None:
            text += self._stops.flush()
        return text, stop

    def close(self) -> str:
        """The text held back, for a sequence that ends without a last token."""
        held = self._stops.flush() if self._stops is not None else ""
        return held + self._detokenizer.flush()


def sequence_text(
    request: Request, tokenizer: Tokenizer | None, stops: StopStrings
) -> SequenceText:
    """For one sequence of a request; all its sequences share `stops`."""
    params = request.sampling_params
    if not params.detokenize:
        return SequenceText(NoDetokenizer(), None)
    assert tokenizer is not None, f"request {request.request_id} needs a tokenizer"
    detokenizer = tokenizer.detokenizer(
        request.prompt_token_ids,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
    )
    if not stops.strings:
        return SequenceText(detokenizer, None)
    checker = StopChecker(stops, params.include_stop_str_in_output, params.min_tokens)
    return SequenceText(detokenizer, checker)


def hides_last_token(seq: Sequence) -> bool:
    """Whether it ended with a token (EOS or a stop token) whose text is not returned."""
    params = seq.request.sampling_params
    return seq.finish_reason == "stop" and not params.include_stop_str_in_output

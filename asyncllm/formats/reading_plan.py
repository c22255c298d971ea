"""The markers that parsers search for, made once per model, as a parser is made per choice."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.formats.answer_format import AnswerFormat, CallSyntax, Markers
from asyncllm.formats.text_markers import TextMarkers

MIN_STRAY_CHARS = 4


@dataclass(frozen=True, slots=True)
class Beginning:
    """The markers that precede a syntax's first body."""

    words: Markers
    syntax: CallSyntax


class ReadingPlan:
    """reads_calls: whether tools may be called. special_tokens: the texts of special tokens that
    occur in the text and are removed.
    """

    def __init__(
        self, answer_format: AnswerFormat, special_tokens: frozenset[str], reads_calls: bool
    ) -> None:
        calls = [call.without_spaces() for call in answer_format.calls if reads_calls]
        beginnings = [Beginning(words, call) for call in calls for words in call.beginnings]
        self.format = answer_format
        self.at_start = [b for b in beginnings if b.syntax.at_start]
        self.by_trigger: dict[str, list[Beginning]] = {}
        for beginning in beginnings:
            if not beginning.syntax.at_start:
                self.by_trigger.setdefault(beginning.words[0], []).append(beginning)
        self.noise = {*answer_format.noise, *special_tokens} - self.by_trigger.keys()
        ends = {word for call in calls for word in stray_ends(call)}
        self.content_markers = TextMarkers(self.by_trigger.keys() | self.noise | ends)
        marks = answer_format.reasoning
        ending = {marks.end} if marks else set()
        if answer_format.calls_end_reasoning:
            ending |= self.by_trigger.keys()
        self.reasoning_markers = TextMarkers(ending | self.noise)
        self.ends_reasoning = ending


def stray_ends(call: CallSyntax) -> set[str]:
    """Texts that may remain of an incomplete call; single brackets may be content."""
    return {word for word in call.ends if len(word) >= MIN_STRAY_CHARS}

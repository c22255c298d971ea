"""A format with the special tokens of a model's tokenizer, which makes parsers for the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from asyncllm.formats.answer_format import AnswerFormat, ReasoningMarks
from asyncllm.formats.call_grammar import call_grammar
from asyncllm.formats.events import AnswerParser
from asyncllm.formats.parser import FormatParser
from asyncllm.formats.reading_plan import ReadingPlan
from asyncllm.formats.tools import Tool, ToolChoice

MAX_TAIL_CHARS = 1024  # at the end of a prompt, searched for the last marker


@dataclass(frozen=True)
class ModelFormat:
    """special_tokens: the tokenizer's, text to id, if some are markers of the format.

    Then the text must be decoded with `skip_special_tokens=False` (`keeps_special_tokens`), and the
    parser removes special tokens that are no markers.
    """

    format: AnswerFormat
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def keeps_special_tokens(self) -> bool:
        return bool(self.special_tokens)

    @property
    def reads_calls(self) -> bool:
        return bool(self.format.calls or self.format.channels)

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """The markers of reasoning, to count its tokens; None without reasoning."""
        return self.format.reasoning

    def parser(
        self,
        tools: Sequence[Tool] = (),
        prompt: str = "",
        prefix: str = "",
        only_these: bool = False,
    ) -> AnswerParser:
        """A parser for one choice.

        tools: those that may be called; without any, calls are text. only_these: marked calls of
        other names are text, too. prompt: the rendered prompt, or its end. prefix: the part of the
        prompt that belongs to the answer, if a final message is continued.
        """
        schemas = {tool.name: tool.parameters for tool in tools}
        is_open = self.is_reasoning_open(prompt, prefix)
        plan = self._plan if tools else self._plan_without_calls
        return FormatParser(plan, schemas, is_open, takes_unknown=bool(tools) and not only_these)

    @cached_property
    def _plan(self) -> ReadingPlan:
        return ReadingPlan(self.format, frozenset(self.special_tokens), reads_calls=True)

    @cached_property
    def _plan_without_calls(self) -> ReadingPlan:
        return ReadingPlan(self.format, frozenset(self.special_tokens), reads_calls=False)

    def call_grammar(self, choice: ToolChoice, parallel: bool = True) -> str | None:
        """A Lark grammar of the text after the reasoning; None if any text is allowed.

        With channels, it includes the reasoning. Calls of required or strict
        tools are written in the model's syntax. Raises `InvalidRequestError` naming the tool.
        """
        return call_grammar(self.format, choice, self.special_tokens, parallel)

    def is_reasoning_open(self, prompt: str, prefix: str = "") -> bool:
        """Whether the output continues reasoning that the prompt began."""
        marks = self.format.reasoning
        if marks is None:
            return False
        if marks.begin in prefix or marks.end in prefix:
            return prefix.rfind(marks.begin) > prefix.rfind(marks.end)
        end = prompt[-MAX_TAIL_CHARS:].rstrip()
        if end.endswith(marks.begin.rstrip()):
            return True
        return marks.assumed and not prefix and not end.endswith(marks.end)

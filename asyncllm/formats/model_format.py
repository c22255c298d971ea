"""A format with the special tokens of a model's tokenizer: the server gets parsers from it."""

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

MAX_TAIL_CHARS = 1024  # of a prompt, in which its last marker is looked for


@dataclass(frozen=True)
class ModelFormat:
    """`special_tokens`: the tokenizer's, text to id, if markers of the format are among them.

    Then the text must be made with `skip_special_tokens=False` (`keeps_special_tokens`); the
    parser removes those that are no markers.
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
        """The markers of reasoning, for counting its tokens; None: it has none."""
        return self.format.reasoning

    def parser(
        self,
        tools: Sequence[Tool] = (),
        prompt: str = "",
        prefix: str = "",
        only_these: bool = False,
    ) -> AnswerParser:
        """A parser for one choice.

        `tools`: those that may be called; without any, text that looks like a call is text.
        `only_these`: and so is a marked call of another name. `prompt`: as rendered, or its end.
        `prefix`: the part of it that the model had written itself, where a final message is
        continued.
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
        """A Lark grammar of what may be written after the reasoning; None where anything may.

        (With channels the reasoning is part of it: `grammar_reasons`.) A tool that is required or
        strict is called as this model writes calls. Raises `InvalidRequestError` naming the tool.
        """
        return call_grammar(self.format, choice, self.special_tokens, parallel)

    @property
    def grammar_reasons(self) -> bool:
        return self.format.channels is not None

    def is_reasoning_open(self, prompt: str, prefix: str = "") -> bool:
        """Return whether the output continues the reasoning that its prompt began."""
        marks = self.format.reasoning
        if marks is None:
            return False
        if marks.begin in prefix or marks.end in prefix:
            return prefix.rfind(marks.begin) > prefix.rfind(marks.end)
        end = prompt[-MAX_TAIL_CHARS:].rstrip()
        if end.endswith(marks.begin.rstrip()):
            return True
        return marks.assumed and not prefix and not end.endswith(marks.end)

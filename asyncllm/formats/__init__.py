"""The formats of reasoning and tool calls by model family, and their streaming parsers.

`resolve` finds a model's format; its `parser` reads one answer.
"""

from asyncllm.formats.detection import resolve
from asyncllm.formats.model_format import ModelFormat

__all__ = ["ModelFormat", "resolve"]

"""How families of models write reasoning and tool calls, and how that is read as it streams.

`resolve` finds a model's format; its `parser` reads one answer.
"""

from asyncllm.formats.detection import resolve
from asyncllm.formats.model_format import ModelFormat

__all__ = ["ModelFormat", "resolve"]

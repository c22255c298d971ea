"""The text that the built-in model learns: a seeded generator of short chat dialogues.

Every answer is a function of the conversation before it. Nothing in an answer is drawn at random,
so a trained model has one right next token everywhere, wide margins between the first and the
second, and tests may compare its greedy tokens across implementations.

Standard library only: no tokenizer, no tensor. Reading order: turn (what is held out), sums, facts,
stories, copies, tools (the kinds), conversation (how turns become a dialogue), chatml (its text).
"""

from .chatml import THINK_PROMPT, TOOLS_AFTER, TOOLS_BEFORE, Example, Message, segments
from .conversation import (
    KINDS,
    WEIGHTS,
    example,
    held_out_examples,
    plain_document,
    training_examples,
)
from .turn import Turn, is_held_out

__all__ = [
    "KINDS",
    "THINK_PROMPT",
    "TOOLS_AFTER",
    "TOOLS_BEFORE",
    "WEIGHTS",
    "Example",
    "Message",
    "Turn",
    "example",
    "held_out_examples",
    "is_held_out",
    "plain_document",
    "segments",
    "training_examples",
]

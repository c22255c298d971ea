"""Tokenizer and chat template of the built-in model.

A byte-level BPE with single digits (sums are learnt digit by digit) and a ChatML template with
tools in the Hermes format. The template says in Jinja what `tiny_text.segments` says in Python;
`check_template` compares the two. Files are written by hand rather than by `save_pretrained`, so
that they do not depend on the version of transformers that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny_text import THINK_PROMPT, TOOLS_AFTER, TOOLS_BEFORE, Example, segments
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
END_OF_TEXT, START, END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, START, END, PAD]  # ids 0 to 3
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"]
# Qwen2's split: a word takes the space before it, digits stand alone, newlines end a piece.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _quoted(text: str) -> str:
    """A Jinja string literal."""
    return "'" + text.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "\\'") + "'"


CHAT_TEMPLATE = (
    r"""
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set unthinking = enable_thinking is defined and enable_thinking is false -%}
{%- set ns = namespace(system='', last_query=-1) -%}
{%- set rest = messages -%}
{%- if messages[0].role in ['system', 'developer'] -%}
  {%- set ns.system = text(messages[0].content) -%}
  {%- set rest = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
  {%- set ns.system = ns.system ~ ('\n\n' if ns.system else '') ~ TOOLS_BEFORE -%}
  {%- for tool in tools -%}
    {%- set ns.system = ns.system ~ '\n' ~ (tool | tojson) -%}
  {%- endfor -%}
  {%- set ns.system = ns.system ~ TOOLS_AFTER -%}
{%- endif -%}
{%- if enable_thinking is defined and enable_thinking -%}
  {%- set ns.system = ns.system ~ ('\n\n' if ns.system else '') ~ THINK_PROMPT -%}
{%- endif -%}
{%- if ns.system -%}
  {{- '<|im_start|>system\n' ~ ns.system ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in rest -%}
  {%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in rest -%}
  {%- set content = text(message.content) -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content or message.reasoning or '' -%}
    {%- if not thought and '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if thought and loop.index0 > ns.last_query -%}
      {{- '<think>\n' ~ thought ~ '\n</think>\n\n' -}}
    {%- elif loop.last and unthinking -%}
      {{- '<think>\n\n</think>\n\n' -}}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\n' if content or not loop.first -}}
      {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>tool' -}}{%- endif -%}
    {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if unthinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".strip()
    .replace("TOOLS_BEFORE", _quoted(TOOLS_BEFORE))
    .replace("TOOLS_AFTER", _quoted(TOOLS_AFTER))
    .replace("THINK_PROMPT", _quoted(THINK_PROMPT))
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A BPE of exactly `VOCAB_SIZE` tokens: specials first, the marks last.

    Raises ValueError where the text is too small for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens learnt, {VOCAB_SIZE} wanted")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END_OF_TEXT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def render_prompt(tokenizer: Any, shown: Example) -> str:
    """Renders all messages before the last by the chat template: the prompt of its answer.

    tokenizer: one of transformers, with the chat template.
    """
    return tokenizer.apply_chat_template(
        shown.messages[:-1], add_generation_prompt=True, **template_arguments(shown)
    )


def template_arguments(shown: Example) -> dict[str, Any]:
    """Keyword arguments of apply_chat_template for this example."""
    arguments: dict[str, Any] = {"tools": shown.tools or None, "tokenize": False}
    if shown.thinking is not None:
        arguments["enable_thinking"] = shown.thinking
    return arguments


def check_template(tokenizer: Any, examples: Iterable[Example]) -> None:
    """Raise ValueError where the chat template and `segments` disagree, in text or in tokens."""
    for shown in examples:
        pieces = [text for text, _ in segments(shown)]
        rendered = tokenizer.apply_chat_template(shown.messages, **template_arguments(shown))
        if rendered != "".join(pieces):
            raise ValueError(f"rendered as\n{rendered}\ntrained as\n{''.join(pieces)}")
        if not rendered.startswith(prompt := render_prompt(tokenizer, shown)):
            raise ValueError(f"the prompt is no prefix:\n{prompt}\nof\n{rendered}")
        whole = tokenizer.encode(rendered, add_special_tokens=False)
        parts = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        if whole != [token for part in parts for token in part]:
            raise ValueError(f"tokens of the pieces differ from those of\n{rendered}")

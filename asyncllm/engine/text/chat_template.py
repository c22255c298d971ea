"""A model's chat template, which renders messages as the text that the model was trained on.

transformers renders it in jinja2's immutable sandbox. The text contains its special tokens, so it
must be encoded with `add_special_tokens=False`. A template is a program and may raise anything; the
error is reported to the client that sent the messages.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from asyncllm.config import ContentFormat
from asyncllm.engine.text.chat_messages import PARAM as MESSAGES_PARAM
from asyncllm.engine.text.chat_messages import ChatMessage, normalize_messages
from asyncllm.engine.text.content_format import detect_content_format
from asyncllm.engine.text.render_limit import RenderTimeoutError, limited
from asyncllm.errors import InvalidRequestError, ModelLoadError, one_line
from asyncllm.formats.tools import MAX_TOOLS

MAX_DOCUMENTS = 1024  # of a chat, for templates that take them
MAX_ERROR_CHARS = 500  # of a template's error, which may quote the whole chat
# Arguments that `render` sets itself, or with which transformers would do more than render.
RESERVED_KWARGS = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    "messages",
} - {"documents", "kwargs"}


class ChatTemplate:
    """`own` replaces the template of the tokenizer `hf`; both may be missing."""

    def __init__(
        self, hf: PreTrainedTokenizerBase, own: str | None, content_format: ContentFormat
    ) -> None:
        self._hf = hf
        self._own = own
        self._content_format = content_format

    @property
    def source(self) -> str | dict[str, str] | None:
        """Its Jinja text; if there are several templates, their texts by name."""
        return self._own or self._hf.chat_template

    @property
    def text(self) -> str:
        """Its Jinja text, or those of all templates joined; "" without a template."""
        source = self.source or ""
        return source if isinstance(source, str) else "\n".join(source.values())

    def check_compiles(self) -> None:
        """Raise `ModelLoadError` for a syntax error; other errors depend on the messages."""
        try:
            self.render([{"role": "user", "content": "?"}])
        except InvalidRequestError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ModelLoadError(f"chat template: {one_line(error.__cause__)}") from error

    def render(
        self,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The rendered prompt. Raises `InvalidRequestError`.

        `chat_template` replaces this template. It is a program, so it must come from a trusted
        client.
        """
        kwargs = template_kwargs or {}
        _check_arguments(tools, kwargs)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        if not (chat_template or self.source):
            raise InvalidRequestError(
                "this model has no chat template; start with --chat-template, or send a prompt",
                MESSAGES_PARAM,
            )
        conversation = normalize_messages(messages, self._takes_parts(chat_template))
        render = partial(
            self._hf.apply_chat_template,
            conversation,
            tools=tools or None,
            chat_template=chat_template or self._own,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **kwargs,
        )
        try:
            return limited(render)
        except RenderTimeoutError:
            raise InvalidRequestError(
                "the chat template takes too long for these messages", MESSAGES_PARAM
            ) from None
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template does not accept these messages: {error!s:.{MAX_ERROR_CHARS}}",
                MESSAGES_PARAM,
            ) from error

    def _takes_parts(self, chat_template: str | None) -> bool:
        if self._content_format == "auto":
            return detect_content_format(chat_template or self.text) == "openai"
        return self._content_format == "openai"


def _check_arguments(tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> None:
    reserved = sorted(RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"{len(tools)} tools, at most {MAX_TOOLS}", "tools")
    documents = kwargs.get("documents")
    if isinstance(documents, list) and len(documents) > MAX_DOCUMENTS:
        raise InvalidRequestError(
            f"{len(documents)} documents, at most {MAX_DOCUMENTS}", "documents"
        )


def read_chat_template(template: str) -> str:
    """The Jinja text of `template`, which is a file name or the text itself."""
    path = Path(template)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no valid name, or not readable
        if not _looks_like_jinja(template):
            raise ModelLoadError(f"chat template {template!r}: {error}") from error
    if not _looks_like_jinja(template):
        raise ModelLoadError(f"chat template {template!r} is neither a file nor a Jinja template")
    return template


def _looks_like_jinja(text: str) -> bool:
    return any(mark in text for mark in "{}\n")

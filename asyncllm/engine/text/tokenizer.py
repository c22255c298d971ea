"""The tokenizer of a model folder: encodes and decodes text, and renders chat messages.

transformers loads it and renders its chat template. Encoding and decoding call the underlying
`tokenizers` object, which is several times faster. The limits of models and requests are checked
elsewhere.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from asyncllm.config import ContentFormat
from asyncllm.engine.text.chat_template import ChatTemplate, read_chat_template
from asyncllm.engine.text.detokenizer import Detokenizer, TableDetokenizer, WindowDetokenizer
from asyncllm.engine.text.hf_tokenizer import load_hf_tokenizer
from asyncllm.engine.text.split_pattern import split_pattern
from asyncllm.engine.text.token_pieces import as_bytes, build_token_pieces
from asyncllm.errors import InvalidRequestError, ModelLoadError, one_line
from asyncllm.hub.files import VOCABULARY_FILES

# Arguments of a tokenizer with paths, or about how it was loaded.
_HOW_LOADED = {
    "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "name_or_path", "cache_dir",
    "chat_template_file", "added_tokens_file", "special_tokens_map_file", "is_local",
    "local_files_only", "backend",
}  # fmt: skip
LARGE_TEXT_CHARS = 4_000  # longer texts take milliseconds: encoded in a thread, without offsets


class Tokenizer:
    """One tokenizer, shared by all requests. It is immutable, and threads may encode with it."""

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        content_format: ContentFormat = "auto",
    ) -> None:
        raw: RawTokenizer = hf.backend_tokenizer
        raw.no_padding()  # tokenizer.json may enable them
        raw.no_truncation()
        self._hf = hf
        self._raw = raw
        self._chat = ChatTemplate(hf, chat_template, content_format)
        self.render_chat = self._chat.render
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        self._tokens = _tokens_by_id(raw, self._added)
        self.vocab_size = len(self._tokens)  # the highest id + 1; ids may be missing
        self.special_ids = frozenset(
            i for i, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id: int | None = hf.bos_token_id
        eos = hf.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.max_chars_per_token = max(len(token or "") for token in self._tokens)
        self._pieces = build_token_pieces(raw, self._tokens, self.special_ids)

    @property
    def chat_template(self) -> str:
        """The template's Jinja text, or those of all templates joined; "" without a template."""
        return self._chat.text

    @property
    def response_template(self) -> object:
        """transformers' description of the format of answers, if the folder has it."""
        return getattr(self._hf, "response_template", None)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that `skip_special_tokens` leaves out: text -> id."""
        return {self._added[i]: i for i in sorted(self.special_ids)}

    @property
    def added_texts(self) -> list[str]:
        """The added tokens that are not special. They are tokens wherever they occur in a text."""
        return [text for i, text in self._added.items() if i not in self.special_ids]

    @property
    def split_pattern(self) -> str | None:
        """The pattern by which a byte-level BPE splits texts; None for other tokenizers."""
        return split_pattern(self._raw)

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        chat_template: str | None = None,
        content_format: ContentFormat = "auto",
    ) -> Tokenizer:
        """Load a folder. `chat_template` (a file or the text) replaces the folder's template.

        Raises `ModelLoadError` naming the file.
        """
        path = Path(path)
        if not any((path / name).is_file() for name in VOCABULARY_FILES):
            raise ModelLoadError(f"{path / 'tokenizer.json'} is missing: no tokenizer to load")
        template = None if chat_template is None else read_chat_template(chat_template)
        try:
            hf = load_hf_tokenizer(path)
        except Exception as error:  # the library raises bare Exception for a broken file
            raise ModelLoadError(f"{_blamed_file(path)}: {one_line(error)}") from error
        if not hf.is_fast:
            raise ModelLoadError(f"{_vocabulary_file(path)}: no fast tokenizer for {type(hf)}")
        tokenizer = cls(hf, template, content_format)
        if template is not None:
            tokenizer._chat.check_compiles()
        return tokenizer

    def info(self) -> dict[str, Any]:
        """tokenizer_config.json as it was loaded, with the class and template that are used.

        It has JSON values only, and no paths.
        """
        given = {k: v for k, v in self._hf.init_kwargs.items() if k not in _HOW_LOADED}
        info = json.loads(json.dumps(given, default=str), parse_int=_bounded)
        info["tokenizer_class"] = type(self._hf).__name__
        if self._chat.source is not None:
            info["chat_template"] = self._chat.source
        return info

    # --- ids and text ------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Raises `InvalidRequestError` for lone surrogates."""
        try:
            if len(text) < LARGE_TEXT_CHARS:
                return self._raw.encode(text, add_special_tokens=add_special_tokens).ids
            batch = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        except TypeError:
            raise InvalidRequestError("the text is not valid Unicode", "prompt") from None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self._pieces is not None:
            return self._pieces.decode(ids, skip_special_tokens)
        return self._raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The token's text with its leading space; U+FFFD for a part of a character."""
        if self._pieces is None:
            return self._raw.decode([token_id], skip_special_tokens=False)
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it ("Ġis"); "" for an unknown id."""
        known = self._tokens[token_id] if token_id < len(self._tokens) else None
        return known or ""

    @property
    def has_token_bytes(self) -> bool:
        """Whether the text of tokens is their bytes, joined."""
        return self._pieces is not None

    def token_bytes(self, token_id: int) -> bytes:
        if self._pieces is None:
            return self.token_text(token_id).encode()
        return as_bytes(self._pieces.shown[token_id]) if token_id < self.vocab_size else b""

    def detokenizer(
        self,
        prompt_ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A fresh incremental detokenizer for what follows `prompt_ids`.

        `spaces_between_special_tokens` matters to decoders that separate tokens, a few old ones.
        """
        if self._pieces is not None:
            return TableDetokenizer(self._pieces, prompt_ids, skip_special_tokens)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            decode=partial(self._raw.decode, skip_special_tokens=skip_special_tokens),
            is_shown=lambda i: i not in hidden and self._has_token(i),
            prompt_ids=prompt_ids,
            unspaced={} if skip_special_tokens or spaces_between_special_tokens else self._added,
        )

    def _has_token(self, token_id: int) -> bool:
        return token_id < self.vocab_size and self._tokens[token_id] is not None


def _bounded(digits: str) -> int | float:
    """transformers writes 10**30 for "no limit", which few readers of JSON take for an integer."""
    number = int(digits)
    return number if number < 2**63 else float(number)


def _blamed_file(path: Path) -> Path:
    """The file that a failed load is about: the first that is no JSON, else the vocabulary."""
    for file in sorted(path.glob("*token*.json")):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return file
    return _vocabulary_file(path)


def _vocabulary_file(path: Path) -> Path:
    return next(path / name for name in VOCABULARY_FILES if (path / name).is_file())


def _tokens_by_id(raw: RawTokenizer, added: dict[int, str]) -> list[str | None]:
    """Tokens as the vocabulary spells them; an added token hides the model's of the same id."""
    size = raw.get_vocab_size(with_added_tokens=True)
    if size and raw.id_to_token(size - 1) is not None:
        tokens = list(map(raw.id_to_token, range(size)))  # in two thirds of a mapping's time
        if None not in tokens:  # as many as there are: no id is higher
            return tokens
    ids = raw.get_vocab(with_added_tokens=True)
    tokens = [None] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    for token_id, content in added.items():
        tokens[token_id] = content
    return tokens

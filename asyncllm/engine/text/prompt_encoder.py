"""Renders, encodes and truncates a parsed prompt, and checks its token ids.

It has no mutable state, so it may run in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncllm.engine.text.prompt import ParsedPrompt
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import ContextLengthError, InvalidRequestError
from asyncllm.sampling_params import SamplingParams

NO_TOKENIZER = (
    "this engine has no tokenizer (skip_tokenizer_init): send token ids, with detokenize=False; "
    "over HTTP only /inference/v1/generate does so"
)


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def rendered(self, parsed: ParsedPrompt) -> str:
        """The text that the template renders for chat messages."""
        assert parsed.messages is not None
        return self.tokenizer_for(parsed.param).render_chat(parsed.messages)

    def token_ids(
        self, parsed: ParsedPrompt, text: str | None, params: SamplingParams
    ) -> list[int]:
        """The ids in a new list. Raises `InvalidRequestError`."""
        if parsed.token_ids is not None:
            # Refused before the ids are checked one by one.
            if (
                params.truncate_prompt_tokens is None
                and len(parsed.token_ids) > self._max_model_len
            ):
                raise self._too_many(parsed, len(parsed.token_ids))
            ids = list(parsed.token_ids)
        else:
            assert text is not None, "a parsed prompt is ids or has a text"
            self._check_num_chars(parsed, text, params)
            # A chat template writes the special tokens itself.
            add_special_tokens = parsed.add_special_tokens and parsed.messages is None
            ids = self.encode(text, add_special_tokens, parsed.param)
        if params.truncate_prompt_tokens is not None:
            ids = self._truncate(ids, params, params.truncate_prompt_tokens)
        if not ids:
            raise InvalidRequestError(f"the {parsed.noun} must not be empty", parsed.param)
        self.check_ids(ids, parsed.param)
        return ids

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        tokenizer = self.tokenizer_for(param)
        try:
            return tokenizer.encode(text, add_special_tokens)
        except InvalidRequestError as error:
            error.param = param
            raise

    def tokenizer_for(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param)
        return self._tokenizer

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of forbidden words.

        A word is forbidden in all places: inside a text without a space before it, at the beginning
        of a text, and after a space. Raises `InvalidRequestError`.
        """
        found: dict[tuple[int, ...], None] = {}  # an ordered set
        for word in words:
            spellings = self._spellings(word.lstrip() or word)
            if not all(spellings):
                raise InvalidRequestError(f"bad_words: {word!r} has no tokens", "bad_words")
            # A sequence that ends with a forbidden one is forbidden already.
            for ids in spellings:
                if not any(ids != end and ids[-len(end) :] == end for end in spellings):
                    found[ids] = None
        for ids in found:
            self.check_ids(ids, "bad_words")
        return tuple(found)

    def _spellings(self, text: str) -> list[tuple[int, ...]]:
        """The text's tokens after a line break, at the beginning of a text, and after a space."""
        # Some tokenizers put a space before every text; with a line break it is not before the
        # word.
        before, *spellings = (
            tuple(self.encode(start, False, "bad_words"))
            for start in ("\n", f"\n{text}", text, f" {text}")
        )
        start, word = spellings[0][: len(before)], spellings[0][len(before) :]
        spellings[0] = word if word and start == before else spellings[1]
        return spellings

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Raise for ids outside the vocabulary, for which the embedding has no row."""
        for extreme in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= extreme < self._vocab_size:
                shown = f"token id {extreme}" if abs(extreme) < 2**63 else "a token id"
                raise InvalidRequestError(
                    f"{param}: {shown} is out of vocabulary: the model has {self._vocab_size}",
                    param,
                )

    def _check_num_chars(self, parsed: ParsedPrompt, text: str, params: SamplingParams) -> None:
        """Refuse a text without encoding it if it would not fit even with the longest tokens."""
        longest = self.tokenizer_for(parsed.param).max_chars_per_token
        if params.truncate_prompt_tokens is None and len(text) > longest * self._max_model_len:
            count = f"{len(text)} characters, at least {len(text) // longest}"
            raise self._too_many(parsed, count)

    def _too_many(self, parsed: ParsedPrompt, count: int | str) -> ContextLengthError:
        """count: of tokens."""
        return ContextLengthError(
            f"This model's maximum context length is {self._max_model_len} tokens. However, "
            f"your {parsed.noun} has {count} tokens. "
            f"Please reduce the length of the {parsed.noun}.",
            parsed.param,
        )

    def _truncate(self, ids: list[int], params: SamplingParams, num_kept: int) -> list[int]:
        """The last or first `num_kept` ids; -1: as many as leave room for the output."""
        if num_kept > self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens ({num_kept}) must be at most the context window "
                f"({self._max_model_len})",
                "truncate_prompt_tokens",
            )
        if num_kept == -1:
            num_kept = max(self._max_model_len - (params.max_tokens or 1), 1)
        return ids[-num_kept:] if params.truncation_side == "left" else ids[:num_kept]

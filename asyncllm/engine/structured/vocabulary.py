"""The tokenizer for llguidance: the bytes of each token, special tokens, tokens that end a text.

It is made once per engine: the library builds a trie of all tokens, which takes 0.5 s for 128k
tokens, with the GIL held. So it is made when the engine has been idle for a while, or for the first
grammar if that comes before. The bytes are those that the detokenizer returns, so a token is
allowed where its text is.

The library tokenizes forced text in the threads that fill masks. If `byte_bpe` supports the
tokenizer, this needs no Python. Otherwise each thread needs the GIL, which the event loop holds,
and a thread state, for which memory is mapped: several times as long as a mask takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from llguidance import LLTokenizer

from asyncllm.engine.structured.byte_bpe import byte_bpe
from asyncllm.engine.text.tokenizer import Tokenizer

SENTINEL = "\x02"  # no tokenizer merges it with the next character


class Vocabulary:
    """special_ids: special tokens by their text, which a grammar names and plain text never gives.

    Its bitmasks have `vocab_size` bits in int32 words, one for each of the model's logits, which
    may be more or fewer than the tokenizer's ids.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        """Raises `ValueError` if no token ends a text, or if the bytes of tokens are not known."""
        if tokenizer is None:
            raise ValueError("this engine has no tokenizer")
        self.eos_ids = tuple(sorted(eos_ids))
        if not self.eos_ids:
            raise ValueError("no token ends a text")
        if not tokenizer.has_token_bytes:
            raise ValueError("this tokenizer's decoder does not join its tokens' bytes")
        self.special_ids = {
            tokenizer.token_text(i): i for i in sorted(tokenizer.special_ids) if i < vocab_size
        }
        self._added_texts = tokenizer.added_texts
        self._words = _Words(tokenizer, vocab_size, self.eos_ids)
        self._making = threading.Lock()
        self._asking: LLTokenizer | None = None
        self._bpe = byte_bpe(tokenizer, self._words.tokens, self.special_ids, self.eos_ids)
        if self._bpe is None:
            self._asking_python()

    def tokenizer_for(self, grammar: str) -> LLTokenizer:
        """For a grammar with the text of an added token, the one that asks Python: texts are split
        at added tokens before BPE."""
        if self._bpe is None or any(text in grammar for text in self._added_texts):
            return self._asking_python()
        return self._bpe

    def prepare(self) -> None:
        """Make what the first grammar with an added token would wait for."""
        if self._added_texts:
            self._asking_python()

    def _asking_python(self) -> LLTokenizer:
        with self._making:
            if self._asking is None:
                self._asking = LLTokenizer(self._words, eos_token=list(self.eos_ids))
                self._words.ll = self._asking
            return self._asking


class _Words:
    """The interface that llguidance requires of a tokenizer."""

    is_tokenizer_wrapper = True
    ll: LLTokenizer

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        # The token_bytes of an unknown id are empty, so it is never allowed.
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in sorted(tokenizer.special_ids) if i < vocab_size]

    def __call__(self, text: str) -> list[int]:
        """The tokens of forced text, as in the middle of a text.

        If the tokenizer finds a special token in it, they are the library's greedy tokens. Some
        tokenizers put a space before a text: it comes before the sentinel, and is cut off with it.
        """
        data = text.encode()
        for sentinel in ("", SENTINEL):
            ids = self._tokenizer.encode(sentinel + text, add_special_tokens=False)
            own = self._last_bytes(ids, len(data))
            is_text = b"".join(self.tokens[i] for i in own) == data
            if is_text and self._tokenizer.special_ids.isdisjoint(own):
                return own
        return self.ll.greedy_tokenize(text)

    def _last_bytes(self, ids: list[int], num_bytes: int) -> list[int]:
        """The fewest last tokens with at least so many bytes."""
        start = len(ids)
        while start and num_bytes > 0:
            start -= 1
            num_bytes -= len(self.tokens[ids[start]])
        return ids[start:]

"""The tokenizer as llguidance wants it: each token's bytes, which are special, which end a text.

Made once per engine: the library builds a trie of all tokens, which takes 0.5 s for 128k of them,
with the GIL held. So it is made when nobody has asked for anything for a while, or for the first
grammar if that comes before.
The bytes are those that the detokenizer shows, so a token may come where its text may.

Where a text is forced, the library asks for its tokens, in the threads that fill masks. It answers
itself where `byte_bpe` can; else it asks Python, for which each thread needs the GIL, which the
loop has, and a thread state, for which it maps memory: several times as long as a mask takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from llguidance import LLTokenizer

from asyncllm.engine.structured.byte_bpe import byte_bpe
from asyncllm.engine.text.tokenizer import Tokenizer

SENTINEL = "\x02"  # nothing that a tokenizer joins with what follows


class Vocabulary:
    """`special_ids`: special tokens by their text, which a grammar names and plain text never is.

    Its bitmasks have `vocab_size` bits, in int32 words: the model's logits, which may be more or
    fewer than the tokenizer's ids.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        """Raises `ValueError` where no token ends a text, or tokens have no bytes of their own."""
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
        """BPE is not all there is to an added token: text is cut around it before all else."""
        if self._bpe is None or any(text in grammar for text in self._added_texts):
            return self._asking_python()
        return self._bpe

    def prepare(self) -> None:
        """Make ahead all that the first grammar with an added token would wait for."""
        if self._added_texts:
            self._asking_python()

    def _asking_python(self) -> LLTokenizer:
        with self._making:
            if self._asking is None:
                self._asking = LLTokenizer(self._words, eos_token=list(self.eos_ids))
                self._words.ll = self._asking
            return self._asking


class _Words:
    """The attributes and the call that llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    ll: LLTokenizer

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        # token_bytes of an id that no token has is empty: such a token never comes.
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in sorted(tokenizer.special_ids) if i < vocab_size]

    def __call__(self, text: str) -> list[int]:
        """Forced text to tokens: as the tokenizer would in the middle of a text, if it can.

        Not where it would see a special token in it, and not with the space that some put before
        a text: those appear in front of the sentinel, which is cut off with it.
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
        """The last of these tokens that make up so many bytes, or as few more as they can."""
        start = len(ids)
        while start and num_bytes > 0:
            start -= 1
            num_bytes -= len(self.tokens[ids[start]])
        return ids[start:]

"""From what a client sent to a `Request` that the scheduler can take: encode, check, count.

The one validator of everything that depends on the model: `SamplingParams` has checked the rest.
Whatever it refuses, it refuses here, before anything is queued, as an `InvalidRequestError` naming
the parameter. Invariant of what comes out: prompt + max_tokens fits the window and the KV cache, and
every token id in it is one of the model's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.generation_defaults import read_generation_defaults
from asyncllm.engine.prompt import ParsedPrompt, PromptInput, TextPrompt, TokensPrompt, parse_prompt
from asyncllm.engine.tokenizer import LARGE_TEXT_CHARS, Tokenizer
from asyncllm.errors import ContextLengthError, InvalidRequestError
from asyncllm.outputs import RequestMetrics
from asyncllm.sampling_params import MAX_SEED, SamplingParams
from asyncllm.types import Request, Sequence

__all__ = ["InputProcessor", "PromptInput", "TextPrompt", "TokensPrompt", "parse_prompt"]

MAX_CACHE_SALT_CHARS = 1024
MAX_TOKENISER_THREADS = 2


class InputProcessor:
    """Makes requests. `tokenizer` may be None: then prompts are token ids and there is no text."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        *,
        max_kv_tokens: int | None = None,
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        """`max_kv_tokens`: what the whole KV cache holds. `seq_ids`: a counter to share.

        Raises `ModelLoadError` for an unusable generation_config.json.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_kv_tokens = max_kv_tokens
        self.generation_defaults = read_generation_defaults(config)
        self._vocab_size = config.model.vocab_size
        self._max_logprobs = config.max_logprobs
        self._dynamic_rope_window = _dynamic_rope_window(config)
        self._eos_token_ids = self._collect_eos_ids(config)
        self._seq_ids = seq_ids or itertools.count(1)
        self._seeds = random.Random(config.seed)
        self._threads: ThreadPoolExecutor | None = None

    def default_params(self, overrides: dict[str, Any]) -> SamplingParams:
        """`SamplingParams` of what a request sets; the model's defaults fill what it omits.

        A None means omitted, except for max_tokens, where it means the rest of the window (or the
        model's own default, if it has one). Raises `InvalidRequestError`.
        """
        values = dict(self.generation_defaults.sampling)
        for name, value in overrides.items():
            if value is not None or (name == "max_tokens" and name not in values):
                values[name] = value
        return SamplingParams(**values)

    def process(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """The request with its `n` sequences. Raises `InvalidRequestError`."""
        parsed = parse_prompt(prompt)
        text, add_special_tokens = self._text(parsed)
        ids = self._token_ids(parsed, params, text, add_special_tokens)
        salt = cache_salt or parsed.cache_salt
        return self._build(request_id, parsed, text, ids, params, arrival_time, priority, salt)

    async def process_async(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """`process`, but a large text is encoded in a thread (the library lets go of the GIL)."""
        parsed = parse_prompt(prompt)
        text, add_special_tokens = self._text(parsed)
        if text is None or parsed.token_ids is not None or len(text) < LARGE_TEXT_CHARS:
            ids = self._token_ids(parsed, params, text, add_special_tokens)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(
                self._executor(), self._token_ids, parsed, params, text, add_special_tokens
            )
        salt = cache_salt or parsed.cache_salt
        return self._build(request_id, parsed, text, ids, params, arrival_time, priority, salt)

    def close(self) -> None:
        """Let the encoding threads end, if there are any. It may be used again."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_TOKENISER_THREADS, "asyncllm-tokenizer")
        return self._threads

    # --- the prompt --------------------------------------------------------------------------

    def _text(self, parsed: ParsedPrompt) -> tuple[str | None, bool]:
        """The prompt's text and whether special tokens are still to be added to it."""
        if parsed.messages is None:
            return parsed.text, parsed.add_special_tokens
        return self._need_tokenizer(parsed.param).render_chat(parsed.messages), False

    def _token_ids(
        self, parsed: ParsedPrompt, params: SamplingParams, text: str | None, add_special: bool
    ) -> list[int]:
        """The prompt's ids, truncated if asked. Runs in a thread for a large text."""
        if parsed.token_ids is not None:
            ids = list(parsed.token_ids)
        else:
            assert text is not None, "a parsed prompt is ids or text"
            self._check_num_chars(text, params, parsed)
            ids = self._need_tokenizer(parsed.param).encode(text, add_special)
        ids = self._truncate(ids, params)
        if not ids:
            raise InvalidRequestError(f"the {parsed.noun} must not be empty", parsed.param)
        self._check_ids(ids, parsed.param)
        return ids

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer: send prompt_token_ids, with detokenize=False", param
            )
        return self.tokenizer

    def _check_num_chars(self, text: str, params: SamplingParams, parsed: ParsedPrompt) -> None:
        """Refuse before encoding what cannot fit even if each token were the vocabulary's longest."""
        if params.truncate_prompt_tokens is not None:
            return
        longest = self._need_tokenizer(parsed.param).max_chars_per_token
        if len(text) > longest * self.max_model_len:
            raise ContextLengthError(
                f"{self._window_text()} However, your {parsed.noun} has {len(text)} characters, "
                f"which is at least {len(text) // longest} tokens. "
                f"Please reduce the length of the {parsed.noun}.",
                parsed.param,
            )

    def _truncate(self, ids: list[int], params: SamplingParams) -> list[int]:
        num_kept = params.truncate_prompt_tokens
        if num_kept is None:
            return ids
        if num_kept > self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens ({num_kept}) must be at most the context window "
                f"({self.max_model_len})",
                "truncate_prompt_tokens",
            )
        if num_kept == -1:  # as many as leave room for the output
            num_kept = max(self._max_tokens_in_all() - (params.max_tokens or 1), 1)
        return ids[-num_kept:]

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        for wrong in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= wrong < self._vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {wrong} is not in the model's vocabulary of "
                    f"{self._vocab_size}",
                    param,
                )

    # --- lengths -----------------------------------------------------------------------------

    def _max_tokens_in_all(self) -> int:
        if self.max_kv_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, self.max_kv_tokens)

    def _window_text(self) -> str:
        """The words that clients match on."""
        return f"This model's maximum context length is {self.max_model_len} tokens."

    def _resolve_max_tokens(
        self, num_prompt: int, params: SamplingParams, parsed: ParsedPrompt
    ) -> int:
        """`max_tokens` as a number. Raises `ContextLengthError` where all does not fit."""
        asked, room = params.max_tokens, self._max_tokens_in_all() - num_prompt
        if asked is not None and asked == self.generation_defaults.max_tokens:
            asked = max(min(asked, room), 1)  # the model's wish rather than the client's: it yields
        if (asked or 1) <= room:
            return asked or room
        in_window = num_prompt + (asked or 1) <= self.max_model_len
        limit = (
            f"The KV cache of this server holds at most {self.max_kv_tokens} tokens."
            if in_window
            else self._window_text()
        )
        raise ContextLengthError(
            f"{limit} However, you requested {num_prompt + (asked or 1)} tokens ({num_prompt} in "
            f"the {parsed.noun}, {asked or 1} in the completion). "
            f"Please reduce the length of the {parsed.noun} or completion.",
            "max_tokens" if asked is not None and room > 0 else parsed.param,
        )

    # --- parameters that depend on the model -------------------------------------------------

    def _check_params(self, params: SamplingParams, max_tokens: int) -> None:
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) is more than fits the context window: "
                f"{max_tokens} tokens",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be at most {self._max_logprobs}, got {asked}", name
                )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(getattr(params, name) or (), name)
        if params.detokenize:
            self._need_tokenizer("detokenize")

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids or ())
        return own if params.ignore_eos else own | self._eos_token_ids

    def _collect_eos_ids(self, config: EngineConfig) -> frozenset[int]:
        """What ends a text, by all that speak of it; ids that the model cannot sample left out."""
        of_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        ids = {*config.model.eos_token_ids, *self.generation_defaults.eos_token_ids, *of_tokenizer}
        return frozenset(i for i in ids if 0 <= i < self._vocab_size)

    def _bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word at a text's beginning and after a space, as vLLM does.

        The second counts only where the space is part of the first token: otherwise the first
        already forbids it.
        """
        found: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            tokenizer = self._need_tokenizer("bad_words")
            text = word.lstrip() or word
            plain = tuple(tokenizer.encode(text, add_special_tokens=False))
            spaced = tuple(tokenizer.encode(f" {text}", add_special_tokens=False))
            for ids in (plain, spaced) if _is_variant(plain, spaced) else (plain,):
                self._check_ids(ids, "bad_words")
                found.append(ids)
        return tuple(ids for ids in dict.fromkeys(found) if ids)

    # --- the request -------------------------------------------------------------------------

    def _build(
        self,
        request_id: str,
        parsed: ParsedPrompt,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        if type(priority) is not int:
            raise InvalidRequestError(f"priority must be an integer, got {priority!r}", "priority")
        max_tokens = self._resolve_max_tokens(len(ids), params, parsed)
        self._check_params(params, max_tokens)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            sampling_params=params,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(params),
            metrics=RequestMetrics(arrival_time=arrival_time),
            priority=priority,
            bad_words_ids=self._bad_words_ids(params),
            cache_key=self._cache_key(cache_salt, len(ids)),
        )
        request.sequences = [self._sequence(request, index) for index in range(params.n)]
        return request

    def _sequence(self, request: Request, index: int) -> Sequence:
        seed = request.sampling_params.seed
        return Sequence(
            seq_id=next(self._seq_ids),
            request=request,
            index=index,
            seed=self._seeds.getrandbits(63) if seed is None else (seed + index) & MAX_SEED,
            token_ids=list(request.prompt_token_ids),
        )

    def _cache_key(self, cache_salt: str | None, num_prompt: int) -> bytes:
        """What two requests must share, beside tokens, to share KV: b"" for most."""
        if cache_salt is not None and not 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters long", "cache_salt"
            )
        window = self._dynamic_rope_window
        rope_len = num_prompt if window is not None and num_prompt > window else None
        if cache_salt is None and rope_len is None:
            return b""
        return hashlib.sha256(repr((cache_salt, rope_len)).encode()).digest()


def _is_variant(plain: tuple[int, ...], spaced: tuple[int, ...]) -> bool:
    return len(plain) == len(spaced) and plain[:1] != spaced[:1]


def _dynamic_rope_window(config: EngineConfig) -> int | None:
    """Where rotations begin to depend on the prompt's length; None where they never do."""
    rope = getattr(config.model.hf_config, "rope_parameters", None) or {}
    is_dynamic = rope.get("rope_type") == "dynamic"
    return config.model.max_position_embeddings if is_dynamic else None

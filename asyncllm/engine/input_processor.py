"""Makes a `Request` for the scheduler from a client's prompt and parameters.

It validates all that depends on the model; `SamplingParams` has checked the rest. An invalid
request raises an `InvalidRequestError` naming the parameter, before anything is queued. Invariant
of a `Request`: prompt + max_tokens fits the context window, and all token ids are in the
vocabulary.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from asyncllm.config import EngineConfig
from asyncllm.engine.logprobs import (
    check_output_logprobs,
    check_prompt_logprobs,
    most_output_tokens,
)
from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.prompt import ParsedPrompt, PromptInput, parse_prompt
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.engine.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer
from asyncllm.engine.thinking import ThinkingBudget, reasoning_tokens
from asyncllm.errors import ContextLengthError, InvalidRequestError
from asyncllm.outputs import RequestMetrics
from asyncllm.sampling_limits import MAX_SEED, require
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request, Sequence

MAX_CACHE_SALT_CHARS = 1024
MAX_TOKENIZER_THREADS = 2
MAX_KNOWN_PARAMS = 64  # sampling parameters to cache: most clients send the same ones again


class InputProcessor:
    """Makes requests. Without a `tokenizer` prompts are token ids and outputs have no text."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._defaults = config.generation_defaults
        self._known_params = lru_cache(MAX_KNOWN_PARAMS, typed=True)(self._make_params)
        self._encoder = PromptEncoder(tokenizer, config.model.vocab_size, max_model_len)
        most = config.max_logprobs
        self._max_logprobs = config.model.vocab_size if most == -1 else most
        self._default_max_tokens = config.generation_defaults.max_tokens
        self._vocab_size = config.model.vocab_size
        self._rope_window = _rope_window(config)
        self._eos_token_ids = end_of_text_ids(config, tokenizer)
        self.grammars = GrammarCompiler(
            lambda: Vocabulary(tokenizer, config.model.vocab_size, self._eos_token_ids)
        )
        self._reasoning = reasoning_tokens(config, tokenizer)
        self.seq_ids = itertools.count(1)  # ascending by age, for the scheduling order
        # Data-parallel engines draw different seeds.
        self._seeds = random.Random(config.seed + (config.data_parallel_rank << 64))
        self._threads: ThreadPoolExecutor | None = None

    def default_params(self, overrides: dict[str, Any]) -> SamplingParams:
        """`SamplingParams` with a request's values, and the model's defaults for the others.

        None stands for the default. Without a default, max_tokens None means the rest of the
        context window. The operator's `max_tokens_limit` is the most. The result is cached and
        shared: do not change it.
        Raises `InvalidRequestError`.
        """
        try:
            return self._known_params(**overrides)
        except TypeError:  # a list or a dict cannot be hashed
            return self._make_params(**overrides)

    def _make_params(self, **overrides: Any) -> SamplingParams:
        values = dict(self._defaults.sampling)
        for name, value in overrides.items():
            if value is not None or (name == "max_tokens" and name not in values):
                values[name] = value
        if (limit := self._defaults.max_tokens_limit) is not None:
            values["max_tokens"] = min(values.get("max_tokens") or limit, limit)
        return self.with_counts(SamplingParams(**values))

    def with_counts(self, params: SamplingParams) -> SamplingParams:
        """The parameters with -1 logprobs replaced by the size of the vocabulary."""
        names = ("logprobs", "prompt_logprobs")
        whole: dict[str, Any] = {n: self._vocab_size for n in names if getattr(params, n) == -1}
        return replace(params, **whole) if whole else params

    async def process(
        self,
        request_id: str,
        prompt: PromptInput | ParsedPrompt,
        params: SamplingParams,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """The request with its `n` sequences. Raises `InvalidRequestError`.

        Large texts and grammars are processed in threads, as the libraries release the GIL.
        """
        parsed = parse_prompt(prompt)
        if params.logprobs == -1 or params.prompt_logprobs == -1:
            params = self.with_counts(params)
        text, ids, bad_words = await self.encode(parsed, params)
        wanted = params.structured_outputs
        grammar = None if wanted is None else await self.grammars.compile_async(wanted)
        if type(priority) is not int or abs(priority) >= 2**63:
            raise InvalidRequestError("priority must be a 64-bit integer", "priority")
        max_tokens = self._max_tokens(len(ids), params, parsed)
        self._check_limits(params, len(ids), max_tokens)
        stop_token_ids = self._stop_token_ids(params)
        salt = parsed.cache_salt if cache_salt is None else cache_salt
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            sampling_params=self._with_scores(params, len(stop_token_ids)),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            metrics=RequestMetrics(arrival_time=arrival_time),
            priority=priority,
            bad_words_ids=bad_words,
            cache_key=self._cache_key(salt, len(ids)),
            num_shown_logprobs=params.logprobs,
        )
        request.sequences = [
            self._sequence(request, index, grammar) for index in range(params.num_sequences)
        ]
        if params.thinking_token_budget is not None:
            self._limit_thinking(request, params.thinking_token_budget)
        return request

    def close(self) -> None:
        """End the tokenizer threads. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)

    # --- the request -------------------------------------------------------------------------

    async def encode(
        self, parsed: ParsedPrompt, params: SamplingParams
    ) -> tuple[str | None, list[int], tuple[tuple[int, ...], ...]]:
        """The prompt's text and token ids, and the token ids of each of the `bad_words`.

        Raises `InvalidRequestError`.
        """
        text = parsed.text if parsed.messages is None else self._encoder.rendered(parsed)

        def encode() -> tuple[list[int], tuple[tuple[int, ...], ...]]:
            ids = self._encoder.token_ids(parsed, text, params)
            return ids, self._encoder.bad_words_ids(params.bad_words or ())

        has_text = parsed.token_ids is None or params.bad_words
        if not has_text or _num_chars_to_encode(parsed, text, params) < LARGE_TEXT_CHARS:
            return text, *encode()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_TOKENIZER_THREADS, "asyncllm-tokenizer")
        return text, *await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    def _sequence(self, request: Request, index: int, grammar: CompiledGrammar | None) -> Sequence:
        params, seed = request.sampling_params, request.sampling_params.seed
        return Sequence(
            seq_id=next(self.seq_ids),
            request=request,
            index=index,
            seed=self._seeds.getrandbits(63) if seed is None else (seed + index) & MAX_SEED,
            token_ids=list(request.prompt_token_ids),
            constraint=None if grammar is None else grammar.constraint(params.ignore_eos),
        )

    def _limit_thinking(self, request: Request, budget: int) -> None:
        if self._reasoning is None:
            raise InvalidRequestError(
                "thinking_token_budget: it is not known how this model marks its reasoning",
                "thinking_token_budget",
            )
        ids = request.prompt_token_ids
        num_open = self._reasoning.num_open(ids)
        for seq in request.sequences:
            forcer = ThinkingBudget(self._reasoning, budget, len(ids), num_open)
            seq.forcer = forcer.next_token

    def _cache_key(self, salt: str | None, num_prompt: int) -> bytes:
        """The key that requests must share, besides tokens, to share KV; b"" for most.

        Beyond the original context window, KV depends on the prompt's length with dynamic RoPE, and
        on the fact that it is longer with longrope.
        """
        is_text = isinstance(salt, str)
        if salt is not None and not (is_text and 0 < len(salt) <= MAX_CACHE_SALT_CHARS):
            raise InvalidRequestError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt"
            )
        window = self._rope_window
        beyond = None
        if window is not None and num_prompt > window.num_tokens:
            beyond = num_prompt if window.has_lengths else "beyond"
        if salt is None and beyond is None:
            return b""
        key = repr((salt, beyond))
        return hashlib.sha256(key.encode()).digest()

    # --- parameters that depend on the model -------------------------------------------------

    def _max_tokens(self, num_prompt: int, params: SamplingParams, parsed: ParsedPrompt) -> int:
        """The resolved `max_tokens`. Raises `ContextLengthError` if prompt + max_tokens is too
        long."""
        asked, room = params.max_tokens, self.max_model_len - num_prompt
        most = most_output_tokens(params)
        if asked is not None and asked == self._default_max_tokens:
            asked = max(min(asked, room, most), 1)  # a default, not the client's: it may be cut
        needed = asked or 1
        if needed <= room:
            if needed > most:
                check_output_logprobs(params, needed)  # raises
            return asked or min(room, most)
        raise ContextLengthError(
            f"This model's maximum context length is {self.max_model_len} tokens. "
            f"However, you requested {num_prompt + needed} tokens ({num_prompt} in the "
            f"{parsed.noun}, {needed} in the completion). "
            f"Please reduce the length of the {parsed.noun} or completion.",
            "max_tokens" if asked is not None and room > 0 else parsed.param,
        )

    def _check_limits(self, params: SamplingParams, num_prompt: int, max_tokens: int) -> None:
        """Raises `InvalidRequestError`. max_tokens: resolved."""
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most {max_tokens}, what fits after this prompt, "
                f"got {params.min_tokens}",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None:
                most = f"at most {self._max_logprobs} (-1 asks for {self._vocab_size})"
                require(asked <= self._max_logprobs, name, asked, most)
        if params.prompt_logprobs is not None:
            check_prompt_logprobs(params.prompt_logprobs, num_prompt)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._encoder.check_ids(ids, name)
        if params.detokenize:
            self._encoder.tokenizer_for("detokenize")  # raises where there is none

    def _with_scores(self, params: SamplingParams, num_stop_tokens: int) -> SamplingParams:
        """The parameters with the logprobs that choosing among several answers needs."""
        width = params.num_sequences
        if params.use_beam_search and width + num_stop_tokens > self._vocab_size:
            raise InvalidRequestError(
                f"a beam search of width {width} needs more than the {self._vocab_size} tokens of "
                "this model",
                "n" if params.best_of is None else "best_of",
            )
        if width > params.n or params.use_beam_search:
            return replace(params, logprobs=params.logprobs or 0)
        return params

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """With a grammar EOS is a stop token even with ignore_eos: it comes where no other token is
        allowed."""
        is_ignored = params.ignore_eos and params.structured_outputs is None
        own = self._eos_token_ids if not is_ignored else frozenset()
        return own.union(params.stop_token_ids) if params.stop_token_ids else own


def _num_chars_to_encode(parsed: ParsedPrompt, text: str | None, params: SamplingParams) -> int:
    of_prompt = 0 if parsed.token_ids is not None else len(text or "")
    return of_prompt + sum(map(len, params.bad_words or ()))


def end_of_text_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """EOS token ids by all of the model's files; ids outside the vocabulary are left out."""
    of_tokenizer = tokenizer.eos_token_ids if tokenizer is not None else ()
    of_defaults = config.generation_defaults.eos_token_ids
    ids = {*config.model.eos_token_ids, *of_defaults, *of_tokenizer}
    return frozenset(i for i in ids if 0 <= i < config.model.vocab_size)


class _RopeWindow(NamedTuple):
    """KV of prompts longer than `num_tokens` differs from that of shorter ones. has_lengths: it
    depends on their exact length."""

    num_tokens: int
    has_lengths: bool


def _rope_window(config: EngineConfig) -> _RopeWindow | None:
    """None if RoPE does not depend on the prompt's length."""
    rope = getattr(config.model.hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        return _RopeWindow(config.model.max_position_embeddings, has_lengths=True)
    if rope.get("rope_type") == "longrope":
        return _RopeWindow(rope["original_max_position_embeddings"], has_lengths=False)
    return None

"""How much a request may ask of this model.

The part of validation that needs the prompt's length or knows the model; `SamplingParams` has
checked the rest by itself. Each refusal is an `InvalidRequestError` that names the parameter, the
limit and the value.

Log-probabilities are kept until the request ends, and rendered in one piece. An entry is a token
with its log-probability: the sampled one of each position and the `logprobs` beside it. Kept it
takes 140 bytes with 20 beside it, 340 alone, and about as much again while it is written: so the
entries of MAX_OUTPUT_LOGPROB_ENTRIES take up to 0.3 to 0.8 GB. With 20 beside it that is 49,932
tokens, with 5 more than the windows of most models. Who names no max_tokens gets no more than these
have room for.
"""

from __future__ import annotations

import sys

from asyncllm.config import EngineConfig
from asyncllm.engine.text.prompt import ParsedPrompt
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.errors import ContextLengthError, InvalidRequestError
from asyncllm.sampling_params import SamplingParams

MAX_OUTPUT_LOGPROB_ENTRIES = 2**20
MAX_PROMPT_LOGPROB_ENTRIES = 2**19  # of one answer, which is rendered in one piece


class RequestLimits:
    """Those of one engine."""

    def __init__(self, config: EngineConfig, encoder: PromptEncoder, max_model_len: int) -> None:
        """max_model_len: tokens of prompt and output, no more than the KV cache holds."""
        self._encoder = encoder
        self._max_model_len = max_model_len
        most = config.max_logprobs
        self._max_logprobs = config.model.vocab_size if most == -1 else most
        self._default_max_tokens = config.generation_defaults.max_tokens

    def max_tokens(self, num_prompt: int, params: SamplingParams, parsed: ParsedPrompt) -> int:
        """`max_tokens` as a number. Raises `ContextLengthError` where prompt and it do not fit."""
        asked, room = params.max_tokens, self._max_model_len - num_prompt
        most = most_output_tokens(params)
        if asked is not None and asked == self._default_max_tokens:
            asked = max(min(asked, room, most), 1)  # the model's wish, not the client's: it yields
        needed = asked or 1
        if needed <= room:
            if needed > most:
                check_output_logprobs(params, needed)  # raises
            return asked or min(room, most)
        raise ContextLengthError(
            f"This model's maximum context length is {self._max_model_len} tokens. "
            f"However, you requested {num_prompt + needed} tokens ({num_prompt} in the "
            f"{parsed.noun}, {needed} in the completion). "
            f"Please reduce the length of the {parsed.noun} or completion.",
            "max_tokens" if asked is not None and room > 0 else parsed.param,
        )

    def check(self, params: SamplingParams, num_prompt: int, max_tokens: int) -> None:
        """Raises `InvalidRequestError`. max_tokens: as a number."""
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most {max_tokens}, what fits after this prompt, "
                f"got {params.min_tokens}",
                "min_tokens",
            )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._check_logprobs(params, num_prompt)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._encoder.check_ids(ids, name)
        if params.detokenize:
            self._encoder.tokenizer_for("detokenize")  # raises where there is none

    def _check_logprobs(self, params: SamplingParams, num_prompt: int) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be at most {self._max_logprobs}, got {asked}", name
                )
        if params.prompt_logprobs is not None:
            num_entries = num_prompt * (1 + params.prompt_logprobs)
            if num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
                raise InvalidRequestError(
                    f"prompt_logprobs of this prompt are {num_entries} entries, at most "
                    f"{MAX_PROMPT_LOGPROB_ENTRIES}: ask for fewer, or send less",
                    "prompt_logprobs",
                )


def most_output_tokens(params: SamplingParams, num_requests: int = 1) -> int:
    """Limits each answer of so many requests; `sys.maxsize` where no logprobs are kept."""
    entries = _entries_per_token(params) * num_requests
    return MAX_OUTPUT_LOGPROB_ENTRIES // entries if entries else sys.maxsize


def check_output_logprobs(params: SamplingParams, max_tokens: int, num_requests: int = 1) -> None:
    """Raises `InvalidRequestError` where answers of `max_tokens` could have too many."""
    if max_tokens <= most_output_tokens(params, num_requests):
        return
    num_answers = params.num_sequences * num_requests
    num_entries = _entries_per_token(params) * num_requests * max_tokens
    answers = f"{num_answers} answers" if num_answers > 1 else "an answer"
    name = _param(params)
    raise InvalidRequestError(
        f"{name}: the log-probabilities of {answers} of {max_tokens} tokens are {num_entries} "
        f"entries, at most {MAX_OUTPUT_LOGPROB_ENTRIES}: ask for fewer, or set max_tokens lower",
        name,
    )


def _entries_per_token(params: SamplingParams) -> int:
    """Counts all answers together. To choose among several, each token's own is kept unasked."""
    chooses = params.use_beam_search or (params.best_of or 0) > params.n
    if params.num_logprobs is None and not chooses:
        return 0
    return params.num_sequences * (1 + (params.num_logprobs or 0))


def _param(params: SamplingParams) -> str:
    if params.num_logprobs is not None:
        return "logprob_token_ids" if params.logprob_token_ids else "logprobs"
    return "n" if params.best_of is None else "best_of"

"""How much a request may ask of this model.

The part of validation that needs the prompt's length or knows the model; `SamplingParams` has
checked the rest by itself. Each refusal is an `InvalidRequestError` that names the parameter, the
limit and the value.
"""

from __future__ import annotations

from asyncllm.config import EngineConfig
from asyncllm.engine.logprob_limits import check_output_logprobs, most_output_tokens
from asyncllm.engine.text.prompt import ParsedPrompt
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.errors import ContextLengthError, InvalidRequestError
from asyncllm.sampling_params import SamplingParams

MAX_PROMPT_LOGPROB_ENTRIES = 2**19  # of one answer, which is rendered in one piece


class RequestLimits:
    """Those of one engine."""

    def __init__(self, config: EngineConfig, encoder: PromptEncoder, max_model_len: int) -> None:
        """max_model_len: tokens of prompt and output, no more than the KV cache holds."""
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._max_logprobs = config.max_logprobs
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

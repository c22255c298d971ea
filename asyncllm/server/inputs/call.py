"""One HTTP call for text: its engine requests, the names in its response, its token counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncllm import __version__
from asyncllm.engine.text.prompt import PromptInput
from asyncllm.formats.events import AnswerParser
from asyncllm.lora import LoRARequest
from asyncllm.outputs import RequestOutput
from asyncllm.sampling_params import SamplingParams

SYSTEM_FINGERPRINT = f"asyncllm-{__version__}"


@dataclass(slots=True, frozen=True)
class Call:
    """Choice i of prompt p has index p * n + i in the response.

    new_parser      makes a choice's parser; None where all of a choice is content
    wants_outputs   each delta comes as an output, with its token ids, never as text alone
    prompt_only     the answer is the prompt: the token that the engine makes is not counted
    shows_cached    its usage reports how many prompt tokens the prefix cache had
    client_name     maps an engine's field to the client's name: some errors come late
    """

    id: str
    model: str
    prompts: list[PromptInput]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: LoRARequest | None = None
    new_parser: Callable[[], AnswerParser] | None = None
    return_token_ids: bool = False
    wants_outputs: bool = False
    prompt_only: bool = False
    shows_cached: bool = True
    client_name: Callable[[str | None], str | None] = lambda name: name
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def request_ids(self) -> list[str]:
        """The engine's request ids, one per prompt."""
        return [self.request_id(index) for index in range(len(self.prompts))]

    def request_id(self, index: int) -> str:
        return f"{self.id}-{index}"

    @property
    def has_logprobs(self) -> bool:
        """Log-probabilities may be 100,000s of entries."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated: the choices are among them."""
        return len(self.prompts) * self.params.num_sequences


def new_id(prefix: str) -> str:
    """A new id, never a client's own: it names a request inside the engine."""
    return f"{prefix}-{os.urandom(16).hex()}"


class Usage:
    """Token counts of a call. Prompts are counted once, however many choices they have."""

    __slots__ = (
        "_cached_tokens",
        "_prompt_only",
        "_prompt_tokens",
        "_shows_cached",
        "completion_tokens",
        "reasoning_tokens",
    )

    def __init__(self, shows_cached: bool = True, prompt_only: bool = False) -> None:
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of the completion's
        self._shows_cached = shows_cached
        self._prompt_only = prompt_only
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._prompt_tokens:
            self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
            self._cached_tokens[prompt_index] = output.num_cached_tokens
        if self._prompt_only:
            return
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
        self.completion_tokens += output.num_unreturned_tokens

    def as_dict(self) -> dict[str, Any]:
        usage = usage_dict(
            sum(self._prompt_tokens.values()),
            self.completion_tokens,
            sum(self._cached_tokens.values()) if self._shows_cached else None,
        )
        usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def of_choice(self, prompt_index: int, completion_tokens: int) -> dict[str, Any]:
        """Usage of one choice so far, for `continuous_usage_stats`."""
        return usage_dict(
            self._prompt_tokens[prompt_index],
            completion_tokens,
            self._cached_tokens[prompt_index] if self._shows_cached else None,
        )


def usage_dict(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": (
            None if cached_tokens is None else {"cached_tokens": cached_tokens}
        ),
    }

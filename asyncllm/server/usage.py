"""Token counts of one call, as `usage` reports them."""

from __future__ import annotations

from typing import Any

from asyncllm.outputs import RequestOutput


class Usage:
    """Prompts are counted once, however many answers they have."""

    __slots__ = (
        "_cached_tokens",
        "_prompt_tokens",
        "_shows_cached",
        "completion_tokens",
        "reasoning_tokens",
    )

    def __init__(self, shows_cached: bool = True) -> None:
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of the completion's
        self._shows_cached = shows_cached
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._prompt_tokens:
            self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
            self._cached_tokens[prompt_index] = output.num_cached_tokens
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
        """One choice so far, for `continuous_usage_stats`."""
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

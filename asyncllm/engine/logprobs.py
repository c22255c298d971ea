"""Log-probabilities: the limit of a request, and their conversion to vLLM's dictionaries.

They are kept until the request ends, and rendered in one piece. An entry is a token with its
log-probability: each sampled token and the `logprobs` most likely ones at its position. It takes
340 bytes if it is alone at its position, 140 with 20 others, and as much again while it is
rendered. So MAX_OUTPUT_LOGPROB_ENTRIES entries take 0.3 to 0.8 GB. That is 49,932 tokens with
logprobs=20, and more than the context window of most models with logprobs=5. A request without
max_tokens is limited to as many tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, overload

from asyncllm.errors import InvalidRequestError
from asyncllm.outputs import Logprob, PromptLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import TokenLogprobs

MAX_OUTPUT_LOGPROB_ENTRIES = 2**20
MAX_PROMPT_LOGPROB_ENTRIES = 2**19  # of one request, rendered in one piece
TokenText = Callable[[int], str | None]  # token id -> its text in a request's logprobs


def most_output_tokens(params: SamplingParams, num_requests: int = 1) -> int:
    """The most tokens of each answer of `num_requests`; `sys.maxsize` without logprobs."""
    entries = _entries_per_token(params) * num_requests
    return MAX_OUTPUT_LOGPROB_ENTRIES // entries if entries else sys.maxsize


def check_prompt_logprobs(num_top: int, num_prompt: int) -> None:
    """Raises `InvalidRequestError` if a prompt of `num_prompt` tokens has too many entries."""
    num_entries = num_prompt * (1 + num_top)
    if num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"prompt_logprobs of this prompt are {num_entries} entries, at most "
            f"{MAX_PROMPT_LOGPROB_ENTRIES}: ask for fewer, or send less",
            "prompt_logprobs",
        )


def check_output_logprobs(params: SamplingParams, max_tokens: int, num_requests: int = 1) -> None:
    """Raises `InvalidRequestError` if answers of `max_tokens` could have too many entries."""
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
    """Entries of all answers. Choosing among answers needs each token's own logprob."""
    chooses = params.use_beam_search or (params.best_of or 0) > params.n
    if params.num_logprobs is None and not chooses:
        return 0
    return params.num_sequences * (1 + (params.num_logprobs or 0))


def _param(params: SamplingParams) -> str:
    if params.num_logprobs is not None:
        return "logprob_token_ids" if params.logprob_token_ids else "logprobs"
    return "n" if params.best_of is None else "best_of"


def no_text(token_id: int) -> None:
    """The `TokenText` of a request without detokenization."""


def logprob_dict(
    token_id: int,
    logprobs: TokenLogprobs,
    num_top: int,
    text_of: TokenText,
    are_ranked: bool = True,
) -> dict[int, Logprob]:
    """The token itself, then the `num_top` others; the token may be one of them.

    are_ranked: the others are the most likely tokens. Otherwise the request named them, and their
    ranks are unknown.
    """
    result = {token_id: Logprob(logprobs.logprob, logprobs.rank, text_of(token_id))}
    for i, top_id in enumerate(logprobs.top_ids[:num_top]):
        if top_id != token_id:
            rank = i + 1 if are_ranked else None
            result[top_id] = Logprob(logprobs.top_logprobs[i], rank, text_of(top_id))
    return result


class LazyPromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """One entry per prompt position; the first is None, as nothing comes before it.

    Entries are made whenever they are read: making half a million at once would block the loop.
    Copying or unpickling it gives a plain list.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        prompt_ids: list[int],
        chunks: Sequence[TokenLogprobs],
        num_top: int,
        text_of: TokenText,
    ) -> None:
        """A prompt that was recomputed has reported its logprobs twice: the last ones count."""
        self._prompt_ids = prompt_ids
        self._known = chunks[max(len(chunks) - (len(prompt_ids) - 1), 0) :]
        self._num_unknown = len(prompt_ids) - len(self._known)
        self._num_top = num_top
        self._text_of = text_of

    def __len__(self) -> int:
        return len(self._prompt_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> PromptLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | PromptLogprobs | None:
        places = range(len(self))[index]
        return self._entry(places) if isinstance(places, int) else list(map(self._entry, places))

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        if place < self._num_unknown:
            return None
        logprobs = self._known[place - self._num_unknown]
        return logprob_dict(self._prompt_ids[place], logprobs, self._num_top, self._text_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)

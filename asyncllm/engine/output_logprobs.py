"""Log-probabilities as the worker reports them, made into vLLM's dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from asyncllm.outputs import Logprob, PromptLogprobs
from asyncllm.types import TokenLogprobs

TokenText = Callable[[int], str | None]  # how a request's log-probabilities show a token


def no_text(token_id: int) -> None:
    """For a request that wants no text."""


def logprob_dict(
    token_id: int,
    logprobs: TokenLogprobs,
    num_top: int,
    text_of: TokenText,
    are_ranked: bool = True,
) -> dict[int, Logprob]:
    """The token itself first, then the `num_top` most likely; it may be one of them.

    Without `are_ranked` these are tokens that the request named: nobody knows their ranks.
    """
    result = {token_id: Logprob(logprobs.logprob, logprobs.rank, text_of(token_id))}
    for i, top_id in enumerate(logprobs.top_ids[:num_top]):
        if top_id != token_id:
            rank = i + 1 if are_ranked else None
            result[top_id] = Logprob(logprobs.top_logprobs[i], rank, text_of(top_id))
    return result


class LazyPromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """One entry per prompt position, the first None: nothing comes before it.

    An entry is made when it is read, each time: half a million at once would hold the loop.
    A copy, or what a pickle gives back, is a plain list.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        prompt_ids: list[int],
        chunks: Sequence[TokenLogprobs],
        num_top: int,
        text_of: TokenText,
    ) -> None:
        """The last of `chunks` count: a prompt that is computed again reports all of it again."""
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

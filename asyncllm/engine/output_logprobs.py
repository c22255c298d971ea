"""Log-probabilities as the worker reports them, made into vLLM's dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.engine.tokenizer import Tokenizer
from asyncllm.outputs import Logprob, PromptLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import TokenLogprobs

TokenText = Callable[[int], str | None]


def token_text(params: SamplingParams, tokenizer: Tokenizer | None) -> TokenText:
    """How a request's log-probabilities show a token; as None where it wants no text."""
    if params.detokenize and tokenizer is not None:
        return tokenizer.token_text
    return lambda token_id: None


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


def prompt_logprob_dicts(
    prompt_ids: list[int], chunks: Sequence[TokenLogprobs], num_top: int, text_of: TokenText
) -> PromptLogprobs:
    """One entry per prompt position, the first None: nothing comes before it.

    The last entries count: a prompt that was preempted and computed again reports all of it again.
    """
    known = chunks[max(len(chunks) - (len(prompt_ids) - 1), 0) :]
    result: PromptLogprobs = [None] * (len(prompt_ids) - len(known))
    for token_id, logprobs in zip(prompt_ids[len(result) :], known, strict=True):
        result.append(logprob_dict(token_id, logprobs, num_top, text_of))
    return result

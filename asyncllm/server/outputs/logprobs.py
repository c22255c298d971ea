"""Log-probabilities on the wire: OpenAI's chat form, its legacy completions form, and vLLM's.

JSON has no infinity: a logprob below LOWEST_LOGPROB is reported as LOWEST_LOGPROB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.outputs import Logprob, PromptLogprobs, SampleLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.server.http.bodies import SLICE, sliced_json

LOWEST_LOGPROB = -9999.0


class TokenNames:
    """The names of tokens in logprobs: their text, or without a `tokenizer` "token_id:7"."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int, logprob: Logprob | None) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.token_text(token_id)

    def utf8(self, token_id: int, text: str) -> list[int]:
        """The token's own bytes, which may be part of a character."""
        known = self._tokenizer
        return list(text.encode() if known is None else known.token_bytes(token_id))


def chat_logprobs(
    positions: SampleLogprobs, params: SamplingParams, names: TokenNames, least_top: int = 0
) -> dict[str, Any]:
    """least_top: entries of `top_logprobs` where fewer are asked for."""
    num_top = max(params.logprobs or 0, least_top)
    content = (_chat_position(position, params, num_top, names) for position in positions)
    is_long = len(positions) > SLICE
    return {"content": sliced_json(content) if is_long else list(content), "refusal": None}


def _chat_position(
    position: dict[int, Logprob], params: SamplingParams, num_top: int, names: TokenNames
) -> dict[str, Any]:
    """`top_logprobs`: the most likely; with `logprob_token_ids` the sampled token and those."""
    sampled = next(iter(position))
    entry = _chat_token(sampled, position[sampled], names)
    others = list(position.items())
    if not params.logprob_token_ids:
        # The sampled token need not be among the most likely: sort it to its place, or out.
        others = sorted(others, key=lambda item: item[1].rank or 0)[:num_top]
    entry["top_logprobs"] = [_chat_token(*item, names) for item in others]
    return entry


def _chat_token(token_id: int, logprob: Logprob, names: TokenNames) -> dict[str, Any]:
    text = names.text(token_id, logprob)
    return {
        "token": text,
        "logprob": max(logprob.logprob, LOWEST_LOGPROB),
        "bytes": names.utf8(token_id, text),
    }


class LegacyLogprobs:
    """The completions form of one choice. Text offsets are positions in the returned text."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def prompt(
        self, token_ids: list[int], positions: PromptLogprobs | None
    ) -> dict[str, list[Any]]:
        known = [None] * len(token_ids) if positions is None else positions
        return self._render(zip(token_ids, known, strict=True))

    def output(self, positions: SampleLogprobs) -> dict[str, list[Any]]:
        return self._render((next(iter(position)), position) for position in positions)

    def _render(
        self, tokens: Iterable[tuple[int, dict[int, Logprob] | None]]
    ) -> dict[str, list[Any]]:
        names = self._names
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, position in tokens:
            own = position[token_id] if position else None
            text = names.text(token_id, own)
            result["text_offset"].append(self._offset)
            result["tokens"].append(text)
            result["token_logprobs"].append(max(own.logprob, LOWEST_LOGPROB) if own else None)
            result["top_logprobs"].append(
                {names.text(i, p): max(p.logprob, LOWEST_LOGPROB) for i, p in position.items()}
                if position
                else None
            )
            self._offset += len(text)
        return result


def prompt_logprobs(positions: PromptLogprobs | None, names: TokenNames) -> orjson.Fragment | None:
    """vLLM's own field: for each prompt token, its candidates by id; null for the first."""
    if positions is None:
        return None
    return sliced_json(position and _by_id(position, names) for position in positions)


def _by_id(position: dict[int, Logprob], names: TokenNames) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": max(logprob.logprob, LOWEST_LOGPROB),
            "rank": logprob.rank,
            "decoded_token": names.text(token_id, logprob),
        }
        for token_id, logprob in position.items()
    }
